// SPDX-License-Identifier: Apache-2.0
// Codes and scales, and back. A thread has groups of eight elements: whole bytes of codes of any width, always within
// one block. Every operation is rounded individually, as on the CPU: this file is compiled without contraction of
// products and sums.

#include "cuda/context.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kGroup = 8;

// The rows of an operand. wide: every group of every row is aligned for the access that moves it.
template <class T>
struct Rows {
  T* data;
  i64 stride;
  bool wide;

  DS_DEVICE T* at(i64 row) const { return data + row * stride; }
};
template <class T>
Rows<T> rows_of(const TensorView& v, size_t alignment) noexcept {
  const i64 stride = v.rank > 1 ? v.stride[0] : 0;
  return {v.as<T>(), stride,
          all_aligned(alignment, {v.data}) && stride * static_cast<i64>(sizeof(T)) % static_cast<i64>(alignment) == 0};
}

// For eight integral floats, of which `count` exist; the others are zero.
template <int kBits>
DS_DEVICE void put_codes(u8* p, const float (&code)[kGroup], i64 count, bool wide) {
  constexpr int kWords = kBits / 4, kEach = 32 / kBits;
  u32 word[kWords] = {};
  DS_UNROLL for (int e = 0; e < kGroup; ++e) {
    const u32 bits = static_cast<u32>(static_cast<i32>(code[e])) & ((1u << kBits) - 1u);
    word[e / kEach] |= bits << e % kEach * kBits;
  }
  if (wide && count >= kGroup) {
    DS_UNROLL for (int w = 0; w < kWords; ++w) reinterpret_cast<u32*>(p)[w] = word[w];
  } else {
    DS_UNROLL for (int b = 0; b < 4 * kWords; ++b) {
      if (b * 8 < count * kBits) p[b] = static_cast<u8>(word[b / 4] >> b % 4 * 8);
    }
  }
}

template <int kBits>
DS_DEVICE void get_codes(float (&code)[kGroup], const u8* p, i64 count, bool wide) {
  constexpr int kWords = kBits > 1 ? kBits / 4 : 1, kEach = 32 / kBits;
  u32 word[kWords] = {};
  if (kBits > 1 && wide && count >= kGroup) {
    DS_UNROLL for (int w = 0; w < kWords; ++w) word[w] = reinterpret_cast<const u32*>(p)[w];
  } else {
    DS_UNROLL for (int b = 0; b < kBits; ++b) {
      if (b * 8 < count * kBits) word[b / 4] |= u32{p[b]} << b % 4 * 8;
    }
  }
  DS_UNROLL for (int e = 0; e < kGroup; ++e) {
    const u32 bits = (word[e / kEach] >> e % kEach * kBits) & ((1u << kBits) - 1u);
    if constexpr (kBits == 1) {
      code[e] = bits != 0 ? -1.0f : 1.0f;
    } else {
      constexpr u32 kSign = 1u << (kBits - 1);
      code[e] = static_cast<float>(static_cast<i32>(bits ^ kSign) - static_cast<i32>(kSign));
    }
  }
}

struct QuantizeShared {
  u32 of_warp[kWarps];
};

template <class T>
struct QuantizeArgs {
  Rows<u8> codes;
  Rows<float> scales;
  Rows<const T> x;
  Rows<float> error;  // data null: none
  i64 N, block, num_blocks;
  CodeFormat format;
  ErrorFeedback feedback;
};

// One thread block per block of codes: first its largest element, then its codes.
template <class T, int kBits>
__global__ void __launch_bounds__(kThreads) quantize_kernel(QuantizeArgs<T> a) {
  const i64 row = block_index().x / a.num_blocks, b = block_index().x - row * a.num_blocks;
  const i64 begin = b * a.block, end = begin + a.block < a.N ? begin + a.block : a.N;
  const T* const x = a.x.at(row);
  float* const error = a.error.data == nullptr ? nullptr : a.error.at(row);
  const i64 mine = begin + thread_index() * kGroup, step = i64{block_size()} * kGroup;
  // y = x + kept, kept = feedback.scale * error.
  const auto values = [&](float(&y)[kGroup], float(&kept)[kGroup], i64 i) {
    load_some(y, x + i, end - i, a.x.wide);
    if (error == nullptr) return;
    load_some(kept, error + i, end - i, a.error.wide);
    DS_UNROLL for (int e = 0; e < kGroup; ++e) {
      kept[e] = a.feedback.scale * kept[e];
      y[e] = y[e] + kept[e];
    }
  };

  u32 largest = 0;
  float y[kGroup], kept[kGroup] = {};
  for (i64 i = mine; i < end; i += step) {
    values(y, kept, i);
    DS_UNROLL for (int e = 0; e < kGroup; ++e) {
      const u32 bits = std::bit_cast<u32>(y[e]) & 0x7FFFFFFFu;
      largest = bits > largest ? bits : largest;
    }
  }
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const u32 other = warp_shuffle_xor(largest, mask);
    largest = other > largest ? other : largest;
  }
  QuantizeShared& shared = block_shared<QuantizeShared>();
  if (thread_index() % kWarp == 0) shared.of_warp[thread_index() / kWarp] = largest;
  sync_block();
  for (int w = 0; w < block_size() / kWarp; ++w) largest = shared.of_warp[w] > largest ? shared.of_warp[w] : largest;

  const float scale = block_scale(largest, a.format);
  const bool finite = !std::isnan(scale);
  if (thread_index() == 0) a.scales.at(row)[b] = scale;
  for (i64 i = mine; i < end; i += step) {
    values(y, kept, i);
    float code[kGroup];
    DS_UNROLL for (int e = 0; e < kGroup; ++e) code[e] = finite ? std::rint(y[e] / scale) : 0.0f;
    put_codes<kBits>(a.codes.at(row) + i * kBits / 8, code, end - i, a.codes.wide);
    if (error == nullptr) continue;
    DS_UNROLL for (int e = 0; e < kGroup; ++e) {
      const float lost = y[e] - code[e] * scale;
      y[e] = finite ? a.feedback.decay * kept[e] + (1 - a.feedback.decay) * lost : 0.0f;
    }
    store_some(error + i, y, end - i, a.error.wide);
  }
}

struct SignShared {
  float scale;
};

__global__ void __launch_bounds__(kThreads)
    quantize_signs_kernel(u8* codes, float* scale, float* y, i64 N, const i64* max_abs, const i64* sum, i64 n,
                          bool wide) {
  SignShared& shared = block_shared<SignShared>();
  if (thread_index() == 0) {
    shared.scale = sign_scale(*max_abs, {sum[0], sum[1]}, n);
    if (block_index().x == 0) *scale = shared.scale;
  }
  sync_block();
  const float s = shared.scale;
  const bool finite = !std::isnan(s);
  const i64 i = (i64{block_index().x} * kThreads + thread_index()) * kGroup;
  if (i >= N) return;
  float value[kGroup];
  load_some(value, y + i, N - i, wide);
  u32 signs = 0;
  DS_UNROLL for (int e = 0; e < kGroup; ++e) {
    const bool negative = value[e] < 0;
    signs |= (negative ? 1u : 0u) << e;
    value[e] = finite ? (negative ? value[e] + s : value[e] - s) : 0.0f;
  }
  codes[i / 8] = static_cast<u8>(signs);
  store_some(y + i, value, N - i, wide);
}

template <class T, int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(Rows<T> y, Rows<const u8> codes, Rows<const float> scales, i64 R, i64 N, i64 block) {
  const i64 item = i64{block_index().x} * kThreads + thread_index(), groups = (N + kGroup - 1) / kGroup;
  const i64 row = item / groups, i = (item - row * groups) * kGroup;
  if (row >= R) return;
  const float scale = scales.at(row)[i / block];
  float value[kGroup];
  get_codes<kBits>(value, codes.at(row) + i * kBits / 8, N - i, codes.wide);
  DS_UNROLL for (int e = 0; e < kGroup; ++e) value[e] = value[e] * scale;
  store_some(y.at(row) + i, value, N - i, y.wide);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    dequantize_fold_kernel(float* dst, Rows<const u8> codes, Rows<const float> scales, i64 R, i64 N, i64 block,
                           bool accumulate, float divisor, bool wide) {
  const i64 i = (i64{block_index().x} * kThreads + thread_index()) * kGroup;
  if (i >= N) return;
  float fold[kGroup], code[kGroup];
  for (i64 row = 0; row < R; ++row) {
    const float scale = scales.at(row)[i / block];
    get_codes<kBits>(code, codes.at(row) + i * kBits / 8, N - i, codes.wide);
    DS_UNROLL for (int e = 0; e < kGroup; ++e) fold[e] = row == 0 ? code[e] * scale : fold[e] + code[e] * scale;
  }
  if (accumulate) load_some(code, dst + i, N - i, wide);
  DS_UNROLL for (int e = 0; e < kGroup; ++e) {
    fold[e] = fold[e] / divisor;
    if (accumulate) fold[e] = code[e] + fold[e];
  }
  store_some(dst + i, fold, N - i, wide);
}

Launch over_groups(i64 groups, size_t shared_bytes = 0) noexcept {
  return {dim3(static_cast<unsigned>(ceil_div(groups, kThreads))), kThreads, shared_bytes};
}

// f.operator()<bits>().
template <class F>
void with_bits(int bits, F&& f) noexcept {
  switch (bits) {
    case 8: f.template operator()<8>(); break;
    case 4: f.template operator()<4>(); break;
    default: f.template operator()<1>(); break;
  }
}

}  // namespace

void quantize(TensorView codes, TensorView scales, TensorView x, TensorView error, CodeFormat format,
              ErrorFeedback feedback, Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = x.dim(0), N = x.dim(1);
  if (R == 0 || N == 0) return;
  with_work_type(x.dtype, [&]<class T>(T) {
    const QuantizeArgs<T> args{.codes = rows_of<u8>(codes, 4),
                               .scales = rows_of<float>(scales, 4),
                               .x = rows_of<const T>(x, 16),
                               .error = rows_of<float>(error, 16),
                               .N = N,
                               .block = format.block_elems(N),
                               .num_blocks = format.num_blocks(N),
                               .format = format,
                               .feedback = feedback};
    const i64 groups = ceil_div(std::min(args.block, N), kGroup);
    const int threads = static_cast<int>(std::min<i64>(kThreads, ceil_div(groups, kWarp) * kWarp));
    launch(format.bits == 8 ? quantize_kernel<T, 8> : quantize_kernel<T, 4>,
           {dim3(static_cast<unsigned>(R * args.num_blocks)), threads, sizeof(QuantizeShared)}, c.stream(), args);
  });
  c.check(cudaGetLastError(), "quantize");
}

void quantize_signs(TensorView codes, TensorView scale, TensorView y, TensorView max_abs, TensorView sum, i64 n,
                    Stream& s) noexcept {
  Context& c = context(s);
  const i64 N = y.numel(), groups = std::max<i64>(1, ceil_div(N, kGroup));  // the scale is needed even without elements
  launch(quantize_signs_kernel, over_groups(groups, sizeof(SignShared)), c.stream(), codes.as<u8>(), scale.as<float>(),
         y.as<float>(), N, max_abs.as<const i64>(), sum.as<const i64>(), n, all_aligned(16, {y.data}));
  c.check(cudaGetLastError(), "quantize_signs");
}

void dequantize(TensorView y, TensorView codes, TensorView scales, CodeFormat format, Stream& s) noexcept {
  Context& c = context(s);
  const i64 R = y.dim(0), N = y.dim(1);
  with_work_type(y.dtype, [&]<class T>(T) {
    with_bits(format.bits, [&]<int kBits>() {
      launch(dequantize_kernel<T, kBits>, over_groups(R * ceil_div(N, kGroup)), c.stream(), rows_of<T>(y, 16),
             rows_of<const u8>(codes, 4), rows_of<const float>(scales, 4), R, N, format.block_elems(N));
    });
  });
  c.check(cudaGetLastError(), "dequantize");
}

void dequantize_fold(TensorView dst, TensorView codes, TensorView scales, bool accumulate, float divisor,
                     CodeFormat format, Stream& s) noexcept {
  Context& c = context(s);
  const i64 N = dst.numel();
  with_bits(format.bits, [&]<int kBits>() {
    launch(dequantize_fold_kernel<kBits>, over_groups(ceil_div(N, kGroup)), c.stream(), dst.as<float>(),
           rows_of<const u8>(codes, 4), rows_of<const float>(scales, 4), codes.dim(0), N, format.block_elems(N),
           accumulate, divisor, all_aligned(16, {dst.data}));
  });
  c.check(cudaGetLastError(), "dequantize_fold");
}

}  // namespace ds::cuda
