// SPDX-License-Identifier: Apache-2.0
// Rotary embedding. A thread rotates the same pack of pairs in several heads of one token, which share cosines and
// sines. Neighbouring threads have neighbouring packs, then neighbouring heads.

#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;  // per thread

template <class T>
struct RopeArgs {
  T* y;
  const T* x;
  const float *cos, *sin;
  const i32* positions;
  i64 x_stride[3], y_stride[3];
  i64 tokens, T_, H, half;  // tokens: of all sequences; T_: of each
  float sign;
  bool aligned;  // every pack is whole and aligned to its size

  RopeArgs(TensorView to, TensorView from, TensorView c, TensorView s, TensorView at, bool inverse) noexcept
      : y(to.as<T>()),
        x(from.as<T>()),
        cos(c.as<float>()),
        sin(s.as<float>()),
        positions(at.as<i32>()),
        tokens(from.dim(0) * from.dim(1)),
        T_(from.dim(1)),
        H(from.dim(2)),
        half(from.dim(3) / 2),
        sign(inverse ? -1.0f : 1.0f),
        aligned(half % kPack<T> == 0 && all_aligned(16, {y, x, cos, sin})) {
    for (int d = 0; d < 3; ++d) {
      x_stride[d] = from.stride[static_cast<size_t>(d)];
      y_stride[d] = to.stride[static_cast<size_t>(d)];
      aligned &= x_stride[d] % kPack<T> == 0 && y_stride[d] % kPack<T> == 0;
    }
  }
  // Threads per token.
  DS_HOST_DEVICE constexpr i64 packs() const noexcept { return (half + kPack<T> - 1) / kPack<T>; }
  DS_HOST_DEVICE constexpr i64 head_groups() const noexcept { return (H + kHeads - 1) / kHeads; }
  Launch launch() const noexcept {
    return {dim3(static_cast<unsigned>(ceil_div(tokens * packs() * head_groups(), kThreads))), kThreads, 0};
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeArgs<T> a) {
  constexpr int kWidth = kPack<T>;
  const i64 item = i64{block_index().x} * kThreads + thread_index();
  const i64 packs = a.packs(), groups = a.head_groups();
  const i64 token = item / (packs * groups);
  if (token >= a.tokens) return;
  const int in_token = static_cast<int>(item - token * packs * groups);
  const int group = in_token / static_cast<int>(packs);
  const i64 d = i64{in_token - group * static_cast<int>(packs)} * kWidth;
  const i64 b = token / a.T_, t = token - b * a.T_;
  const T* const from = a.x + b * a.x_stride[0] + t * a.x_stride[1];
  T* const to = a.y + b * a.y_stride[0] + t * a.y_stride[1];

  Pack<T, kWidth> x[kHeads][2];
  DS_UNROLL for (int k = 0; k < kHeads; ++k) {
    const i64 h = group + k * groups;
    if (h >= a.H) break;
    const T* const row = from + h * a.x_stride[2];
    if (a.aligned) {
      x[k][0].load(row + d);
      x[k][1].load(row + a.half + d);
    } else {
      x[k][0].load_some(row, d, 0, a.half);
      x[k][1].load_some(row + a.half, d, 0, a.half);
    }
  }

  const i64 angle = i64{a.positions[t]} * a.half;
  float cos[kWidth], sin[kWidth];
  DS_UNROLL for (int e = 0; e < kWidth; e += 4) {
    Pack<float, 4> c, s;
    if (a.aligned) {
      c.load(a.cos + angle + d + e);
      s.load(a.sin + angle + d + e);
    } else {
      c.load_some(a.cos + angle, d + e, 0, a.half);
      s.load_some(a.sin + angle, d + e, 0, a.half);
    }
    float c4[4], s4[4];
    c.get(c4);
    s.get(s4);
    DS_UNROLL for (int i = 0; i < 4; ++i) cos[e + i] = c4[i], sin[e + i] = a.sign * s4[i];
  }

  DS_UNROLL for (int k = 0; k < kHeads; ++k) {
    const i64 h = group + k * groups;
    if (h >= a.H) break;
    float first[kWidth], second[kWidth], turned[2][kWidth];
    x[k][0].get(first);
    x[k][1].get(second);
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      turned[0][e] = std::fma(-second[e], sin[e], first[e] * cos[e]);
      turned[1][e] = std::fma(first[e], sin[e], second[e] * cos[e]);
    }
    T* const row = to + h * a.y_stride[2];
    x[k][0].set(turned[0]);
    x[k][1].set(turned[1]);
    if (a.aligned) {
      x[k][0].store(row + d);
      x[k][1].store(row + a.half + d);
    } else {
      x[k][0].store_some(row, d, 0, a.half);
      x[k][1].store_some(row + a.half, d, 0, a.half);
    }
  }
}

}  // namespace

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, bool inverse,
          Stream& s) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    const RopeArgs<T> args(y, x, cos, sin, positions, inverse);
    Context& c = context(s);
    launch(rope_kernel<T>, args.launch(), c.stream(), args);
    c.check(cudaGetLastError(), "rope");
  });
}

}  // namespace ds::cuda
