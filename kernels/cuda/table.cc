// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops.h"

#include "cuda/context.h"

namespace ds::cuda {

const OpTable& ops() noexcept {
  static constexpr OpTable table = {
      .name = "cuda",
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
  return table;
}

}  // namespace ds::cuda
