// SPDX-License-Identifier: Apache-2.0
#include "cpu/isa/kernels.h"

#define DS_STRINGIZE_(x) #x
#define DS_STRINGIZE(x) DS_STRINGIZE_(x)

namespace ds::cpu::DS_ISA_NAMESPACE {

const OpTable& table() noexcept {
  static constexpr OpTable ops = {
      .name = "cpu." DS_STRINGIZE(DS_ISA_NAMESPACE),
      .matmul = matmul,
      .column_sum = column_sum,
      .layernorm_fwd = layernorm_fwd,
      .layernorm_bwd = layernorm_bwd,
      .rmsnorm_fwd = rmsnorm_fwd,
      .rmsnorm_bwd = rmsnorm_bwd,
      .activation_fwd = activation_fwd,
      .activation_bwd = activation_bwd,
      .swiglu_fwd = swiglu_fwd,
      .swiglu_bwd = swiglu_bwd,
      .rope = rope,
      .embedding_fwd = embedding_fwd,
      .embedding_bwd = embedding_bwd,
      .attention_fwd = attention_fwd,
      .attention_bwd = attention_bwd,
      .linear_cross_entropy = linear_cross_entropy,
      .dropout = dropout,
      .add = add,
      .cast = cast,
      .fold = fold,
      .max_abs = max_abs,
      .sum_squares = sum_squares,
      .sum = sum,
      .judge = judge,
      .adamw = adamw,
  };
  return ops;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
