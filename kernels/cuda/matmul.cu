// SPDX-License-Identifier: Apache-2.0
// The matrix product: runs the steps of a plan, and has the kernel for what the product itself cannot compute.

#include <array>
#include <span>

#include "cuda/context.h"
#include "cuda/matmul.h"
#include "cuda/ops.h"
#include "cuda/row_matmul.h"

#include "cuda/activate.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kBlock = 256;

template <class C, class T>
struct FinishArgs {
  C* c;
  C* preact;
  const C* residual;  // or c itself, if it accumulates
  const T* bias;
  const float* sums;
  i64 N, packs, c_stride, preact_stride, residual_stride, sums_stride;
  i64 parts, part_stride;  // sums are those of so many parts, which are added
  i64 packs_per_row;
  Activation activation;
  bool aligned;
};

// A thread has eight columns of one row, so no other thread reads what it writes.
template <class C, class T>
__global__ void finish_kernel(FinishArgs<C, T> p) {
  const i64 i = i64{block_index().x} * block_size() + thread_index();
  if (i >= p.packs) return;
  const i64 row = i / p.packs_per_row, column = (i - row * p.packs_per_row) * 8;
  const int n = static_cast<int>(p.N - column < 8 ? p.N - column : 8);
  float x[8] = {}, y[8];
  for (i64 part = 0; part < p.parts; ++part) {
    load_some(y, p.sums + part * p.part_stride + row * p.sums_stride + column, n, p.aligned);
    for (int e = 0; e < 8; ++e) x[e] += y[e];
  }
  if (p.bias != nullptr) {
    load_some(y, p.bias + column, n, p.aligned);
    for (int e = 0; e < 8; ++e) x[e] += y[e];
  }
  if (p.residual != nullptr) load_some(y, p.residual + row * p.residual_stride + column, n, p.aligned);
  if (p.preact != nullptr) store_some(p.preact + row * p.preact_stride + column, x, n, p.aligned);
  for (int e = 0; e < 8; ++e) {
    x[e] = activate(p.activation, x[e]);
    if (p.residual != nullptr) x[e] += y[e];
  }
  store_some(p.c + row * p.c_stride + column, x, n, p.aligned);
}

template <class C, class T>
void finish(const MatmulFinish& f, cudaStream_t stream) noexcept {
  const MatmulCall& x = f.call;
  const TensorView& residual = x.params.accumulate ? x.c : x.residual;
  const i64 M = x.c.dim(0), N = x.c.dim(1), packs_per_row = (N + 7) / 8;
  bool aligned = aligned_rows(f.sums, f.sums_stride, M * f.parts) && aligned_rows(x.bias.as<T>(), 0, 1);
  for (const TensorView* v : {&x.c, &x.preact, &residual}) {
    aligned = aligned && aligned_rows(v->as<C>(), v->stride[0], M);
  }
  const FinishArgs<C, T> args{.c = x.c.as<C>(),
                              .preact = x.preact.as<C>(),
                              .residual = residual.as<C>(),
                              .bias = x.bias.as<T>(),
                              .sums = f.sums,
                              .N = N,
                              .packs = M * packs_per_row,
                              .c_stride = x.c.stride[0],
                              .preact_stride = x.preact.stride[0],
                              .residual_stride = residual.stride[0],
                              .sums_stride = f.sums_stride,
                              .parts = f.sums != nullptr ? f.parts : 0,
                              .part_stride = M * f.sums_stride,
                              .packs_per_row = packs_per_row,
                              .activation = x.params.activation,
                              .aligned = aligned};
  const auto blocks = static_cast<unsigned>((args.packs + kBlock - 1) / kBlock);
  launch(finish_kernel<C, T>, {.grid = dim3(blocks), .block = kBlock}, stream, args);
}

void finish(const MatmulFinish& f, DType work, cudaStream_t stream) noexcept {
  with_work_type(
      work, [&]<class T>(T) { f.call.c.dtype == DType::F32 ? finish<float, T>(f, stream) : finish<T, T>(f, stream); });
}

}  // namespace

void finish_sums(const MatmulCall& call, const float* sums, i64 sums_stride, i64 parts, Stream& stream) noexcept {
  finish({call, sums, sums_stride, parts}, call.a.dtype, context(stream).stream());
}

namespace {

// Whether the library has the product of a step.
bool supported(MatmulEngine& engine, const MatmulStep& step) noexcept {
  return !step.multiplies || engine.supports(step.product);
}

// work: the type of a bias, and of c unless that is fp32.
void run_step(Context& ctx, MatmulStep& step, DType work) noexcept {
  if (step.scratch_bytes > 0) {
    void* const sums = ctx.scratch(static_cast<size_t>(step.scratch_bytes));
    if (sums == nullptr) return;
    step.product.d = sums;
    step.finish.sums = static_cast<const float*>(sums);
  }
  if (step.multiplies) ctx.matmul().run(step.product);
  if (!step.finishes) return;
  finish(step.finish, work, ctx.stream());
  ctx.check(cudaGetLastError(), "matmul");
}

}  // namespace

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream& stream) noexcept {
  const i64 M = c.dim(0);
  if (M == 0 || c.dim(1) == 0) return;
  const MatmulCall all{c, a, b, bias, preact, residual, p};
  if (is_row_matmul(all)) return row_matmul(all, {}, stream);
  std::array<MatmulCall, 2> parts;
  if (const int count = split_ragged(all, parts); count > 0) {
    for (const MatmulCall& x : std::span(parts).first(static_cast<size_t>(count)))
      matmul(x.c, x.a, x.b, x.bias, x.preact, x.residual, x.params, stream);
    return;
  }
  Context& ctx = context(stream);
  for (i64 begin = 0; begin < M;) {
    const MatmulCall rest = rows_from(all, begin, p.rowwise ? 1 : M - begin);
    MatmulStep step = plan_matmul(rest, /*fuse=*/true);
    if (!supported(ctx.matmul(), step)) step = plan_matmul(rest, /*fuse=*/false);
    run_step(ctx, step, a.dtype);
    begin += step.rows;
  }
}

void matmul_fp8(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                TensorView residual, const Fp8MatmulParams& p, Stream& stream) noexcept {
  if (c.dim(0) == 0 || c.dim(1) == 0) return;
  const Fp8MatmulCall call{c, a, a_scales, b, b_scales, bias, residual, p};
  Context& ctx = context(stream);
  MatmulStep step = plan_matmul_fp8(call, /*fuse=*/true);
  if (!supported(ctx.matmul(), step)) step = plan_matmul_fp8(call, /*fuse=*/false);
  run_step(ctx, step, DType::BF16);
}

}  // namespace ds::cuda
