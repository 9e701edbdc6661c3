// SPDX-License-Identifier: Apache-2.0
// DS_VERSION and DS_FEATURES come from the build system, which knows the libraries that it found.

#include "ds/version.h"

#include <fmt/format.h>

#include "ds/kernels/ops.h"

namespace ds {

std::string_view version() noexcept { return DS_VERSION; }

std::string version_text() {
#if defined(__clang__)
  constexpr std::string_view compiler = "clang++ " __clang_version__;
#else
  constexpr std::string_view compiler = "g++ " __VERSION__;
#endif
  const OpTable* ops = cpu_ops();
  return fmt::format("compiler: {}\nfeatures: {}\nkernels: {}\n", compiler, DS_FEATURES,
                     ops != nullptr ? ops->name : "none for this CPU, or the DS_ISA of this environment");
}

}  // namespace ds
