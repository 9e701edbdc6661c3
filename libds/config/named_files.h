// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files that a configuration names for a run to read: the one list of them, for checks of what they are and of what
// a run may write.

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"
#include "ds/error.h"

namespace ds {

struct NamedFile {
  std::string key;   // "data.train[1]", "data.train" if it names one, "model.path"
  std::string path;  // a name may stand for several files, such as Megatron's two
  bool may_be_directory = false;
};
// Some may not exist: the first run makes the file of cuda.autotune_file.
std::vector<NamedFile> named_inputs(const Config& config);
// Why it can never be read: "is a directory, not a file". Empty if it can be, or does not exist.
std::string why_not_input(const NamedFile& file);
// Returns read(). A file that cannot be opened is a mistake of the configuration: Errc::Io becomes Errc::Config. The
// messages of both get the key.
template <class Read>
auto read_named(std::string_view key, Read&& read) try {
  return read();
} catch (const Error& e) {
  if (e.code() != Errc::Io && e.code() != Errc::Config) throw;
  throw Error(Errc::Config, fmt::format("{}: {}", key, e.what()));
}

}  // namespace ds
