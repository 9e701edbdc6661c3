// SPDX-License-Identifier: Apache-2.0
// Rotary embedding. A thread rotates the same pack of pairs in several heads of one token, which share cosines and
// sines; of interleaved pairs it has two neighbouring packs. Neighbouring threads have neighbouring packs, then
// neighbouring heads.

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
  bool interleaved;
  bool aligned;  // every pack is whole and aligned to its size

  RopeArgs(TensorView to, TensorView from, TensorView c, TensorView s, TensorView at, const RopeParams& p) noexcept
      : y(to.as<T>()),
        x(from.as<T>()),
        cos(c.as<float>()),
        sin(s.as<float>()),
        positions(at.as<i32>()),
        tokens(from.dim(0) * from.dim(1)),
        T_(from.dim(1)),
        H(from.dim(2)),
        half(from.dim(3) / 2),
        sign(p.inverse ? -1.0f : 1.0f),
        interleaved(p.interleaved),
        aligned(half % kPack<T> == 0 && all_aligned(16, {y, x, cos, sin})) {
    for (int d = 0; d < 3; ++d) {
      x_stride[d] = from.stride[static_cast<size_t>(d)];
      y_stride[d] = to.stride[static_cast<size_t>(d)];
      aligned &= x_stride[d] % kPack<T> == 0 && y_stride[d] % kPack<T> == 0;
    }
  }
  // Where the two packs of pairs d and up begin in a head, which has 2 * half elements.
  DS_HOST_DEVICE constexpr i64 first(i64 d) const noexcept { return interleaved ? 2 * d : d; }
  DS_HOST_DEVICE constexpr i64 second(i64 d) const noexcept { return interleaved ? 2 * d + kPack<T> : half + d; }
  // Where each pack's elements end.
  DS_HOST_DEVICE constexpr i64 first_end() const noexcept { return interleaved ? 2 * half : half; }
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
      x[k][0].load(row + a.first(d));
      x[k][1].load(row + a.second(d));
    } else {
      x[k][0].load_some(row, a.first(d), 0, a.first_end());
      x[k][1].load_some(row, a.second(d), 0, 2 * a.half);
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
    float in[2][kWidth], turned[2][kWidth];
    x[k][0].get(in[0]);
    x[k][1].get(in[1]);
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      const int near = 2 * e / kWidth, at = 2 * e % kWidth;  // of interleaved pairs
      const float first = a.interleaved ? in[near][at] : in[0][e], second = a.interleaved ? in[near][at + 1] : in[1][e];
      const float to_first = std::fma(-second, sin[e], first * cos[e]),
                  to_second = std::fma(first, sin[e], second * cos[e]);
      (a.interleaved ? turned[near][at] : turned[0][e]) = to_first;
      (a.interleaved ? turned[near][at + 1] : turned[1][e]) = to_second;
    }
    T* const row = to + h * a.y_stride[2];
    x[k][0].set(turned[0]);
    x[k][1].set(turned[1]);
    if (a.aligned) {
      x[k][0].store(row + a.first(d));
      x[k][1].store(row + a.second(d));
    } else {
      x[k][0].store_some(row, a.first(d), 0, a.first_end());
      x[k][1].store_some(row, a.second(d), 0, 2 * a.half);
    }
  }
}

}  // namespace

void rope(TensorView y, TensorView x, TensorView cos, TensorView sin, TensorView positions, const RopeParams& p,
          Stream& s) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    const RopeArgs<T> args(y, x, cos, sin, positions, p);
    Context& c = context(s);
    launch(rope_kernel<T>, args.launch(), c.stream(), args);
    c.check(cudaGetLastError(), "rope");
  });
}

}  // namespace ds::cuda
