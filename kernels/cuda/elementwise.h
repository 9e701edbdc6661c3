// SPDX-License-Identifier: Apache-2.0
#pragma once
// Parts shared by ops bound by memory: packs of elements that one access moves, and one kernel for all elementwise ops.
// A thread owns whole packs. A pack that is inside the tensor and aligned moves in one access, others element by
// element; the arithmetic is the same, so results do not depend on addresses.

#include <algorithm>
#include <type_traits>

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {

// y = x, the same dtype and bits; may be the same tensor.
inline void copy(const char* name, TensorView y, TensorView x, Stream& s) noexcept {
  if (y.data == x.data || x.numel() == 0) return;
  context(s).check(
      cudaMemcpyAsync(y.data, x.data, static_cast<size_t>(x.bytes()), cudaMemcpyDeviceToDevice, context(s).stream()),
      name);
}

// kWidth elements in their memory format, 16 or 8 bytes.
template <class T, int kWidth>
struct Pack {
  static constexpr int kWords = kWidth * static_cast<int>(sizeof(T)) / 4;
  static_assert(kWords == 4 || kWords == 2);
  u32 word[kWords];

  // From p, which must be aligned to the size of the pack.
  DS_DEVICE void load(const T* p) {
    if constexpr (kWords == 4) {
      const uint4 raw = *reinterpret_cast<const uint4*>(p);
      word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
    } else {
      const uint2 raw = *reinterpret_cast<const uint2*>(p);
      word[0] = raw.x, word[1] = raw.y;
    }
  }
  DS_DEVICE void store(T* p) const {
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(p) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
      *reinterpret_cast<uint2*>(p) = make_uint2(word[0], word[1]);
    }
  }

  // Elements begin <= i < end of the row at `row`, for the pack whose first element is row[first]; other elements are
  // loaded as zero, and not stored. Any alignment.
  DS_DEVICE void load_some(const T* row, i64 first, i64 begin, i64 end) {
    DS_UNROLL for (int w = 0; w < kWords; ++w) word[w] = 0;
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      if (first + e < begin || first + e >= end) continue;
      if constexpr (sizeof(T) == 4) {
        word[e] = std::bit_cast<u32>(row[first + e]);
      } else {
        word[e / 2] |= static_cast<u32>(row[first + e].bits) << 16 * (e % 2);
      }
    }
  }
  DS_DEVICE void store_some(T* row, i64 first, i64 begin, i64 end) const {
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      if (first + e < begin || first + e >= end) continue;
      if constexpr (sizeof(T) == 4) {
        row[first + e] = std::bit_cast<T>(word[e]);
      } else {
        row[first + e] = T{static_cast<u16>(word[e / 2] >> 16 * (e % 2))};
      }
    }
  }

  DS_DEVICE void get(float (&x)[kWidth]) const {
    if constexpr (sizeof(T) == 4) {
      DS_UNROLL for (int e = 0; e < kWidth; ++e) x[e] = std::bit_cast<float>(word[e]);
    } else {
      DS_UNROLL for (int w = 0; w < kWords; ++w) {
        const float2 pair = unpack2<T>(word[w]);
        x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
      }
    }
  }
  DS_DEVICE void set(const float (&x)[kWidth]) {
    DS_UNROLL for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 4) {
        word[w] = std::bit_cast<u32>(x[w]);
      } else {
        word[w] = pack2<T>(x[2 * w], x[2 * w + 1]);
      }
    }
  }
};

inline constexpr int kElementwiseThreads = 256;
inline constexpr int kElementwisePacks = 2;  // of each operand in flight per thread

// The operands of an elementwise op. All may alias element for element.
template <class To, class From, int kOut, int kIn>
struct Operands {
  static constexpr int kWidth = 16 / static_cast<int>(std::max(sizeof(To), sizeof(From)));
  static constexpr i64 kBlock = i64{kWidth} * kElementwisePacks * kElementwiseThreads;

  To* out[kOut];
  const From* in[kIn];
  i64 n;
  i64 lead;      // packs start at -lead, so that they are aligned
  bool aligned;  // then true: all operands have the same `lead`

  Operands(const TensorView (&to)[kOut], const TensorView (&from)[kIn]) noexcept : n(to[0].numel()) {
    lead = static_cast<i64>(reinterpret_cast<size_t>(to[0].data) / sizeof(To) % kWidth);
    aligned = true;
    const auto agrees = [&](const TensorView& v, size_t size) {
      return (reinterpret_cast<size_t>(v.data) - static_cast<size_t>(lead) * size) % (kWidth * size) == 0;
    };
    for (int k = 0; k < kOut; ++k) out[k] = to[k].template as<To>(), aligned &= agrees(to[k], sizeof(To));
    for (int k = 0; k < kIn; ++k) in[k] = from[k].template as<From>(), aligned &= agrees(from[k], sizeof(From));
    if (!aligned) lead = 0;
  }
  Launch launch() const noexcept {
    return {dim3(static_cast<unsigned>(n > 0 ? ceil_div(n + lead, kBlock) : 0)), kElementwiseThreads, 0};
  }
};

// f(y, x, first) computes a pack: float (&y)[kOut][kWidth] from const float (&x)[kIn][kWidth]; `first` is the index of
// its first element (elements outside the tensor are computed, too, and dropped).
template <class To, class From, int kOut, int kIn, class F>
__global__ void __launch_bounds__(kElementwiseThreads) elementwise_kernel(Operands<To, From, kOut, kIn> a, F f) {
  using Ops = Operands<To, From, kOut, kIn>;
  constexpr int kWidth = Ops::kWidth;
  constexpr i64 kStep = i64{kWidth} * kElementwiseThreads;
  const i64 begin = i64{block_index().x} * Ops::kBlock - a.lead;
  const i64 mine = begin + i64{thread_index()} * kWidth;
  const bool whole = a.aligned && begin >= 0 && begin + Ops::kBlock <= a.n;

  Pack<From, kWidth> x[kElementwisePacks][kIn];
  DS_UNROLL for (int u = 0; u < kElementwisePacks; ++u) {
    DS_UNROLL for (int k = 0; k < kIn; ++k) {
      if (whole) {
        x[u][k].load(a.in[k] + mine + u * kStep);
      } else {
        x[u][k].load_some(a.in[k], mine + u * kStep, 0, a.n);
      }
    }
  }
  DS_UNROLL for (int u = 0; u < kElementwisePacks; ++u) {
    float in[kIn][kWidth], out[kOut][kWidth];
    DS_UNROLL for (int k = 0; k < kIn; ++k) x[u][k].get(in[k]);
    f(out, in, mine + u * kStep);
    DS_UNROLL for (int k = 0; k < kOut; ++k) {
      Pack<To, kWidth> y;
      y.set(out[k]);
      if (whole) {
        y.store(a.out[k] + mine + u * kStep);
      } else {
        y.store_some(a.out[k], mine + u * kStep, 0, a.n);
      }
    }
  }
}

// The operands of an elementwise op [R,C] whose rows are strided. All may alias element for element.
template <class To, class From, int kOut, int kIn>
struct RowOperands {
  static constexpr int kWidth = Operands<To, From, kOut, kIn>::kWidth;

  To* out[kOut];
  const From* in[kIn];
  i64 out_stride[kOut], in_stride[kIn];
  i64 R, C, packs;  // of a row
  bool aligned;     // every pack is whole and aligned to its size

  RowOperands(const TensorView (&to)[kOut], const TensorView (&from)[kIn]) noexcept
      : R(to[0].dim(0)), C(to[0].dim(1)), packs(ceil_div(C, i64{kWidth})), aligned(C % kWidth == 0) {
    const auto agrees = [](const TensorView& v, size_t size) {
      return reinterpret_cast<size_t>(v.data) % (kWidth * size) == 0 && v.stride[0] % kWidth == 0;
    };
    for (int k = 0; k < kOut; ++k)
      out[k] = to[k].template as<To>(), out_stride[k] = to[k].stride[0], aligned &= agrees(to[k], sizeof(To));
    for (int k = 0; k < kIn; ++k)
      in[k] = from[k].template as<From>(), in_stride[k] = from[k].stride[0], aligned &= agrees(from[k], sizeof(From));
  }
  Launch launch() const noexcept {
    return {dim3(static_cast<unsigned>(ceil_div(R * packs, i64{kElementwiseThreads}))), kElementwiseThreads, 0};
  }
};

// A thread per pack of a row; f as above.
template <class To, class From, int kOut, int kIn, class F>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_rows_kernel(RowOperands<To, From, kOut, kIn> a, F f) {
  constexpr int kWidth = RowOperands<To, From, kOut, kIn>::kWidth;
  const i64 item = i64{block_index().x} * kElementwiseThreads + thread_index();
  const i64 row = item / a.packs, column = (item - row * a.packs) * kWidth;
  if (row >= a.R) return;
  Pack<From, kWidth> x[kIn];
  float in[kIn][kWidth], out[kOut][kWidth];
  DS_UNROLL for (int k = 0; k < kIn; ++k) {
    const From* const from = a.in[k] + row * a.in_stride[k];
    a.aligned ? x[k].load(from + column) : x[k].load_some(from, column, 0, a.C);
  }
  DS_UNROLL for (int k = 0; k < kIn; ++k) x[k].get(in[k]);
  f(out, in, column);
  DS_UNROLL for (int k = 0; k < kOut; ++k) {
    Pack<To, kWidth> y;
    y.set(out[k]);
    To* const to = a.out[k] + row * a.out_stride[k];
    a.aligned ? y.store(to + column) : y.store_some(to, column, 0, a.C);
  }
}

// Turns f(y, x), which computes float (&y)[kOut] of one element from const float (&x)[kIn], into a function of packs.
template <class F>
struct Each {
  F f;
  template <int kOut, int kIn, int kWidth>
  DS_DEVICE void operator()(float (&y)[kOut][kWidth], const float (&x)[kIn][kWidth], i64) const {
    DS_UNROLL for (int e = 0; e < kWidth; ++e) {
      float in[kIn], out[kOut];
      DS_UNROLL for (int k = 0; k < kIn; ++k) in[k] = x[k][e];
      f(out, in);
      DS_UNROLL for (int k = 0; k < kOut; ++k) y[k][e] = out[k];
    }
  }
};

// The same of rows that are strided: f does not use `first`.
template <class To, class From, int kOut, int kIn, class F>
void elementwise_rows(const char* name, Stream& s, const TensorView (&out)[kOut], const TensorView (&in)[kIn],
                      F f) noexcept {
  const RowOperands<To, From, kOut, kIn> operands(out, in);
  if (operands.R == 0 || operands.C == 0) return;
  Context& c = context(s);
  launch(elementwise_rows_kernel<To, From, kOut, kIn, F>, operands.launch(), c.stream(), operands, f);
  c.check(cudaGetLastError(), name);
}

// Computes the outputs, all of type To, from the inputs, all of type From and all of the same size.
template <class To, class From, int kOut, int kIn, class F>
void elementwise(const char* name, Stream& s, const TensorView (&out)[kOut], const TensorView (&in)[kIn],
                 F f) noexcept {
  const Operands<To, From, kOut, kIn> operands(out, in);
  Context& c = context(s);
  launch(elementwise_kernel<To, From, kOut, kIn, F>, operands.launch(), c.stream(), operands, f);
  c.check(cudaGetLastError(), name);
}

}  // namespace ds::cuda
