// SPDX-License-Identifier: Apache-2.0
#pragma once
// Elements of matrices of codes (ds/kernels/codes.h): decoded one by one anywhere, and in vectors in whole panels.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/gemm.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

struct CodedMatrix {
  const u8* data;
  CodedForm form;
  Panels panels;
  i64 N, K;

  explicit CodedMatrix(const TensorView& v) noexcept
      : data(v.as<u8>()), form(v.codes), panels(v.panels), N(v.dim(0)), K(v.dim(1)) {}
};

// The elements of a group of one row.
class CodedRow {
 public:
  CodedRow(const CodedMatrix& m, i64 n, i64 group) noexcept
      : form_(m.form), log_depth_(m.panels ? std::countr_zero(m.panels.depth) : 0) {
    const CodedForm::Place at = form_.place(m.panels, m.N, m.K, n, group * form_.group);
    const i64 rows = m.panels ? m.panels.rows : 1;
    codes_ = m.data + at.code;
    width_ = std::min(rows, m.N - n / rows * rows);
    scale_ = CodedForm::scale_at(form_.scales, m.data + at.scale);
    if (form_.offsets) offset_ = CodedForm::scale_at(DType::F32, m.data + at.offset);
  }
  float operator[](i64 i) const noexcept {
    return form_.offsets ? std::fma(code(i), scale_, offset_) : code(i) * scale_;
  }

 private:
  float code(i64 i) const noexcept {
    const i64 step = i >> log_depth_, inner = i - (step << log_depth_);
    const bool half = form_.kind == CodeKind::Int4;
    return form_.value(codes_[(((half ? step >> 1 : step) * width_) << log_depth_) + inner],
                       half && (step & 1) != 0 ? 4 : 0);
  }

  const CodedForm form_;
  const u8* codes_;
  int log_depth_;
  i64 width_;
  float scale_, offset_ = 0;
};

// Calls f(i, element k + i) for elements [k, k + count) of row n.
template <class F>
void each_element(const CodedMatrix& m, i64 n, i64 k, i64 count, F&& f) noexcept {
  const i64 end = k + count;
  for (i64 at = k; at < end;) {
    const i64 begin = at % m.form.group, size = std::min(m.form.group - begin, end - at);
    const CodedRow row(m, n, at / m.form.group);
    for (i64 i = 0; i < size; ++i) f(at - k + i, row[begin + i]);
    at += size;
  }
}

// The words of k in [k, k + depth) of the panel of kNR rows from n on; zero for rows that the matrix lacks.
template <class Product, class T>
[[gnu::noinline]] void decode_one_by_one(float* words, const CodedMatrix& m, i64 n, i64 k, i64 depth) noexcept {
  constexpr i64 D = Product::kDepth;
  using Element = std::conditional_t<D == 1, float, T>;
  Element* const to = reinterpret_cast<Element*>(words);
  std::fill_n(to, depth * kNR, Element{});
  for (i64 r = 0; r < std::min(kNR, m.N - n); ++r) {
    each_element(m, n + r, k, depth, [&](i64 i, float x) {
      to[(i / D * kNR + r) * D + i % D] = from_float<Element>(to_float(from_float<T>(x)));
    });
  }
}

// Moves the 4-bit codes of two steps of a row, in `depth` bytes, from their order in rows to that in panels.
inline void pair_steps(u8* codes, i64 depth) noexcept {
  u8 from[8];
  std::copy_n(codes, depth, from);
  const auto code = [&](i64 i) { return from[i / 2] >> (i % 2 * 4) & 15; };
  for (i64 i = 0; i < depth; ++i) codes[i] = static_cast<u8>(code(i) | code(depth + i) << 4);
}

// Calls f with the kind as a constant.
template <CodeKind kKind>
using Kind = std::integral_constant<CodeKind, kKind>;
template <class F>
auto with_kind(CodeKind kind, F&& f) noexcept {
  if (kind == CodeKind::Int4) return f(Kind<CodeKind::Int4>{});
  if (kind == CodeKind::E4M3) return f(Kind<CodeKind::E4M3>{});
  return f(Kind<CodeKind::Int8>{});
}

// Integer lanes. of_int4: the numbers of 4-bit codes in the low bits of lanes; other bits are ignored.
#if defined(__AVX512F__)
using Ints = __m512i;
inline Ints all_ints(u32 x) noexcept { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Ints load_ints(const u8* p) noexcept { return _mm512_loadu_si512(p); }
inline Ints signed_bytes(const u8* p) noexcept {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints plain_bytes(const u8* p) noexcept {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec to_numbers(Ints x) noexcept { return {_mm512_cvtepi32_ps(x)}; }
inline Vec as_numbers(Ints bits) noexcept { return {_mm512_castsi512_ps(bits)}; }
inline Vec of_int4(Ints x) noexcept {
  return {_mm512_permutexvar_ps(x, _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7))};
}
inline Ints up(Ints x, int bits) noexcept { return _mm512_slli_epi32(x, static_cast<unsigned>(bits)); }
inline Ints down(Ints x, int bits) noexcept { return _mm512_srli_epi32(x, static_cast<unsigned>(bits)); }
inline Ints max_bytes(Ints x, Ints y) noexcept { return _mm512_max_epu8(x, y); }
inline Ints both(Ints x, Ints y) noexcept { return _mm512_and_si512(x, y); }
inline bool any_byte(Ints x, u8 value) noexcept {
  return _mm512_cmpeq_epi8_mask(x, _mm512_set1_epi8(static_cast<char>(value))) != 0;
}
// True if every lane is 0, or from `least` to `most` in magnitude.
inline bool all_within(Vec x, float least, float most) noexcept {
  const __m512 a = abs(x).v;
  const __mmask16 in = _mm512_cmp_ps_mask(a, _mm512_set1_ps(most), _CMP_LE_OQ) &
                       (_mm512_cmp_ps_mask(a, _mm512_set1_ps(least), _CMP_GE_OQ) |
                        _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_EQ_OQ));
  return in == 0xFFFF;
}
#else
using Ints = __m256i;
inline Ints all_ints(u32 x) noexcept { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Ints load_ints(const u8* p) noexcept { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Ints signed_bytes(const u8* p) noexcept {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints plain_bytes(const u8* p) noexcept {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec to_numbers(Ints x) noexcept { return {_mm256_cvtepi32_ps(x)}; }
inline Vec as_numbers(Ints bits) noexcept { return {_mm256_castsi256_ps(bits)}; }
inline Vec of_int4(Ints x) noexcept {
  return to_numbers(_mm256_sub_epi32(_mm256_and_si256(x, all_ints(15)), all_ints(8)));
}
inline Ints up(Ints x, int bits) noexcept { return _mm256_slli_epi32(x, bits); }
inline Ints down(Ints x, int bits) noexcept { return _mm256_srli_epi32(x, bits); }
inline Ints max_bytes(Ints x, Ints y) noexcept { return _mm256_max_epu8(x, y); }
inline Ints both(Ints x, Ints y) noexcept { return _mm256_and_si256(x, y); }
inline bool any_byte(Ints x, u8 value) noexcept {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_set1_epi8(static_cast<char>(value)))) != 0;
}
inline bool all_within(Vec x, float least, float most) noexcept {
  const __m256 a = abs(x).v;
  const __m256 in = _mm256_and_ps(_mm256_cmp_ps(a, _mm256_set1_ps(most), _CMP_LE_OQ),
                                  _mm256_or_ps(_mm256_cmp_ps(a, _mm256_set1_ps(least), _CMP_GE_OQ),
                                               _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_EQ_OQ)));
  return _mm256_movemask_ps(in) == 0xFF;
}
#endif

// fp32 lanes, rounded to T; not for NaN.
template <class T>
Vec rounded(Vec x) noexcept {
  if constexpr (std::is_same_v<T, float>) {
    return x;
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<T, f16>) {
    return {_mm512_cvtph_ps(_mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  } else {
    const __m512i u = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
    return {_mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))))};
#else
  } else if constexpr (std::is_same_v<T, f16>) {
    return {_mm256_cvtph_ps(_mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  } else {
    const __m256i u = _mm256_castps_si256(x.v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
    return {_mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))))};
#endif
  }
}

// A part of a group, in a panel of kNR rows.
struct CodedPiece {
  const u8 *scales, *offsets, *codes;  // codes: those of its first element
  i64 depth;                           // elements of a row
};

// Calls f(piece) for each group in [k, k + depth) of the panel from row n on.
template <class F>
[[gnu::always_inline]] inline void each_piece(const CodedMatrix& m, i64 n, i64 k, i64 depth, F&& f) noexcept {
  const i64 group = m.form.group, group_bytes = m.form.group_bytes() * kNR, scale = dtype_bytes(m.form.scales) * kNR;
  const u8* at = m.data + n * m.form.row_bytes(m.K) + k / group * group_bytes;
  i64 begin = k % group;
  for (const i64 end = k + depth; k < end; at += group_bytes, begin = 0) {
    const i64 size = std::min(group - begin, end - k);
    const u8* const codes = at + scale + (m.form.offsets ? 4 * kNR : 0);
    f(CodedPiece{at, at + scale, codes + begin * kNR / (m.form.kind == CodeKind::Int4 ? 2 : 1), size});
    k += size;
  }
}

// Decodes a piece of a panel, in vectors, to words of Product, each a number of T or a pair of them.
template <class Product, class T, CodeKind kKind>
class PieceDecoder {
 public:
  static constexpr i64 D = Product::kDepth;
  static constexpr int kVectors = 2 * D;                                      // fp32, of one word of all rows
  static constexpr i64 kBytes = kNR * D * (kKind == CodeKind::Int4 ? 1 : 2);  // of two words

  // False if an element could be subnormal, which some conversions flush to zero, or a scale is not finite.
  bool take(const CodedForm& form, const u8* scales, const u8* offsets) noexcept {
    constexpr float kLeast = 0x1p-90f, kMost = 0x1.FFFFFEp127f, kMostOfE4M3 = 0x1p7f;
    bool fits = true;
    Vec scale[2], offset[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      scale[v] = scales_at(form.scales, scales, v);
      fits = fits && all_within(scale[v], kLeast, kKind == CodeKind::E4M3 ? kMostOfE4M3 : kMost);
      offset[v] = broadcast(-0.0f);  // leaves the sign of a zero
      if (!form.offsets) continue;
      offset[v] = load(reinterpret_cast<const float*>(offsets) + v * kLanes);
      fits = fits && all_within(offset[v], kLeast, kMost);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      scale_[v] = spread(scale, v), offset_[v] = spread(offset, v);
      if constexpr (kKind == CodeKind::E4M3) scale_[v] = scale_[v] * broadcast(kPowerOfE4M3);
    }
    return fits;
  }

  // words[w][v]: vector v of word w, of two words that begin at p.
  [[gnu::always_inline]] void decode(const u8* p, Vec (&words)[2][2]) noexcept {
    Vec x[2][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kKind == CodeKind::Int4) {
        const Ints bytes = plain_bytes(p + v * kLanes);
        x[0][v] = of_int4(bytes), x[1][v] = of_int4(down(bytes, 4));
      } else {
        x[0][v] = of_byte(signed_bytes(p + v * kLanes));
        x[1][v] = of_byte(signed_bytes(p + (kVectors + v) * kLanes));
      }
    }
    if constexpr (kKind == CodeKind::E4M3) {
      for (i64 i = 0; i < kBytes; i += i64{sizeof(Ints)})
        largest_ = max_bytes(largest_, both(load_ints(p + i), all_ints(0x7F7F7F7F)));
    }
#pragma GCC unroll 2
    for (int w = 0; w < 2; ++w) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) x[w][v] = fma(x[w][v], scale_[v], offset_[v]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if constexpr (D == 2) {
          words[w][v] = Product::join_halves(x[w][2 * v], x[w][2 * v + 1]);
        } else {
          words[w][v] = rounded<T>(x[w][v]);
        }
      }
    }
  }

  // False if there were codes of NaN, which decode() takes for numbers.
  bool valid() const noexcept { return kKind != CodeKind::E4M3 || !any_byte(largest_, 0x7F); }

 private:
  // The bits of an E4M3 code, read as an fp32 number, are its value divided by this.
  static constexpr float kPowerOfE4M3 = 0x1p120f;

  static Vec of_byte(Ints code) noexcept {
    if constexpr (kKind == CodeKind::Int8) return to_numbers(code);
    return as_numbers(both(up(code, 20), all_ints(0x87F00000)));
  }
  static Vec scales_at(DType t, const u8* p, i64 v) noexcept {
    Vec x{};
    with_work_type(t, [&]<class S>(S) { x = load(reinterpret_cast<const S*>(p) + v * kLanes); });
    return x;
  }
  // One number for each element of vector v of a word.
  static Vec spread(const Vec (&of_rows)[2], int v) noexcept {
#if defined(__AVX512F__)
    if constexpr (D == 2) {
      const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      return {_mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(v % 2 * 8)), of_rows[v / 2].v)};
    }
#endif
    return of_rows[v];
  }

  Vec scale_[kVectors], offset_[kVectors];
  Ints largest_ = all_ints(0);
};

// Whether panel n is one that Product reads: of whole words.
template <class Product>
bool is_whole_panel(const CodedMatrix& m, i64 n) noexcept {
  return m.panels.rows == kNR && m.panels.depth == Product::kDepth && n + kNR <= m.N;
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
