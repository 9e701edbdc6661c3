// SPDX-License-Identifier: Apache-2.0
// The matrix product. C is cut into tiles, each computed by one worker that packs its own operands: no shared buffers,
// no barriers. An element's sum is a fold over blocks of k, each a chain of multiply-adds, and does not depend on the
// bounds of its tile; tiles may therefore depend on the number of threads without affecting the bits.

#include <bit>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/tiled_product.h"
#include "cpu/vector_math.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

template <class C, class T>
void finish(const Epilogue& e, const float* sums, i64 stride, i64 row, i64 column, i64 rows, i64 columns) noexcept {
  const auto at = [column](const TensorView& v, i64 r) {
    return v ? v.as<C>() + r * v.stride[0] + column : static_cast<C*>(nullptr);
  };
  const T* const bias = e.bias ? e.bias.as<T>() + column : nullptr;
  with_activation(e.activation, [&]<Activation f>() {
    for (i64 r = row; r < row + rows; ++r, sums += stride) {
      C* const c = at(e.c, r);
      C* const preact = at(e.preact, r);
      const C* const residual = e.accumulate ? c : at(e.residual, r);
      for_vectors(0, columns, [=](i64 j, auto n) {
        Vec x = load(sums + j, n);
        if (bias != nullptr) x = x + load(bias + j, n);
        if (preact != nullptr) store(preact + j, x, n);
        x = activate<f>(x);
        if (residual != nullptr) x = load(residual + j, n) + x;
        store(c + j, x, n);
      });
    }
  });
}

// For few rows the product is one pass over B, which is read in place. Sums grow in the order of multiply_tile: a row
// has the same bits among few rows and among many.

// If k is strided in B, vectors are columns.
namespace across {

// A worker's scratch: two sums of each column of a tile, and the words of A in a block of k.
struct Room {
  i64 rows, width;  // of a tile: enough columns to read long pieces of B, and enough tiles for the threads
  Room(i64 M, i64 N, i64 threads) noexcept
      : rows(with_few_rows(M, [](auto n) -> i64 { return n; })),
        width(std::clamp(round_up(ceil_div(N, 4 * threads), 4 * kLanes), 4 * kLanes, 64 * kLanes)) {}
  i64 sums() const noexcept { return rows * width; }
  size_t bytes() const noexcept { return static_cast<size_t>(2 * sums() + rows * kWords + kLanes) * sizeof(float); }
};

// Continues the sums [kRows, kVectors * kLanes] of a block of k, or starts them, with words [0, words) of A,
// [words][kRows]. p is the first element of B, of which `left` rows remain in the block.
template <class Product, int kRows, int kVectors, class T, class N>
void add_words(const float* a, i64 words, const T* p, i64 ld, i64 left, float* sums, i64 pitch, bool start,
               N n) noexcept {
  constexpr i64 D = Product::kDepth;
  Vec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = start ? zero() : load(sums + r * pitch + v * kLanes);
  }
  for (i64 w = 0; w < words; ++w, a += kRows, p += D * ld, left -= D) {
    for (int v = 0; v < kVectors; ++v) {
      const Vec y = Product::load_across(p + v * kLanes, ld, left, n);
      for (int r = 0; r < kRows; ++r) sum[r][v] = Product::multiply_add(broadcast(a[r]), y, sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(sums + r * pitch + v * kLanes, sum[r][v]);
  }
}

// The sums [kRows, columns] of a block of k, for columns from `begin` on; a: its words of A.
template <class Product, int kRows, class T>
void add_block(const float* a, const Source<T>& b, i64 begin, i64 columns, i64 k, i64 depth, float* sums,
               i64 pitch) noexcept {
  constexpr i64 kStep = 16;  // words: all columns of a few k at a time, which are long pieces of memory
  const i64 words = ceil_div(depth, Product::kDepth);
  for (i64 w = 0; w == 0 || w < words; w += kStep) {
    const auto run = [&]<int kVectors>(i64 c, auto n) {
      const i64 at = w * Product::kDepth;
      add_words<Product, kRows, kVectors>(a + w * kRows, std::min(kStep, words - w), b.at(begin + c, k + at), b.ld,
                                          depth - at, sums + c, pitch, w == 0, n);
    };
    constexpr int kVectors = kRows <= 4 ? 4 : 2;
    i64 c = 0;
    for (; c + kVectors * kLanes <= columns; c += kVectors * kLanes) run.template operator()<kVectors>(c, AllLanes{});
    for (; c + kLanes <= columns; c += kLanes) run.template operator()<1>(c, AllLanes{});
    if (c < columns) run.template operator()<1>(c, columns - c);
  }
}

// A tile is some columns of all rows.
template <class Product, class T>
void multiply(const Source<T>& a, const Source<T>& b, i64 M, i64 K, i64 N, const Epilogue& e, FinishFn done,
              ThreadPool& pool) noexcept {
  constexpr i64 kDepth = kWords * Product::kDepth;
  const Room room(M, N, pool.num_threads());
  pool.parallel_for(ceil_div(N, room.width), [&](i64 tile, int worker) {
    const i64 begin = tile * room.width, columns = std::min(room.width, N - begin);
    float* const sums = static_cast<float*>(pool.scratch(worker));
    float *const more = sums + room.sums(), *const words = more + room.sums();
    with_few_rows(M, [&]<int kRows>(std::integral_constant<int, kRows>) {
      for (i64 k = 0; k == 0 || k < K; k += kDepth) {
        const i64 depth = std::min(kDepth, K - k);
        pack<Product>(words, kRows, a, 0, M, k, depth);
        add_block<Product, kRows>(words, b, begin, columns, k, depth, k == 0 ? sums : more, room.width);
        for (i64 i = 0; k > 0 && i < kRows * room.width; i += kLanes) store(sums + i, load(sums + i) + load(more + i));
      }
    });
    done(e, sums, room.width, 0, begin, M, columns);
  });
}

}  // namespace across

// The operand of an FP8 product. A code times its scale is one word of fp32.
struct CodeSource {
  const u8* codes;
  const float* scales;
  Fp8Layout layout;
  int mantissa;
  float power;  // 2^n: the bits of a code, read as an fp32 number, are its value divided by it
  static constexpr bool along = true;

  CodeSource(const TensorView& v, const TensorView& s, i64 rows, Fp8Blocks blocks) noexcept
      : codes(v.as<u8>()), scales(s.as<float>()), layout{rows, v.dim(1), blocks} {
    const Fp8Format f = fp8_format(v.dtype);
    mantissa = f.mantissa;
    power = std::bit_cast<float>(static_cast<u32>(254 - f.bias) << 23);
  }
};

// The numbers of kLanes codes, or of n, without their power.
Vec small_numbers(const u8* p, int mantissa, AllLanes) noexcept {
#if defined(__AVX512F__)
  const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(c, _mm512_set1_epi32(0x80)), 24);
  const __m512i rest = _mm512_sll_epi32(_mm512_and_si512(c, _mm512_set1_epi32(0x7F)), _mm_cvtsi32_si128(23 - mantissa));
  return {_mm512_castsi512_ps(_mm512_or_si512(sign, rest))};
#else
  const __m256i c = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(c, _mm256_set1_epi32(0x80)), 24);
  const __m256i rest = _mm256_sll_epi32(_mm256_and_si256(c, _mm256_set1_epi32(0x7F)), _mm_cvtsi32_si128(23 - mantissa));
  return {_mm256_castsi256_ps(_mm256_or_si256(sign, rest))};
#endif
}
Vec small_numbers(const u8* p, int mantissa, i64 n) noexcept {
  u8 some[kLanes] = {};
  std::memcpy(some, p, static_cast<size_t>(n));
  return small_numbers(some, mantissa, AllLanes{});
}

// k0 is a multiple of kLanes, so the lanes of a vector share a block.
template <class Product>
void pack(float* dst, i64 stride, const CodeSource& s, i64 i, i64 count, i64 k0, i64 depth) noexcept {
  static_assert(Product::kDepth == 1 && kFp8Block % kLanes == 0);
  pack_rows<1>(dst, stride, count, depth, [&](i64 j, i64 k, auto n) {
    const Vec x = small_numbers(s.codes + (i + j) * s.layout.k + k0 + k, s.mantissa, n) * broadcast(s.power);
    return x * broadcast(s.scales[s.layout.scale_of(i + j, k0 + k)]);
  });
}

// A product of few rows has tiles of its own, unless B must be transposed, or is in panels.
bool few_rows(i64 M, const TensorView& b, const MatmulParams& p) noexcept {
  return M <= kFewRows && !p.trans_b && !b.panels;
}
Cut cut_of(DType work, i64 M, i64 N, i64 K, const TensorView& b, const MatmulParams& p, i64 threads) noexcept {
  if (few_rows(M, b, p)) return {{1, 1}, across::Room(M, N, threads).bytes()};
  return tiles_of(work, M, N, K, threads, !b.panels);
}

}  // namespace

FinishFn finish_for(DType c, DType work) noexcept {
  FinishFn f = nullptr;
  with_work_type(work, [&]<class T>(T) { f = c == DType::F32 ? finish<float, T> : finish<T, T>; });
  return f;
}

void matmul(TensorView c, TensorView a, TensorView b, TensorView bias, TensorView preact, TensorView residual,
            const MatmulParams& p, Stream& stream) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(p.trans_a ? 0 : 1);
  if (M == 0 || N == 0) return;
  const Epilogue e{c, bias, preact, residual, p.activation, p.accumulate};
  ThreadPool& pool = *stream.pool;
  if (b.codes) return multiply_by_codes(e, a, b, pool);
  const FinishFn done = finish_for(c.dtype, a.dtype);
  const Cut cut = cut_of(a.dtype, M, N, K, b, p, pool.num_threads());
  pool.reserve_scratch(cut.scratch_bytes);
  with_work_type(a.dtype, [&]<class T>(T) {
    using Product = typename ProductOf<T>::type;
    const Source<T> sa{a.as<T>(), a.stride[0], !p.trans_a}, sb{b.as<T>(), b.stride[0], p.trans_b};
    if (b.panels) return multiply_tiles<Product>(sa, PanelSource<T>{sb.data, N, K}, M, K, N, cut.grid, e, done, pool);
    if (few_rows(M, b, p)) return across::multiply<Product>(sa, sb, M, K, N, e, done, pool);
    multiply_tiles<Product>(sa, sb, M, K, N, cut.grid, e, done, pool);
  });
}

// Always in tiles, even few rows: those have the bits that they have among many.
void matmul_fp8(TensorView c, TensorView a, TensorView a_scales, TensorView b, TensorView b_scales, TensorView bias,
                TensorView residual, const Fp8MatmulParams& p, Stream& stream) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(1);
  if (M == 0 || N == 0) return;
  const Epilogue e{c, bias, {}, residual, Activation::None, false};
  const FinishFn done = finish_for(c.dtype, DType::BF16);
  ThreadPool& pool = *stream.pool;
  const Cut cut = tiles_of(DType::F32, M, N, K, pool.num_threads());
  pool.reserve_scratch(cut.scratch_bytes);
  const CodeSource sa(a, a_scales, M, p.a), sb(b, b_scales, N, p.b);
  multiply_tiles<Single>(sa, sb, M, K, N, cut.grid, e, done, pool);
}

void matmul_fp8_scratch(TensorView c, TensorView a, TensorView, TensorView, TensorView, TensorView, TensorView,
                        const Fp8MatmulParams&, Stream& stream) noexcept {
  const i64 M = c.dim(0), N = c.dim(1);
  if (M == 0 || N == 0) return;
  note_scratch(stream, tiles_of(DType::F32, M, N, a.dim(1), metered_threads(stream)).scratch_bytes);
}

void matmul_scratch(TensorView c, TensorView a, TensorView b, TensorView, TensorView, TensorView, const MatmulParams& p,
                    Stream& stream) noexcept {
  const i64 M = c.dim(0), N = c.dim(1), K = a.dim(p.trans_a ? 0 : 1);
  if (M == 0 || N == 0) return;
  const int threads = metered_threads(stream);
  if (b.codes) return note_scratch(stream, multiply_by_codes_scratch(a.dtype, M, b, threads));
  note_scratch(stream, cut_of(a.dtype, M, N, K, b, p, threads).scratch_bytes);
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
