// SPDX-License-Identifier: Apache-2.0
// The op table that does nothing, for dry runs of a step.

#include "ds/kernels/ops.h"

namespace ds {
namespace {

// An op that does nothing, whatever its arguments.
struct Nothing {
  template <class... A>
  using Op = void (*)(A...) noexcept;
  template <class... A>
  constexpr operator Op<A...>() const noexcept {
    return [](A...) noexcept {};
  }
};

constexpr Nothing kNothing;
constexpr OpTable kNoOps = {.name = "none",
                            .codes = true,
                            .matmul = kNothing,
                            .column_sum = kNothing,
                            .layernorm_fwd = kNothing,
                            .layernorm_bwd = kNothing,
                            .rmsnorm_fwd = kNothing,
                            .rmsnorm_bwd = kNothing,
                            .activation_fwd = kNothing,
                            .activation_bwd = kNothing,
                            .swiglu_fwd = kNothing,
                            .swiglu_bwd = kNothing,
                            .rope = kNothing,
                            .embedding_fwd = kNothing,
                            .embedding_bwd = kNothing,
                            .route = kNothing,
                            .weigh_choices = kNothing,
                            .route_grad = kNothing,
                            .router_stats = kNothing,
                            .router_loss = kNothing,
                            .balance_experts = kNothing,
                            .drop_choices = kNothing,
                            .add_noise = kNothing,
                            .sort_choices = kNothing,
                            .combine_rows = kNothing,
                            .combine_rows_grad = kNothing,
                            .grouped_matmul = kNothing,
                            .grouped_matmul_grad = kNothing,
                            .grouped_bias = kNothing,
                            .grouped_bias_grad = kNothing,
                            .attention_fwd = kNothing,
                            .attention_bwd = kNothing,
                            .attention_merge = kNothing,
                            .evoformer_attention_fwd = kNothing,
                            .evoformer_attention_bwd = kNothing,
                            .linear_cross_entropy = kNothing,
                            .vocab_max = kNothing,
                            .vocab_sums = kNothing,
                            .vocab_grad = kNothing,
                            .sample = kNothing,
                            .dropout = kNothing,
                            .add = kNothing,
                            .bias_residual = kNothing,
                            .cast = kNothing,
                            .copy_heads = kNothing,
                            .append_keys = kNothing,
                            .fold = kNothing,
                            .quantize = kNothing,
                            .quantize_signs = kNothing,
                            .dequantize = kNothing,
                            .dequantize_fold = kNothing,
                            .quantize_fp8 = kNothing,
                            .matmul_fp8 = kNothing,
                            .max_abs_fp8 = kNothing,
                            .encode_fp8 = kNothing,
                            .decode_fp8 = kNothing,
                            .max_abs = kNothing,
                            .nonzero_rows = kNothing,
                            .sum_squares = kNothing,
                            .sum = kNothing,
                            .judge = kNothing,
                            .scaled_sum = kNothing,
                            .norm_ratios = kNothing,
                            .update = kNothing};

}  // namespace

const OpTable& no_ops() noexcept { return kNoOps; }

}  // namespace ds
