// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ops of the CUDA backend, one .cu file each or per family. Contracts: ds/kernels/ops.h.

#include "ds/kernels/ops.h"

namespace ds::cuda {

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams&, Stream&) noexcept;
void column_sum(TensorView out, TensorView x, Stream&) noexcept;
void layernorm_fwd(TensorView y, TensorView mean, TensorView rstd, TensorView x, TensorView weight, TensorView bias,
                   float eps, Stream&) noexcept;
void layernorm_bwd(TensorView dx, TensorView dweight, TensorView dbias, TensorView dy, TensorView residual_grad,
                   TensorView x, TensorView weight, TensorView mean, TensorView rstd, Stream&) noexcept;
void rmsnorm_fwd(TensorView y, TensorView rstd, TensorView x, TensorView weight, float eps, Stream&) noexcept;
void rmsnorm_bwd(TensorView dx, TensorView dweight, TensorView dy, TensorView residual_grad, TensorView x,
                 TensorView weight, TensorView rstd, Stream&) noexcept;
void activation_fwd(TensorView y, TensorView x, Activation, Stream&) noexcept;
void activation_bwd(TensorView dx, TensorView dy, TensorView x, Activation, Stream&) noexcept;
void swiglu_fwd(TensorView y, TensorView gate, TensorView up, Stream&) noexcept;
void swiglu_bwd(TensorView dgate, TensorView dup, TensorView dy, TensorView gate, TensorView up, Stream&) noexcept;
void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, bool inverse,
          Stream&) noexcept;
void embedding_fwd(TensorView y, TensorView table, TensorView ids, bool accumulate, Stream&) noexcept;
void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, bool accumulate, Stream&) noexcept;
void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams&,
                   Stream&) noexcept;
void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams&, Stream&) noexcept;
void own_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams&,
                       Stream&) noexcept;
void own_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                       TensorView v, TensorView o, TensorView lse, const AttentionParams&, Stream&) noexcept;
void linear_cross_entropy(TensorView losses, TensorView dh, TensorView dweight, TensorView h, TensorView weight,
                          TensorView targets, TensorView logits, const CrossEntropyParams&, Stream&) noexcept;
void dropout(TensorView y, TensorView x, float p, RngKey rng, i64 offset, Stream&) noexcept;
void add(TensorView y, TensorView a, TensorView b, Stream&) noexcept;
void cast(TensorView y, TensorView x, Stream&) noexcept;
void fold(TensorView dst, std::span<const TensorView> sources, bool accumulate, Stream&) noexcept;
void max_abs(TensorView result, TensorView x, Stream&) noexcept;
void sum_squares(TensorView result, TensorView x, TensorView max_abs, Stream&) noexcept;
void sum(TensorView result, TensorView x, double factor, Stream&) noexcept;
void judge(GradVerdict* verdict, TensorView max_abs, TensorView sum, const JudgeParams&, Stream&) noexcept;
void adamw(std::span<const AdamWTensor> tensors, const GradVerdict* verdict, const AdamWParams&, Stream&) noexcept;

}  // namespace ds::cuda
