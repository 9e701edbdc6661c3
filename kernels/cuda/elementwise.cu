// SPDX-License-Identifier: Apache-2.0
// add, bias_residual and cast.

#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

struct Add {
  DS_DEVICE void operator()(float (&y)[1], const float (&x)[2]) const { y[0] = x[0] + x[1]; }
};
struct Convert {  // by loading and storing
  DS_DEVICE void operator()(float (&y)[1], const float (&x)[1]) const { y[0] = x[0]; }
};

// A thread per pack of a row.
template <class T>
struct BiasResidualArgs {
  T* y;
  const float* x;
  const T *bias, *residual;  // null: none
  i64 R, C, y_stride, residual_stride;
  bool wide;  // every pack is whole and aligned to its size

  DS_HOST_DEVICE constexpr i64 packs() const noexcept { return (C + kPack<T> - 1) / kPack<T>; }
};

template <class T>
__global__ void __launch_bounds__(kElementwiseThreads) bias_residual_kernel(BiasResidualArgs<T> a) {
  constexpr int P = kPack<T>;
  const i64 item = i64{block_index().x} * kElementwiseThreads + thread_index(), packs = a.packs();
  const i64 row = item / packs, column = (item - row * packs) * P;
  if (row >= a.R) return;
  const i64 count = a.C - column;
  float sum[P], other[P];
  load_some(sum, a.x + row * a.C + column, count, a.wide);
  if (a.bias != nullptr) {
    load_some(other, a.bias + column, count, a.wide);
    DS_UNROLL for (int e = 0; e < P; ++e) sum[e] += other[e];
  }
  if (a.residual != nullptr) {
    load_some(other, a.residual + row * a.residual_stride + column, count, a.wide);
    DS_UNROLL for (int e = 0; e < P; ++e) sum[e] += other[e];
  }
  store_some(a.y + row * a.y_stride + column, sum, count, a.wide);
}

}  // namespace

void add(TensorView y, TensorView a, TensorView b, Stream& s) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) { elementwise<T, T>("add", s, {y}, {a, b}, Each<Add>{}); });
}

void bias_residual(TensorView y, TensorView x, TensorView bias, TensorView residual, Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = y.dim(0), C = y.dim(1);
  if (R == 0 || C == 0) return;
  with_work_type(y.dtype, [&]<class T>(T) {
    const BiasResidualArgs<T> args{.y = y.as<T>(),
                                   .x = x.as<float>(),
                                   .bias = bias.as<T>(),
                                   .residual = residual.as<T>(),
                                   .R = R,
                                   .C = C,
                                   .y_stride = y.stride[0],
                                   .residual_stride = residual.stride[0],
                                   .wide = C % kPack<T> == 0 && y.stride[0] % kPack<T> == 0 &&
                                           residual.stride[0] % kPack<T> == 0 &&
                                           all_aligned(16, {y.data, x.data, bias.data, residual.data})};
    const dim3 grid(static_cast<unsigned>(ceil_div(R * args.packs(), kElementwiseThreads)));
    launch(bias_residual_kernel<T>, {grid, kElementwiseThreads, 0}, c.stream(), args);
  });
  c.check(cudaGetLastError(), "bias_residual");
}

void cast(TensorView y, TensorView x, Stream& s) noexcept {
  if (y.dtype == x.dtype) return copy("cast", y, x, s);
  with_work_type(y.dtype, [&]<class To>(To) {
    with_work_type(x.dtype, [&]<class From>(From) {
      if constexpr (!std::is_same_v<To, From>) elementwise<To, From>("cast", s, {y}, {x}, Each<Convert>{});
    });
  });
}

}  // namespace ds::cuda
