// SPDX-License-Identifier: Apache-2.0
#pragma once
// The SIMD kernels of one instruction set. Contracts: ds/kernels/ops.h.

#include "cpu/epilogue.h"
#include "cpu/scratch.h"
#include "cpu/simd.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

#include "op_functions.inc"
void pack_matrix(TensorView m, Stream&) noexcept;

// quantize for one row as a block of 8-bit codes.
void quantize_row(u8* codes, float* scale, const void* x, DType dtype, i64 n) noexcept;

// matmul for b of codes, and its scratch.
void multiply_by_codes(const Epilogue& e, TensorView a, TensorView b, ThreadPool&) noexcept;
size_t multiply_by_codes_scratch(DType work, i64 M, const TensorView& b, int threads) noexcept;

// The parts of matmul and linear_cross_entropy that an engine with its own products shares.
FinishFn finish_for(DType c, DType work) noexcept;
void linear_cross_entropy_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight, TensorView dbias,
                             TensorView h, TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                             const CrossEntropyParams&, Stream&) noexcept;

// The ops that reserve scratch, as variants that only report the amount.
void pack_matrix_scratch(TensorView m, Stream&) noexcept;
void matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
                    const MatmulParams&, Stream&) noexcept;
void matmul_fp8_scratch(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales,
                        TensorView bias, TensorView residual, const Fp8MatmulParams&, Stream&) noexcept;
void layernorm_bwd_scratch(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                           TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream&) noexcept;
void rmsnorm_bwd_scratch(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                         TensorView weight, TensorView rstd, Stream&) noexcept;
void embedding_bwd_scratch(TensorView dtable, TensorView dy, TensorView ids, i64 first_id, bool accumulate,
                           Stream&) noexcept;
void router_stats_scratch(TensorView stats, TensorView chosen, TensorView kept, TensorView scores, TensorView logits,
                          TensorView targets, const RouterParams&, const RouterLossParams&, Stream&) noexcept;
void drop_choices_scratch(TensorView kept, TensorView chosen, TensorView priority, const CapacityParams&,
                          Stream&) noexcept;
void grouped_matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView offsets, bool trans_b,
                            Stream&) noexcept;
void grouped_matmul_grad_scratch(TensorView c, TensorView a, TensorView b, TensorView offsets, bool accumulate,
                                 Stream&) noexcept;
void attention_fwd_scratch(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
                           const AttentionParams&, Stream&) noexcept;
void attention_bwd_scratch(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                           TensorView v, TensorView o, TensorView lse, const AttentionParams&, Stream&) noexcept;
void evoformer_attention_fwd_scratch(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
                                     TensorView bias1, TensorView bias2, const EvoformerParams&, Stream&) noexcept;
void evoformer_attention_bwd_scratch(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                                     TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o,
                                     TensorView lse, TensorView bias1, TensorView bias2, const EvoformerParams&,
                                     Stream&) noexcept;
void linear_cross_entropy_scratch(TensorView losses, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                                  TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                                  const CrossEntropyParams&, Stream&) noexcept;
// `product` is a matmul_scratch.
void linear_cross_entropy_scratch_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight,
                                     TensorView dbias, TensorView h, TensorView weight, TensorView bias,
                                     TensorView targets, TensorView logits, const CrossEntropyParams&,
                                     Stream&) noexcept;
void set_scratch_ops(OpTable& ops) noexcept;

const OpTable& table() noexcept;

}  // namespace ds::cpu::DS_ISA_NAMESPACE
