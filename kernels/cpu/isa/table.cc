// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm.h"
#include "cpu/isa/kernels.h"

#define DS_STRINGIZE_(x) #x
#define DS_STRINGIZE(x) DS_STRINGIZE_(x)

namespace ds::cpu::DS_ISA_NAMESPACE {

const OpTable& table() noexcept {
  static constexpr OpTable ops = {
      .name = "cpu." DS_STRINGIZE(DS_ISA_NAMESPACE),
      .pack_matrix = pack_matrix,
      .panels = {.rows = kNR},
      .panels_bf16 = {.rows = kNR, .depth = ProductOf<bf16>::type::kDepth},
      .codes = true,
#include "op_rows.inc"
  };
  return ops;
}

void set_scratch_ops(OpTable& ops) noexcept {
  ops.pack_matrix = pack_matrix_scratch;
  ops.panels = table().panels;
  ops.panels_bf16 = table().panels_bf16;
  ops.matmul = matmul_scratch;
  ops.matmul_fp8 = matmul_fp8_scratch;
  ops.layernorm_bwd = layernorm_bwd_scratch;
  ops.rmsnorm_bwd = rmsnorm_bwd_scratch;
  ops.embedding_bwd = embedding_bwd_scratch;
  ops.router_stats = router_stats_scratch;
  ops.drop_choices = drop_choices_scratch;
  ops.grouped_matmul = grouped_matmul_scratch;
  ops.grouped_matmul_grad = grouped_matmul_grad_scratch;
  ops.attention_fwd = attention_fwd_scratch;
  ops.attention_bwd = attention_bwd_scratch;
  ops.evoformer_attention_fwd = evoformer_attention_fwd_scratch;
  ops.evoformer_attention_bwd = evoformer_attention_bwd_scratch;
  ops.linear_cross_entropy = linear_cross_entropy_scratch;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
