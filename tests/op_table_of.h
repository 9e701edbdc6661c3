// SPDX-License-Identifier: Apache-2.0
#pragma once
// An OpTable whose ops are made from the members themselves: Op<&OpTable::matmul>::run and so on.

#include "ds/kernels/ops.h"

namespace ds::testing {

template <template <auto member> class Op>
constexpr OpTable op_table_of(std::string_view name) {
  return {
      .name = name,
      .matmul = Op<&OpTable::matmul>::run,
      .column_sum = Op<&OpTable::column_sum>::run,
      .layernorm_fwd = Op<&OpTable::layernorm_fwd>::run,
      .layernorm_bwd = Op<&OpTable::layernorm_bwd>::run,
      .rmsnorm_fwd = Op<&OpTable::rmsnorm_fwd>::run,
      .rmsnorm_bwd = Op<&OpTable::rmsnorm_bwd>::run,
      .activation_fwd = Op<&OpTable::activation_fwd>::run,
      .activation_bwd = Op<&OpTable::activation_bwd>::run,
      .swiglu_fwd = Op<&OpTable::swiglu_fwd>::run,
      .swiglu_bwd = Op<&OpTable::swiglu_bwd>::run,
      .rope = Op<&OpTable::rope>::run,
      .embedding_fwd = Op<&OpTable::embedding_fwd>::run,
      .embedding_bwd = Op<&OpTable::embedding_bwd>::run,
      .route = Op<&OpTable::route>::run,
      .weigh_choices = Op<&OpTable::weigh_choices>::run,
      .route_grad = Op<&OpTable::route_grad>::run,
      .router_stats = Op<&OpTable::router_stats>::run,
      .router_loss = Op<&OpTable::router_loss>::run,
      .balance_experts = Op<&OpTable::balance_experts>::run,
      .drop_choices = Op<&OpTable::drop_choices>::run,
      .add_noise = Op<&OpTable::add_noise>::run,
      .sort_choices = Op<&OpTable::sort_choices>::run,
      .combine_rows = Op<&OpTable::combine_rows>::run,
      .combine_rows_grad = Op<&OpTable::combine_rows_grad>::run,
      .grouped_matmul = Op<&OpTable::grouped_matmul>::run,
      .grouped_matmul_grad = Op<&OpTable::grouped_matmul_grad>::run,
      .grouped_bias = Op<&OpTable::grouped_bias>::run,
      .grouped_bias_grad = Op<&OpTable::grouped_bias_grad>::run,
      .attention_fwd = Op<&OpTable::attention_fwd>::run,
      .attention_bwd = Op<&OpTable::attention_bwd>::run,
      .attention_merge = Op<&OpTable::attention_merge>::run,
      .evoformer_attention_fwd = Op<&OpTable::evoformer_attention_fwd>::run,
      .evoformer_attention_bwd = Op<&OpTable::evoformer_attention_bwd>::run,
      .linear_cross_entropy = Op<&OpTable::linear_cross_entropy>::run,
      .vocab_max = Op<&OpTable::vocab_max>::run,
      .vocab_sums = Op<&OpTable::vocab_sums>::run,
      .vocab_grad = Op<&OpTable::vocab_grad>::run,
      .sample = Op<&OpTable::sample>::run,
      .dropout = Op<&OpTable::dropout>::run,
      .add = Op<&OpTable::add>::run,
      .bias_residual = Op<&OpTable::bias_residual>::run,
      .cast = Op<&OpTable::cast>::run,
      .copy_heads = Op<&OpTable::copy_heads>::run,
      .append_keys = Op<&OpTable::append_keys>::run,
      .fold = Op<&OpTable::fold>::run,
      .quantize = Op<&OpTable::quantize>::run,
      .quantize_signs = Op<&OpTable::quantize_signs>::run,
      .dequantize = Op<&OpTable::dequantize>::run,
      .dequantize_fold = Op<&OpTable::dequantize_fold>::run,
      .quantize_fp8 = Op<&OpTable::quantize_fp8>::run,
      .matmul_fp8 = Op<&OpTable::matmul_fp8>::run,
      .max_abs_fp8 = Op<&OpTable::max_abs_fp8>::run,
      .encode_fp8 = Op<&OpTable::encode_fp8>::run,
      .decode_fp8 = Op<&OpTable::decode_fp8>::run,
      .max_abs = Op<&OpTable::max_abs>::run,
      .nonzero_rows = Op<&OpTable::nonzero_rows>::run,
      .sum_squares = Op<&OpTable::sum_squares>::run,
      .sum = Op<&OpTable::sum>::run,
      .judge = Op<&OpTable::judge>::run,
      .scaled_sum = Op<&OpTable::scaled_sum>::run,
      .norm_ratios = Op<&OpTable::norm_ratios>::run,
      .update = Op<&OpTable::update>::run,
  };
}

}  // namespace ds::testing
