// SPDX-License-Identifier: Apache-2.0
// Ops that note the temporary memory that the CUDA backend would take for the same arguments, and the kernels that
// would compute its attention. They run without CUDA.

#include <algorithm>
#include <array>
#include <span>

#include "cuda/attention_cudnn.h"
#include "cuda/embedding_plan.h"
#include "cuda/logits.h"
#include "cuda/matmul.h"
#include "cuda/row_matmul.h"
#include "cuda/scratch_plan.h"
#include "ds/kernels/gpu_meter.h"

namespace ds {
namespace cuda {
namespace {

GpuMeter& meter(Stream& stream) noexcept { return *static_cast<GpuMeter*>(stream.native); }
void note(Stream& stream, i64 bytes) noexcept { meter(stream).most = std::max(meter(stream).most, bytes); }

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream& stream) noexcept {
  if (c.dim(0) == 0 || c.dim(1) == 0) return;
  MatmulCall call{c, a, b, bias, preact, residual, p};
  if (is_row_matmul(call)) return note(stream, plan_row_matmul(call, false).scratch_bytes);
  std::array<MatmulCall, 2> parts;
  if (const int count = split_ragged(call, parts); count > 0) {
    for (const MatmulCall& x : std::span(parts).first(static_cast<size_t>(count)))
      matmul(x.c, x.a, x.b, x.bias, x.preact, x.residual, x.params, stream);
    return;
  }
  // The first step is the largest. cuBLASLt is taken to have an algorithm for every fused product.
  const MatmulStep step = plan_matmul(p.rowwise ? rows_from(call, 0, 1) : call, /*fuse=*/true);
  meter(stream).multiplies = true;
  note(stream, step.scratch_bytes);
}

void grouped_matmul(TensorView c, TensorView a, TensorView b, TensorView, bool, Stream& stream) noexcept {
  if (c.numel() > 0) note(stream, plan_row_matmul({c, a, b, {}, {}, {}, {}}, true).scratch_bytes);
}

void matmul_fp8(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                TensorView residual, const Fp8MatmulParams& p, Stream& stream) noexcept {
  if (c.dim(0) == 0 || c.dim(1) == 0) return;
  const MatmulStep step = plan_matmul_fp8({c, a, a_scales, b, b_scales, bias, residual, p}, /*fuse=*/true);
  meter(stream).multiplies = true;
  note(stream, step.scratch_bytes);
}

void column_sum(TensorView out, TensorView x, bool, Stream& stream) noexcept {
  const i64 N = out.numel();
  if (N > 0) note(stream, scratch::Slices::of(x.dim(0), N).bytes(N));
}

void norm_bwd(const TensorView& x, i64 parts, Stream& stream) noexcept {
  const i64 R = x.dim(0), C = x.dim(1);
  const scratch::NormPlan plan = scratch::norm_backward_plan(C, 16 / static_cast<int>(dtype_bytes(x.dtype)));
  note(stream, scratch::NormStrips::of(R, plan).bytes(C, parts));
}

void embedding_bwd(TensorView dtable, TensorView dy, TensorView, i64, bool, Stream& stream) noexcept {
  if (dy.dim(0) > 0) note(stream, static_cast<i64>(EmbeddingPlan::of(dy.dim(0), dtable.dim(0) + 1).bytes));
}

// True if cuDNN computes the call.
bool by_cudnn(const cudnn::AttentionCall& call, Stream& stream) noexcept {
  GpuMeter& m = meter(stream);
  const char* const why = !m.kernels.cudnn ? "no cuDNN" : cudnn::refusal(call);
  if (why != nullptr) {
    m.own_attention = true;
    if (m.refusal == nullptr) m.refusal = why;
    return false;
  }
  const AttentionShape shape = cudnn::shape_of(call);
  if (std::find(m.cudnn.begin(), m.cudnn.end(), shape) == m.cudnn.end()) m.cudnn.push_back(shape);
  note(stream, cudnn::scratch_bytes(shape, m.kernels.compute_capability));
  return true;
}

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  if (by_cudnn(cudnn::forward_call(o, lse, q, k, v, p), stream) || !attention::is_by_row(p, k)) return;
  note(stream, scratch::attention_rows_bytes(attention::RowPlan::of(q, k, p), v.dim(3)));
}

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  if (!by_cudnn(cudnn::backward_call(dq, dk, dv, dout, q, k, v, o, lse, p), stream))
    note(stream, scratch::attention_bwd_bytes(q.dim(0), q.dim(1), q.dim(2)));
}

void evoformer_attention_fwd(TensorView, TensorView, TensorView q, TensorView, TensorView, TensorView, TensorView,
                             const EvoformerParams&, Stream& stream) noexcept {
  if (q.numel() > 0) note(stream, scratch::evoformer_bases_bytes(q.dim(0)));
}

void evoformer_attention_bwd(TensorView, TensorView, TensorView, TensorView dbias1, TensorView, TensorView,
                             TensorView q, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView,
                             const EvoformerParams&, Stream& stream) noexcept {
  if (q.numel() == 0) return;
  const i64 rows = q.dim(0) * q.dim(1) * q.dim(2);
  note(stream, scratch::evoformer_stats_bytes(rows) + (dbias1 ? scratch::evoformer_columns_bytes(rows) : 0) +
                   scratch::evoformer_bases_bytes(q.dim(0)));
}

void linear_cross_entropy(TensorView, TensorView dh, TensorView dweight, TensorView dbias, TensorView h,
                          TensorView weight, TensorView bias, TensorView, TensorView logits,
                          const CrossEntropyParams& p, Stream& stream) noexcept {
  const i64 T = h.dim(0), V = weight.dim(0);
  const LogitsLayout layout = LogitsLayout::of(logits, p.chunk_tokens, V);
  i64 begin = 0;
  do {
    const i64 rows = std::min(layout.rows, T - begin);
    TensorView z = TensorView::of(logits.data, logits.dtype, {rows, V});
    z.stride[0] = layout.stride;
    const TensorView dz = gradient_rows(z, h.dtype);
    matmul(z, h.rows(begin, rows), weight, bias, {}, {}, {.trans_b = true, .rowwise = p.rowwise}, stream);
    if (p.rowwise) note(stream, scratch::row_stats_bytes(rows));
    if (dh) matmul(dh.rows(begin, rows), dz, weight, {}, {}, {}, {}, stream);
    if (dweight)
      matmul(dweight, dz, h.rows(begin, rows), {}, {}, {}, {.trans_a = true, .accumulate = p.add_dweight || begin > 0},
             stream);
    if (dbias) column_sum(dbias, dz, begin > 0, stream);
    begin += rows;
  } while (begin < T);
}

void fold(TensorView dst, std::span<const TensorView> sources, bool, Stream& stream) noexcept {
  const auto late = sources.subspan(std::min<size_t>(sources.size(), scratch::kFoldSources));
  const bool overtaken = std::any_of(late.begin(), late.end(), [&](const TensorView& s) { return s.data == dst.data; });
  if (overtaken) note(stream, dst.numel() * dtype_bytes(DType::F32));
}

void sum_squares(TensorView, TensorView x, TensorView, Stream& stream) noexcept {
  constexpr i64 kBytes = sizeof(ExactSum);
  if (const i64 n = x.numel(); n > 0) note(stream, scratch::reduce_blocks(scratch::packs_of(n, x.dtype)) * kBytes);
}

void sum(TensorView, TensorView x, double, Stream& stream) noexcept {
  constexpr i64 kBytes = sizeof(double);
  if (const i64 tiles = scratch::sum_tiles(x.numel()); tiles > 1) note(stream, tiles * kBytes);
}

void router_stats(TensorView, TensorView, TensorView, TensorView scores, TensorView, TensorView, const RouterParams&,
                  const RouterLossParams&, Stream& stream) noexcept {
  note(stream, scratch::RouterSlices::of(scores.dim(0)).bytes(scores.dim(1)));
}

void sort_choices(TensorView offsets, TensorView, TensorView, TensorView, TensorView chosen, i64,
                  Stream& stream) noexcept {
  note(stream, scratch::choice_bytes(chosen.numel(), offsets.numel() - 1));
}

OpTable make_scratch_ops() noexcept {
  OpTable ops = no_ops();
  ops.name = "scratch";
  ops.matmul = matmul;
  ops.grouped_matmul = grouped_matmul;
  ops.matmul_fp8 = matmul_fp8;
  ops.column_sum = column_sum;
  ops.layernorm_bwd = [](TensorView, TensorView, TensorView, TensorView, TensorView, TensorView x, TensorView,
                         TensorView, TensorView, Stream& s) noexcept { norm_bwd(x, 2, s); };
  ops.rmsnorm_bwd = [](TensorView, TensorView, TensorView, TensorView, TensorView x, TensorView, TensorView,
                       Stream& s) noexcept { norm_bwd(x, 1, s); };
  ops.embedding_bwd = embedding_bwd;
  ops.router_stats = router_stats;
  ops.sort_choices = sort_choices;
  ops.attention_fwd = attention_fwd;
  ops.attention_bwd = attention_bwd;
  ops.evoformer_attention_fwd = evoformer_attention_fwd;
  ops.evoformer_attention_bwd = evoformer_attention_bwd;
  ops.linear_cross_entropy = linear_cross_entropy;
  ops.fold = fold;
  ops.sum_squares = sum_squares;
  ops.sum = sum;
  return ops;
}

}  // namespace
}  // namespace cuda

const OpTable& gpu_scratch_ops() noexcept {
  static const OpTable ops = cuda::make_scratch_ops();
  return ops;
}

GpuKernels gpu_kernels(int compute_capability, bool cudnn) noexcept {
  return {.compute_capability = compute_capability,
          .cudnn = cudnn && cuda::cudnn::serves(compute_capability),
          .products_bytes = static_cast<i64>(cuda::cublas_workspace_bytes(compute_capability))};
}

}  // namespace ds
