// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"

#define DS_STRINGIZE_(x) #x
#define DS_STRINGIZE(x) DS_STRINGIZE_(x)

namespace ds::cpu::DS_ISA_NAMESPACE {

const OpTable& table() noexcept {
  static constexpr OpTable ops = {
      .name = "cpu." DS_STRINGIZE(DS_ISA_NAMESPACE),
#include "op_rows.inc"
  };
  return ops;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
