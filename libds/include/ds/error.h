// SPDX-License-Identifier: Apache-2.0
#pragma once
// One exception type with a closed list of causes. The code that first knows of an error words the message (file, key,
// rank); its callers pass it on.

#include <source_location>
#include <stdexcept>
#include <string>

#define DS_API __attribute__((visibility("default")))

namespace ds {

enum class Errc {
  Config,       // a mistake in options or configuration: nothing was started or written
  Unavailable,  // a feature that this machine or this version lacks
  Corrupt,      // data that contradicts itself or its checksum
  Mismatch,     // intact data that does not belong here (another model, another run)
  Io,           // the operating system refused an operation
  OutOfMemory,
  Comm,         // a peer failed or disagreed
  Timeout,      // a peer did not arrive in time
  Numeric,      // a non-finite number where none is allowed
  Interrupted,  // stopped by a signal, with a checkpoint committed
  Internal,     // a bug in libds
};

// Exit code of a tool for each cause; see ds(7).
constexpr int exit_code(Errc e) noexcept {
  switch (e) {
    case Errc::Config: return 2;
    case Errc::Corrupt:
    case Errc::Mismatch: return 3;
    case Errc::Unavailable:
    case Errc::OutOfMemory: return 4;
    case Errc::Interrupted: return 75;
    case Errc::Io:
    case Errc::Comm:
    case Errc::Timeout:
    case Errc::Numeric:
    case Errc::Internal: return 1;
  }
  return 1;
}

class DS_API Error : public std::runtime_error {
 public:
  // rank: the rank at fault if known, else -1.
  Error(Errc code, const std::string& message, int rank = -1,
        std::source_location where = std::source_location::current());
  Errc code() const noexcept { return code_; }
  int rank() const noexcept { return rank_; }
  const std::source_location& where() const noexcept { return where_; }

 private:
  Errc code_;
  int rank_;
  std::source_location where_;
};

}  // namespace ds
