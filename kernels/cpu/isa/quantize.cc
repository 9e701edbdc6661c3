// SPDX-License-Identifier: Apache-2.0
// Codes and scales, and back: bound by memory. A tile is a block, or a run of elements within one.

#include <bit>
#include <cstring>

#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kLanes = Vec::kLanes;

template <int kBits>
constexpr i64 code_bytes(i64 n) noexcept {
  return (n * kBits + 7) / 8;
}

#if defined(__AVX512F__)

u32 below_zero(Vec x) noexcept { return less(x, zero()).m; }
// The larger bit pattern of each lane, for non-negative floats.
struct Largest {
  __m512i v = _mm512_setzero_si512();
  void take(Vec x) noexcept { v = _mm512_max_epi32(v, _mm512_castps_si512(abs(x).v)); }
  u32 found() const noexcept { return static_cast<u32>(_mm512_reduce_max_epi32(v)); }
};
__m128i to_bytes(Vec integral) noexcept { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(integral.v)); }
Vec from_bytes(__m128i bytes) noexcept { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
Vec from_signs(u32 signs) noexcept {
  return select({static_cast<__mmask16>(signs)}, broadcast(-1.0f), broadcast(1.0f));
}

#else

u32 below_zero(Vec x) noexcept { return static_cast<u32>(_mm256_movemask_ps(less(x, zero()).m)); }
struct Largest {
  __m256i v = _mm256_setzero_si256();
  void take(Vec x) noexcept { v = _mm256_max_epi32(v, _mm256_castps_si256(abs(x).v)); }
  u32 found() const noexcept {
    u32 lanes[8], largest = 0;
    std::memcpy(lanes, &v, sizeof lanes);
    for (const u32 lane : lanes) largest = std::max(largest, lane);
    return largest;
  }
};
__m128i to_bytes(Vec integral) noexcept {
  const __m256i i = _mm256_cvtps_epi32(integral.v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  return _mm_packs_epi16(words, words);
}
Vec from_bytes(__m128i bytes) noexcept { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))}; }
Vec from_signs(u32 signs) noexcept {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(signs)), bit), bit);
  return select({_mm256_castsi256_ps(set)}, broadcast(-1.0f), broadcast(1.0f));
}

#endif

// Stores n codes at p from lanes, which are zero after the first n; loads n codes from p as integral values.
template <int kBits>
void put_codes(u8* p, Vec integral, i64 n) noexcept {
  __m128i bytes = to_bytes(integral);
  if constexpr (kBits == 4) {  // the low halves of each pair of bytes, side by side
    const __m128i low = _mm_and_si128(bytes, _mm_set1_epi16(0x000F));
    const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi16(0x00F0));
    bytes = _mm_packus_epi16(_mm_or_si128(low, high), _mm_setzero_si128());
  }
  std::memcpy(p, &bytes, static_cast<size_t>(code_bytes<kBits>(n)));
}
template <int kBits>
void put_codes(u8* p, Vec integral, AllLanes) noexcept {
  put_codes<kBits>(p, integral, kLanes);
}

// Loads kLanes codes from p with a load of exactly these bytes; a wider one would wait for earlier stores.
template <int kBits>
Vec get_codes(const u8* p, AllLanes) noexcept {
  constexpr i64 kBytes = code_bytes<kBits>(kLanes);
  if constexpr (kBits == 1) {
    u32 signs = 0;
    std::memcpy(&signs, p, static_cast<size_t>(kBytes));
    return from_signs(signs);
  } else {
    __m128i bytes;
    if constexpr (kBytes == 16) {
      bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    } else if constexpr (kBytes == 8) {
      bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    } else {
      static_assert(kBytes == 4);
      i32 word;
      std::memcpy(&word, p, sizeof word);
      bytes = _mm_cvtsi32_si128(word);
    }
    if constexpr (kBits == 4) {
      const __m128i words = _mm_cvtepu8_epi16(bytes);
      const __m128i halves = _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi16(0x0F0F));
      const __m128i sign = _mm_set1_epi8(8);
      bytes = _mm_sub_epi8(_mm_xor_si128(halves, sign), sign);
    }
    return from_bytes(bytes);
  }
}
template <int kBits>
Vec get_codes(const u8* p, i64 n) noexcept {
  u8 whole[16] = {};
  std::memcpy(whole, p, static_cast<size_t>(code_bytes<kBits>(n)));
  return get_codes<kBits>(whole, AllLanes{});
}

template <class F>
void with_bits(int bits, F&& f) noexcept {
  switch (bits) {
    case 8: f.template operator()<8>(); break;
    case 4: f.template operator()<4>(); break;
    default: f.template operator()<1>(); break;
  }
}

// Calls f(row, begin, end, block) for pieces of the blocks of R rows of N elements, over threads. `longest`: maximum
// length of a piece, a multiple of 8.
template <class F>
void for_blocks(Stream& stream, i64 R, i64 N, CodeFormat format, i64 longest, F&& f) noexcept {
  const i64 block = format.block_elems(N), blocks = format.num_blocks(N), pieces = (block + longest - 1) / longest;
  // Each thread takes several small blocks at a time.
  const i64 together = std::max<i64>(1, kTileElements / block);
  for_tiles(
      stream, R * blocks * pieces,
      [&](i64 first, i64 last) {
        for (i64 k = first; k < last; ++k) {
          const i64 b = k / pieces % blocks, begin = b * block + k % pieces * longest;
          const i64 end = std::min({N, (b + 1) * block, begin + longest});
          if (begin < end) f(k / pieces / blocks, begin, end, b);
        }
      },
      together);
}

template <class T, int kBits, bool kError>
void quantize_block(u8* codes, float* scale, const T* x, float* error, i64 n, CodeFormat format,
                    ErrorFeedback feedback) noexcept {
  const Vec keep = broadcast(feedback.scale), decay = broadcast(feedback.decay), fresh = broadcast(1 - feedback.decay);
  const auto value = [&](i64 i, auto lanes) {
    const Vec v = load(x + i, lanes);
    if constexpr (kError) return v + keep * load(error + i, lanes);
    return v;
  };
  Largest largest;
  for_vectors(0, n, [&](i64 i, auto lanes) { largest.take(value(i, lanes)); });
  *scale = block_scale(largest.found(), format);
  if (std::isnan(*scale)) {
    std::memset(codes, 0, static_cast<size_t>(format.code_bytes(n)));
    if constexpr (kError) std::fill_n(error, n, 0.0f);
    return;
  }
  const Vec s = broadcast(*scale);
  for_vectors(0, n, [&](i64 i, auto lanes) {
    const Vec y = value(i, lanes), code = round(y / s);
    put_codes<kBits>(codes + i * kBits / 8, code, lanes);
    if constexpr (kError) {
      store(error + i, decay * (keep * load(error + i, lanes)) + fresh * (y - code * s), lanes);
    }
  });
}

}  // namespace

void quantize(TensorView codes, TensorView scales, TensorView x, TensorView error, CodeFormat format,
              ErrorFeedback feedback, Stream& stream) noexcept {
  with_work_type(x.dtype, [&]<class T>(T) {
    const auto run = format.bits == 8 ? (error ? quantize_block<T, 8, true> : quantize_block<T, 8, false>)
                                      : (error ? quantize_block<T, 4, true> : quantize_block<T, 4, false>);
    const i64 whole = format.block_elems(x.dim(1));
    for_blocks(stream, x.dim(0), x.dim(1), format, whole, [=](i64 r, i64 begin, i64 end, i64 b) {
      run(codes.as<u8>() + r * codes.stride[0] + begin * format.bits / 8, scales.as<float>() + r * scales.stride[0] + b,
          x.as<T>() + r * x.stride[0] + begin, error ? error.as<float>() + r * error.stride[0] + begin : nullptr,
          end - begin, format, feedback);
    });
  });
}

void quantize_row(u8* codes, float* scale, const void* x, DType dtype, i64 n) noexcept {
  with_work_type(dtype, [&]<class T>(T) {
    quantize_block<T, 8, false>(codes, scale, static_cast<const T*>(x), nullptr, n, {.bits = 8, .block = 0}, {});
  });
}

void quantize_signs(TensorView codes, TensorView scale, TensorView y, TensorView max_abs, TensorView sum, i64 n,
                    Stream& stream) noexcept {
  const float s = sign_scale(*max_abs.as<i64>(), {sum.as<i64>()[0], sum.as<i64>()[1]}, n);
  *scale.as<float>() = s;
  const Vec plus = broadcast(s), minus = broadcast(-s);
  const bool finite = !std::isnan(s);
  for_all_vectors(stream, y.numel(), [=, to = codes.as<u8>(), values = y.as<float>()](i64 i, auto lanes) {
    const Vec v = load(values + i, lanes);
    const u32 signs = below_zero(v);
    const i64 count = std::min(kLanes, y.numel() - i);
    std::memcpy(to + i / 8, &signs, static_cast<size_t>((count + 7) / 8));
    store(values + i, finite ? v - select(less(v, zero()), minus, plus) : zero(), lanes);
  });
}

void dequantize(TensorView y, TensorView codes, TensorView scales, CodeFormat format, Stream& stream) noexcept {
  with_work_type(y.dtype, [&]<class T>(T) {
    with_bits(format.bits, [&]<int kBits>() {
      for_blocks(stream, y.dim(0), y.dim(1), format, kTileElements, [=](i64 r, i64 begin, i64 end, i64 b) {
        const u8* const from = codes.as<u8>() + r * codes.stride[0];
        T* const to = y.as<T>() + r * y.stride[0];
        const Vec scale = broadcast(scales.as<float>()[r * scales.stride[0] + b]);
        for_vectors(begin, end, [&](i64 i, auto lanes) {
          store(to + i, get_codes<kBits>(from + i * kBits / 8, lanes) * scale, lanes);
        });
      });
    });
  });
}

void dequantize_fold(TensorView dst, TensorView codes, TensorView scales, bool accumulate, float divisor,
                     CodeFormat format, Stream& stream) noexcept {
  with_bits(format.bits, [&]<int kBits>() {
    for_blocks(stream, 1, dst.numel(), format, kTileElements, [=](i64, i64 begin, i64 end, i64 b) {
      float* const to = dst.as<float>();
      const Vec by = broadcast(divisor);
      for_vectors(begin, end, [&](i64 i, auto lanes) {
        const auto value = [&](i64 r) {
          return get_codes<kBits>(codes.as<u8>() + r * codes.stride[0] + i * kBits / 8, lanes) *
                 broadcast(scales.as<float>()[r * scales.stride[0] + b]);
        };
        Vec fold = value(0);
        for (i64 r = 1; r < codes.dim(0); ++r) fold = fold + value(r);
        fold = fold / by;
        store(to + i, accumulate ? load(to + i, lanes) + fold : fold, lanes);
      });
    });
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
