// SPDX-License-Identifier: Apache-2.0
// Picks the CPU backend at run time.

#include <cstdlib>

#include "ds/kernels/ops.h"

namespace ds {
namespace cpu {
namespace avx2 {
const OpTable& table() noexcept;
}
namespace avx512 {
const OpTable& table() noexcept;
}
}  // namespace cpu

const OpTable* cpu_ops(std::string_view isa) noexcept {
  if (isa == "auto") {
    if (const char* chosen = std::getenv("DS_ISA"); chosen != nullptr && std::string_view(chosen) != "auto")
      return cpu_ops(chosen);
    for (const char* candidate : {"avx512", "avx2"}) {
      if (const OpTable* t = cpu_ops(candidate)) return t;
    }
    return nullptr;
  }
  if (isa == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &cpu::avx2::table();
  if (isa == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return &cpu::avx512::table();
  }
  return nullptr;
}

}  // namespace ds
