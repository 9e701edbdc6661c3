// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"

#define DS_STRINGIZE_(x) #x
#define DS_STRINGIZE(x) DS_STRINGIZE_(x)

namespace ds::cpu::DS_ISA_NAMESPACE {

const OpTable& table() noexcept {
  static constexpr OpTable ops = {
      .name = "cpu." DS_STRINGIZE(DS_ISA_NAMESPACE),
      .matmul = nullptr,
      .column_sum = nullptr,
      .layernorm_fwd = nullptr,
      .layernorm_bwd = nullptr,
      .rmsnorm_fwd = nullptr,
      .rmsnorm_bwd = nullptr,
      .activation_fwd = nullptr,
      .activation_bwd = nullptr,
      .swiglu_fwd = nullptr,
      .swiglu_bwd = nullptr,
      .rope = nullptr,
      .embedding_fwd = nullptr,
      .embedding_bwd = nullptr,
      .attention_fwd = nullptr,
      .attention_bwd = nullptr,
      .linear_cross_entropy = nullptr,
      .dropout = nullptr,
      .add = nullptr,
      .cast = nullptr,
      .fold = nullptr,
      .max_abs_bits = nullptr,
      .sum_squares = nullptr,
      .adamw = nullptr,
  };
  return ops;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
