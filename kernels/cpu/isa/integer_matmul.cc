// SPDX-License-Identifier: Apache-2.0
// Products of rows that are coded here, with a matrix of 8-bit codes: exact sums of integers. So there is one result,
// in whatever order the codes of a row are added up.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "cpu/isa/coded_tile.h"
#include "cpu/isa/codes.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

constexpr i64 kQuad = 4;  // codes of a row that panels keep together

// The products of quads. Word: a quad of A. Four codes of B for each of kNR rows are `kVectors` vectors,
// and so are their sums; finish() puts these in the order of rows.
#if defined(__AVX512VNNI__)
// VPDPBUSD multiplies unsigned by signed numbers, so 128 is added to codes of A, and 128 times the codes of B are
// subtracted in the end. Sums may pass 2^31 until then: they wrap.
struct Quads {
  using Word = u32;
  static constexpr int kVectors = 2, kMostRows = 12;
  using Ints = __m512i;
  static Ints load_b(const u8* p, int v) noexcept { return _mm512_loadu_si512(p + v * 64); }
  static Ints all(Word a) noexcept { return _mm512_set1_epi32(static_cast<int>(a)); }
  // GCC 12 spills every sum to memory with the intrinsic.
  static Ints add(Ints sum, Ints a, Ints b) noexcept {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  // The codes of B themselves.
  static Ints count(Ints sum, Ints b) noexcept { return add(sum, _mm512_set1_epi8(1), b); }
  static void finish(Ints (&to)[2], const Ints (&sum)[2], const Ints (&of_b)[2]) noexcept {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) to[v] = _mm512_sub_epi32(sum[v], _mm512_slli_epi32(of_b[v], 7));
  }
  // Words of kLanes codes.
  static void put(Word (&to)[4], Vec q) noexcept {
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q.v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_xor_si128(codes, _mm_set1_epi8(static_cast<char>(0x80))));
  }
  static Vec number(Ints x) noexcept { return {_mm512_cvtepi32_ps(x)}; }
};
#else
// VPMADDWD multiplies 16-bit numbers and adds two neighbours: a row of B has two lanes. (VPMADDUBSW would saturate.)
struct Quads {
  using Word = u64;
  static constexpr int kVectors = 4;
#if defined(__AVX512F__)
  static constexpr int kMostRows = 5;
  using Ints = __m512i;
  static Ints load_b(const u8* p, int v) noexcept {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + v * 32)));
  }
  static Ints all(Word a) noexcept { return _mm512_set1_epi64(static_cast<i64>(a)); }
  static Ints add(Ints sum, Ints a, Ints b) noexcept { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
  static Ints count(Ints sum, Ints) noexcept { return sum; }
  static void finish(Ints (&to)[2], const Ints (&sum)[4], const Ints (&)[4]) noexcept {
    const Ints even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
               odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const Ints x = sum[2 * v], y = sum[2 * v + 1];
      to[v] = _mm512_add_epi32(_mm512_permutex2var_epi32(x, even, y), _mm512_permutex2var_epi32(x, odd, y));
    }
  }
  static void put(Word (&to)[4], Vec q) noexcept {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(q.v)));
  }
  static Vec number(Ints x) noexcept { return {_mm512_cvtepi32_ps(x)}; }
#else
  static constexpr int kMostRows = 2;
  using Ints = __m256i;
  static Ints load_b(const u8* p, int v) noexcept {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + v * 16)));
  }
  static Ints all(Word a) noexcept { return _mm256_set1_epi64x(static_cast<i64>(a)); }
  static Ints add(Ints sum, Ints a, Ints b) noexcept { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
  static Ints count(Ints sum, Ints) noexcept { return sum; }
  static void finish(Ints (&to)[2], const Ints (&sum)[4], const Ints (&)[4]) noexcept {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v)
      to[v] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[2 * v], sum[2 * v + 1]), _MM_SHUFFLE(3, 1, 2, 0));
  }
  static void put(Word (&to)[2], Vec q) noexcept {
    const __m256i codes = _mm256_cvtps_epi32(q.v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1)));
  }
  static Vec number(Ints x) noexcept { return {_mm256_cvtepi32_ps(x)}; }
#endif
};
#endif
using Word = Quads::Word;
constexpr int kMostRows = Quads::kMostRows;

// x[K] as codes; returns their scale. Every `stride`-th word of `to` gets one.
template <class T>
float code_row(const T* x, i64 K, Word* to, i64 stride) noexcept {
  u32 largest = 0;
  for (i64 k = 0; k < K; ++k) largest = std::max(largest, std::bit_cast<u32>(to_float(x[k])) & 0x7FFFFFFFu);
  const float scale = block_scale(largest, {.bits = 8, .block = 0});
  if (scale != scale) {  // every product is NaN
    for (i64 k = 0; k < K; k += kQuad, to += stride) *to = 0;
    return scale;
  }
  for (i64 k = 0; k < K; k += kLanes) {
    Word words[kLanes / kQuad];
    Quads::put(words, round(load(x + k) / broadcast(scale)));
    for (const Word word : words) *to = word, to += stride;
  }
  return scale;
}

constexpr i64 kAheadOfQuads = 4096;  // bytes

// The sums of codes, as numbers, of kRows rows with kNR rows of B, times both scales. b: `quads` quads of each row.
using IntegerKernel = void (*)(i64 quads, const Word* a, const u8* b, const float* of_rows, const Vec (&of_b)[2],
                               float* sums);

template <int kRows>
void integer_kernel(i64 quads, const Word* a, const u8* b, const float* of_rows, const Vec (&of_b)[2],
                    float* sums) noexcept {
  using Ints = Quads::Ints;
  constexpr int kVectors = Quads::kVectors;
  Ints sum[kRows][kVectors], codes[kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = codes[v] = Quads::Ints{};
  }
  for (i64 q = 0; q < quads; ++q, a += kRows, b += kQuad * kNR) {
    for (i64 line = 0; line < kQuad * kNR; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(b + kAheadOfQuads + line), _MM_HINT_T0);
    Ints y[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      y[v] = Quads::load_b(b, v);
      codes[v] = Quads::count(codes[v], y[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Ints x = Quads::all(a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Quads::add(sum[r][v], x, y[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r, sums += kNR) {
    Ints whole[2];
    Quads::finish(whole, sum[r], codes);
    store(sums, Quads::number(whole[0]) * (broadcast(of_rows[r]) * of_b[0]));
    store(sums + kLanes, Quads::number(whole[1]) * (broadcast(of_rows[r]) * of_b[1]));
  }
}

constexpr auto kIntegerKernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<IntegerKernel, kMostRows>{integer_kernel<static_cast<int>(r + 1)>...};
}
(std::make_index_sequence<kMostRows>{});

// A worker's scratch for a tile: the codes and scales of its rows, in groups of kMostRows; a panel of B that was not
// one before; sums.
struct IntegerRoom {
  i64 codes, scales, panel, sums;  // bytes

  IntegerRoom(i64 rows, i64 K) noexcept
      : codes(round_up(round_up(rows, kMostRows) * K / kQuad * i64{sizeof(Word)}, 64)),
        scales(round_up(rows * i64{sizeof(float)}, 64)),
        panel(kNR * K),
        sums(kMostRows * kNR * i64{sizeof(float)}) {}
  size_t bytes() const noexcept { return static_cast<size_t>(codes + scales + panel + sums); }
};

// The codes of kNR rows from row n on, as in a whole panel.
const u8* panel_of(const CodedMatrix& m, i64 n, u8* room) noexcept {
  if (m.panels && n + kNR <= m.N) return m.data + n * m.form.row_bytes(m.K) + kNR * dtype_bytes(m.form.scales);
  const i64 rows = std::min(kNR, m.N - n), stride = m.panels ? rows * kQuad : kQuad;
  std::memset(room, 0, static_cast<size_t>(kNR * m.K));
  for (i64 r = 0; r < rows; ++r) {
    const u8* from = m.data + m.form.place(m.panels, m.N, m.K, n + r, 0).code;
    for (i64 k = 0; k < m.K; k += kQuad, from += stride) std::memcpy(room + k * kNR + r * kQuad, from, kQuad);
  }
  return room;
}

void load_scales(Vec (&to)[2], const CodedMatrix& m, i64 n) noexcept {
  float scales[kNR] = {};
  for (i64 r = 0; r < std::min(kNR, m.N - n); ++r)
    scales[r] = CodedForm::scale_at(m.form.scales, m.data + m.form.place(m.panels, m.N, m.K, n + r, 0).scale);
  for (int v = 0; v < 2; ++v) to[v] = load(scales + v * kLanes);
}

}  // namespace

size_t integer_tile_bytes(i64 rows, i64 K) noexcept { return IntegerRoom(rows, K).bytes(); }

template <class T>
void multiply_integer_tile(const Source<T>& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                           void* scratch) noexcept {
  const IntegerRoom room(m.size(), b.K);
  Word* const codes = static_cast<Word*>(scratch);
  float* const scales = reinterpret_cast<float*>(static_cast<char*>(scratch) + room.codes);
  u8* const panel = reinterpret_cast<u8*>(scales) + room.scales;
  float* const sums = reinterpret_cast<float*>(panel + room.panel);
  const i64 quads = b.K / kQuad;
  const auto rows_from = [&](i64 row) { return std::min<i64>(kMostRows, m.end - row); };
  for (i64 row = m.begin; row < m.end; ++row) {
    const i64 r = row - m.begin, first = r / kMostRows * kMostRows;
    scales[r] = code_row(a.at(row, 0), b.K, codes + first * quads + (r - first), rows_from(m.begin + first));
  }
  for (i64 j = n.begin; j < n.end; j += kNR) {
    const u8* const from = panel_of(b, j, panel);
    Vec of_b[2];
    load_scales(of_b, b, j);
    for (i64 row = m.begin; row < m.end; row += kMostRows) {
      const i64 rows = rows_from(row), r = row - m.begin;
      kIntegerKernels[static_cast<size_t>(rows - 1)](quads, codes + r * quads, from, scales + r, of_b, sums);
      done(e, sums, kNR, row, j, rows, std::min(kNR, n.end - j));
    }
  }
}

template void multiply_integer_tile(const Source<float>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;
template void multiply_integer_tile(const Source<bf16>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;
template void multiply_integer_tile(const Source<f16>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;

}  // namespace ds::cpu::DS_ISA_NAMESPACE
