// SPDX-License-Identifier: Apache-2.0
// Products of rows that are coded here, with a matrix of codes: exact sums of integers by groups, which are added up in
// fp32 in the order of groups. So there is one result, in whatever order the codes of a group are added up.

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

constexpr i64 kQuad = 4;               // codes of a row that panels keep together: one 32-bit lane
constexpr i64 kVector = sizeof(Ints);  // bytes: a quad of each of kLanes rows
constexpr Panels kQuadPanels{kNR, kQuad};

// Integer lanes, and the sums of products of quads.
#if defined(__AVX512F__)
inline Ints largest_of(Ints x, Ints y) noexcept { return _mm512_max_epu32(x, y); }
inline u32 largest_lane(Ints x) noexcept { return _mm512_reduce_max_epu32(x); }
inline Ints sum_of(Ints x, Ints y) noexcept { return _mm512_add_epi32(x, y); }
inline i32 sum_of_lanes(Ints x) noexcept { return _mm512_reduce_add_epi32(x); }
inline Ints as_bits(Vec x) noexcept { return _mm512_castps_si512(x.v); }
inline Ints to_ints(Vec x) noexcept { return _mm512_cvtps_epi32(x.v); }
inline Ints low_nibbles(Ints x) noexcept { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) noexcept { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline void store_bytes(u32 (&to)[kLanes / kQuad], Ints x) noexcept {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
#else
inline Ints largest_of(Ints x, Ints y) noexcept { return _mm256_max_epu32(x, y); }
inline u32 largest_lane(Ints x) noexcept {
  __m128i y = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_max_epu32(y, _mm_shuffle_epi32(y, _MM_SHUFFLE(1, 0, 3, 2)));
  return static_cast<u32>(_mm_cvtsi128_si32(_mm_max_epu32(y, _mm_shuffle_epi32(y, _MM_SHUFFLE(2, 3, 0, 1)))));
}
inline Ints sum_of(Ints x, Ints y) noexcept { return _mm256_add_epi32(x, y); }
inline i32 sum_of_lanes(Ints x) noexcept {
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, _MM_SHUFFLE(1, 0, 3, 2)));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, _MM_SHUFFLE(2, 3, 0, 1))));
}
inline Ints as_bits(Vec x) noexcept { return _mm256_castps_si256(x.v); }
inline Ints to_ints(Vec x) noexcept { return _mm256_cvtps_epi32(x.v); }
inline Ints low_nibbles(Ints x) noexcept { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Ints high_nibbles(Ints x) noexcept { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline void store_bytes(u32 (&to)[kLanes / kQuad], Ints x) noexcept {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}
#endif

// The instructions multiply unsigned bytes by signed ones. Those of A are signed; a code of 4 bits is unsigned as it is
// stored, 8 more than its value. kAbove times the sum of A's codes is subtracted for it, from the first lane on: sums
// wrap, and differences are exact.
template <CodeKind kKind>
struct Quads {
#if defined(__AVX512VNNI__)
  static constexpr int kAbove = kKind == CodeKind::Int4 ? 8 : 128;
  static constexpr int kMostRows = 12, kFewest = 3;
  struct Codes {
    Ints b;
    static Ints of_bytes(Ints x) noexcept { return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))); }
    explicit Codes(Ints x) noexcept : b(kKind == CodeKind::Int4 ? x : of_bytes(x)) {}
  };
  // GCC 12 spills every sum to memory with the intrinsic.
  static Ints add(Ints sum, const Codes& b, Ints a) noexcept {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(b.b), "v"(a));
    return sum;
  }
#else
  // VPMADDUBSW adds two products to 16 bits, and saturates. With codes of 4 bits they are at most 2 * 15 * 127. Of
  // those of 8 bits it gets magnitudes, and A's codes their signs: at most 2 * 128 * 127.
  static constexpr int kAbove = kKind == CodeKind::Int4 ? 8 : 0;
#if defined(__AVX512F__)
  static constexpr int kMostRows = 10, kFewest = 3;
  struct Codes {
    Ints b;
    __mmask64 negative;
    explicit Codes(Ints x) noexcept
        : b(kKind == CodeKind::Int4 ? x : _mm512_abs_epi8(x)), negative(_mm512_movepi8_mask(x)) {}
  };
  static Ints add(Ints sum, const Codes& b, Ints a) noexcept {
    if constexpr (kKind != CodeKind::Int4) a = _mm512_mask_sub_epi8(a, b.negative, _mm512_setzero_si512(), a);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(b.b, a), _mm512_set1_epi16(1)));
  }
#else
  static constexpr int kMostRows = 4, kFewest = 1;
  struct Codes {
    Ints b, with_signs;
    explicit Codes(Ints x) noexcept : b(kKind == CodeKind::Int4 ? x : _mm256_abs_epi8(x)), with_signs(x) {}
  };
  static Ints add(Ints sum, const Codes& b, Ints a) noexcept {
    if constexpr (kKind != CodeKind::Int4) a = _mm256_sign_epi8(a, b.with_signs);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(b.b, a), _mm256_set1_epi16(1)));
  }
#endif
#endif
};
constexpr int kMostRows = Quads<CodeKind::Int8>::kMostRows;

// A group of a row of A.
struct CodedGroup {
  float scale;
  i32 first;    // sums begin with it
  float total;  // the sum of codes, times the scale
};

// Codes the group x [size] to quads, `stride` words apart. above: Quads::kAbove.
template <class T>
CodedGroup code_group(const T* x, i64 size, int above, u32* to, i64 stride) noexcept {
  Ints largest = all_ints(0), sum = all_ints(0);
  for (i64 k = 0; k < size; k += kLanes) largest = largest_of(largest, as_bits(abs(load(x + k))));
  const float scale = block_scale(largest_lane(largest), {.bits = 8, .block = 0});
  const bool finite = scale == scale;  // else every product is NaN
  for (i64 k = 0; k < size; k += kLanes) {
    const Ints codes = finite ? to_ints(load(x + k) / broadcast(scale)) : all_ints(0);
    sum = sum_of(sum, codes);
    u32 words[kLanes / kQuad];
    store_bytes(words, codes);
    for (const u32 word : words) *to = word, to += stride;
  }
  const i32 total = sum_of_lanes(sum);
  return {scale, static_cast<i32>(-static_cast<u32>(above) * static_cast<u32>(total)),
          static_cast<float>(total) * scale};
}

void load_numbers(Vec (&to)[2], DType t, const u8* p) noexcept {
  with_work_type(t, [&]<class S>(S) {
    to[0] = load(reinterpret_cast<const S*>(p)), to[1] = load(reinterpret_cast<const S*>(p) + kLanes);
  });
}

// The sums of kRows rows with a panel of B: `words` and `groups` are those of all rows, quad by quad and group by
// group.
using IntegerKernel = void (*)(const CodedForm& form, i64 num_groups, const u32* words, const CodedGroup* groups,
                               const u8* panel, float* sums);

template <CodeKind kKind, int kRows>
void integer_kernel(const CodedForm& form, i64 num_groups, const u32* words, const CodedGroup* groups, const u8* panel,
                    float* sums) noexcept {
  using Q = Quads<kKind>;
  // With few rows, sums of one vector would wait for each other.
  constexpr int kSteps = 2, kChains = kRows <= Q::kFewest ? kSteps : 1;
  constexpr i64 kAheadOfPanel = 4096, kStepBytes = (kKind == CodeKind::Int4 ? 1 : kSteps) * 2 * kVector;
  const i64 scale_bytes = kNR * dtype_bytes(form.scales), head = scale_bytes + (form.offsets ? kNR * 4 : 0);
  Vec y[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) y[r][0] = y[r][1] = broadcast(-0.0f);
  for (i64 g = 0; g < num_groups; ++g, groups += kRows) {
    const u8* const of_group = panel;
    panel += head;
    Ints sum[kChains][kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[0][r][0] = sum[0][r][1] = all_ints(static_cast<u32>(groups[r].first));
      if constexpr (kChains == 2) sum[1][r][0] = sum[1][r][1] = all_ints(0);
    }
    for (i64 k = 0; k < form.group; k += kSteps * kQuad, words += kSteps * kRows, panel += kStepBytes) {
      for (i64 line = 0; line < kStepBytes; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(panel + kAheadOfPanel + line), _MM_HINT_T0);
#pragma GCC unroll 2
      for (int step = 0; step < kSteps; ++step) {
        const auto codes = [&](int v) {
          if constexpr (kKind == CodeKind::Int4) {
            const Ints x = load_ints(panel + v * kVector);
            return typename Q::Codes(step == 0 ? low_nibbles(x) : high_nibbles(x));
          } else {
            return typename Q::Codes(load_ints(panel + (step * 2 + v) * kVector));
          }
        };
        const typename Q::Codes b[2] = {codes(0), codes(1)};
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          const Ints a = all_ints(words[step * kRows + r]);
          auto& to = sum[kChains == 2 ? step : 0][r];
          to[0] = Q::add(to[0], b[0], a), to[1] = Q::add(to[1], b[1], a);
        }
      }
    }
    Vec scale[2], offset[2];
    load_numbers(scale, form.scales, of_group);
    if (form.offsets) load_numbers(offset, DType::F32, of_group + scale_bytes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const Ints whole = kChains == 2 ? sum_of(sum[0][r][v], sum[kChains - 1][r][v]) : sum[0][r][v];
        y[r][v] = fma(to_numbers(whole), broadcast(groups[r].scale) * scale[v], y[r][v]);
        if (form.offsets) y[r][v] = fma(offset[v], broadcast(groups[r].total), y[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) store(sums + r * kNR, y[r][0]), store(sums + r * kNR + kLanes, y[r][1]);
}

template <CodeKind kKind>
constexpr auto kIntegerKernels = []<size_t... r>(std::index_sequence<r...>) {
  return std::array<IntegerKernel, kMostRows>{integer_kernel<kKind, static_cast<int>(r + 1)>...};
}
(std::make_index_sequence<kMostRows>{});

// A worker's scratch for a tile: the codes of its rows and their groups, in blocks of kMostRows rows; a panel of B that
// was not one before; sums.
struct IntegerRoom {
  i64 words, groups, panel, sums;  // bytes

  IntegerRoom(const CodedForm& form, i64 rows, i64 K) noexcept
      : words(round_up(rows * K, 64)),
        groups(round_up(rows * (K / form.group) * i64{sizeof(CodedGroup)}, 64)),
        panel(round_up(kNR * form.row_bytes(K), 64)),
        sums(kMostRows * kNR * i64{sizeof(float)}) {}
  size_t bytes() const noexcept { return static_cast<size_t>(words + groups + panel + sums); }
};

// kNR rows from row n on, as a whole panel; the rows that the matrix lacks are zero.
const u8* panel_of(const CodedMatrix& m, i64 n, u8* room) noexcept {
  const CodedForm& form = m.form;
  if (m.panels && n + kNR <= m.N) return m.data + n * form.row_bytes(m.K);
  const i64 rows = std::min(kNR, m.N - n), stride = m.panels ? rows * kQuad : kQuad;
  std::memset(room, 0, static_cast<size_t>(kNR * form.row_bytes(m.K)));
  for (i64 r = 0; r < rows; ++r) {
    for (i64 k = 0; k < m.K; k += form.group) {
      const CodedForm::Place from = form.place(m.panels, m.N, m.K, n + r, k),
                             to = form.place(kQuadPanels, kNR, m.K, r, k);
      std::memcpy(room + to.scale, m.data + from.scale, static_cast<size_t>(dtype_bytes(form.scales)));
      if (form.offsets) std::memcpy(room + to.offset, m.data + from.offset, sizeof(float));
      for (i64 i = 0; i < form.code_bytes() / kQuad; ++i) {
        u8* const quad = room + to.code + i * kNR * kQuad;
        std::memcpy(quad, m.data + from.code + i * stride, kQuad);
        if (form.kind == CodeKind::Int4 && !m.panels) pair_steps(quad, kQuad);
      }
    }
  }
  return room;
}

}  // namespace

size_t integer_tile_bytes(const CodedForm& form, i64 rows, i64 K) noexcept {
  return IntegerRoom(form, rows, K).bytes();
}

template <class T>
void multiply_integer_tile(const Source<T>& a, const CodedMatrix& b, Range m, Range n, const Epilogue& e, FinishFn done,
                           void* scratch) noexcept {
  const CodedForm& form = b.form;
  const IntegerRoom room(form, m.size(), b.K);
  u32* const words = static_cast<u32*>(scratch);
  auto* const groups = reinterpret_cast<CodedGroup*>(static_cast<char*>(scratch) + room.words);
  u8* const panel = reinterpret_cast<u8*>(groups) + room.groups;
  float* const sums = reinterpret_cast<float*>(panel + room.panel);
  const i64 quads = b.K / kQuad, num_groups = b.K / form.group;
  const bool is_int4 = form.kind == CodeKind::Int4;
  const int above = is_int4 ? Quads<CodeKind::Int4>::kAbove : Quads<CodeKind::Int8>::kAbove;
  const auto& kernels = is_int4 ? kIntegerKernels<CodeKind::Int4> : kIntegerKernels<CodeKind::Int8>;
  const auto each_block = [&](auto&& f) {
    for (i64 row = m.begin; row < m.end; row += kMostRows)
      f(row, std::min<i64>(kMostRows, m.end - row), words + (row - m.begin) * quads,
        groups + (row - m.begin) * num_groups);
  };
  each_block([&](i64 row, i64 rows, u32* to, CodedGroup* of_groups) {
    for (i64 r = 0; r < rows; ++r) {
      for (i64 g = 0; g < num_groups; ++g)
        of_groups[g * rows + r] = code_group(a.at(row + r, g * form.group), form.group, above,
                                             to + g * (form.group / kQuad) * rows + r, rows);
    }
  });
  for (i64 j = n.begin; j < n.end; j += kNR) {
    const u8* const from = panel_of(b, j, panel);
    each_block([&](i64 row, i64 rows, const u32* of_words, const CodedGroup* of_groups) {
      kernels[static_cast<size_t>(rows - 1)](form, num_groups, of_words, of_groups, from, sums);
      done(e, sums, kNR, row, j, rows, std::min(kNR, n.end - j));
    });
  }
}

template void multiply_integer_tile(const Source<float>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;
template void multiply_integer_tile(const Source<bf16>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;
template void multiply_integer_tile(const Source<f16>&, const CodedMatrix&, Range, Range, const Epilogue&, FinishFn,
                                    void*) noexcept;

}  // namespace ds::cpu::DS_ISA_NAMESPACE
