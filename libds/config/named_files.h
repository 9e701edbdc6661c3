// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files that a run reads because its configuration names them. They are checked before they are opened, and no
// output may replace one.

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
// Some may not exist: with cuda.autotune the first run creates the file of cuda.autotune_file.
std::vector<NamedFile> named_inputs(const Config& config);
// The reason why it cannot be an input, such as "is a directory, not a file". Empty if there is none, or no such file.
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
