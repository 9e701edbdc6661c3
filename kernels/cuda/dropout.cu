// SPDX-License-Identifier: Apache-2.0
// Dropout: random numbers are computed from the element's index, so nothing is stored for the backward pass.

#include "cuda/elementwise.h"

namespace ds::cuda {
namespace {

struct Dropout {
  RngKey rng;
  i64 offset;
  u32 threshold;
  float scale;

  // The numbers of a pack span one more Philox block than it has, unless it starts with one.
  template <int kWidth>
  DS_DEVICE void operator()(float (&y)[1][kWidth], const float (&x)[1][kWidth], i64 first) const {
    constexpr int kBlocks = kWidth / 4;
    const i64 at = offset + first;  // negative only for elements that do not exist
    const int skip = static_cast<int>(at & 3);
    u32 bits[4 * kBlocks + 4] = {};
    DS_UNROLL for (int b = 0; b <= kBlocks; ++b) {
      if (b == kBlocks && skip == 0) break;
      const PhiloxBlock block = rng.block(static_cast<u64>((at >> 2) + b));
      DS_UNROLL for (int e = 0; e < 4; ++e) bits[4 * b + e] = block[static_cast<size_t>(e)];
    }
    if ((skip & 1) != 0) shift<1>(bits);
    if ((skip & 2) != 0) shift<2>(bits);
    // A product alone would not turn a dropped NaN or infinity into zero.
    DS_UNROLL for (int e = 0; e < kWidth; ++e) y[0][e] = (bits[e] >> 8) >= threshold ? x[0][e] * scale : 0.0f;
  }

 private:
  template <int kBy, int kSize>
  static DS_DEVICE void shift(u32 (&bits)[kSize]) {
    DS_UNROLL for (int e = 0; e + kBy < kSize; ++e) bits[e] = bits[e + kBy];
  }
};

}  // namespace

void dropout(TensorView y, TensorView x, float p, RngKey rng, i64 offset, Stream& s) noexcept {
  const Dropout f{rng, offset, least_kept(p), 1.0f / (1.0f - p)};
  with_work_type(y.dtype, [&]<class T>(T) { elementwise<T, T>("dropout", s, {y}, {x}, f); });
}

}  // namespace ds::cuda
