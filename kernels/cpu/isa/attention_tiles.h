// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts that both passes of attention share: scratch, operands of products, scores and weights.

#include <cstring>
#include <limits>
#include <utility>

#include "cpu/isa/attention_blocks.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/operands.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

// Enough tiles to feed and balance the threads of a rank; a constant, so that results depend on shapes only.
inline constexpr i64 kTargetTiles = 48;
// Distance of prefetching rows and keys, which are too far apart for the hardware to prefetch.
inline constexpr i64 kAhead = 16;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Scratch for all workers of a call: a shared part, which belongs to the caller, and one for each.
class CallScratch {
 public:
  struct Size {
    i64 shared, own;
    i64 bytes() const noexcept { return shared + own; }
  };
  CallScratch(ThreadPool& pool, const Size& size) noexcept
      : pool_(pool), shared_(size.shared), base_(static_cast<char*>(pool.reserve_scratch(size.bytes()))) {}
  float* shared() const noexcept { return reinterpret_cast<float*>(base_); }
  Arena own(int worker) const noexcept {
    void* const mine = pool_.scratch(worker);
    return Arena(mine == base_ ? base_ + shared_ : mine);
  }

 private:
  ThreadPool& pool_;
  i64 shared_;
  char* base_;
};

// e^x for x <= 0; results below 2^-126 are 0, so no subnormal arises. NaN passes.
[[gnu::always_inline]] inline Vec exp_weight(Vec x) noexcept {
  const Vec least = broadcast(-87.0f);
  return select(less(x, least), zero(), exp_bounded(max(least, x)));
}

// Replaces the lanes of columns j .. j+kLanes-1 that are not seen by `other`.
[[gnu::always_inline]] inline Vec outside(Vec x, i64 j, const Seen& seen, Vec other) noexcept {
  const auto lanes_below = [j](i64 limit) { return first(std::clamp<i64>(limit - j, 0, Vec::kLanes)); };
  const auto within = [&](Range r, Vec rest) __attribute__((always_inline)) {
    return select(lanes_below(r.begin), rest, select(lanes_below(r.end), x, rest));
  };
  return within(seen.near, seen.sinks.empty() ? other : within(seen.sinks, other));
}

// Rows `rows` of a query-like tensor.
template <class E>
void load_rows(const RowForms& to, const TensorView& x, const Problem& a, const Operands<E>& op, i64 b, i64 g,
               Range rows, float scale) noexcept {
  const auto row = [&](i64 i) { return x.as<E>() + a.row_offset(x, b, g, rows.begin + i); };
  const i64 last = a.rows() - 1 - rows.begin;
  load_tile(to, op, {0, rows.size()}, scale, row, [&](i64 i) { return row(std::min(i + kAhead, last)); });
}

inline Vec load_int8(const std::int8_t* p, AllLanes) noexcept {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
#else
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
#endif
}
inline Vec load_int8(const std::int8_t* p, i64 n) noexcept {
  std::int8_t some[Vec::kLanes] = {};
  std::memcpy(some, p, static_cast<size_t>(n));
  return load_int8(some, AllLanes{});
}

// 8-bit codes times their scale, rounded to E.
template <class E>
void decode_row(E* to, const std::int8_t* codes, i64 n, float scale) noexcept {
  for_vectors(0, n, [&](i64 j, auto count) { store(to + j, load_int8(codes + j, count) * broadcast(scale), count); });
}

// The keys of a whole pack of a key-like tensor, with zero rows up to a multiple of the lanes. decoded: for the rows of
// a pack, if the tensor has codes.
template <class E>
void load_keys(const RowForms& to, const TensorView& x, const Problem& a, const Operands<E>& op, i64 b, i64 g,
               const Pack& pack, E* decoded = nullptr) noexcept {
  const i64 n = pack.columns.end, last = a.S - 1;
  if (x.dtype == DType::I8) {
    const i64 D = x.dim(3);
    for (i64 j = pack.columns.begin; j < n; ++j) {
      const i64 at = a.key_offset(x, b, g, pack.key(j));
      decode_row(decoded + j * D, x.as<std::int8_t>() + at, D, x.scale[at / D]);
    }
    const auto row = [&](i64 j) { return decoded + j * D; };
    load_tile(to, op, pack.columns, 1.0f, row, row);
    return zero_rows(to, op, {n, round_up(n, Vec::kLanes)});
  }
  const auto at = [&](i64 key) { return x.as<E>() + a.key_offset(x, b, g, key); };
  pack.for_units(pack.columns, [&](Range c) {
    const i64 key = pack.key(c.begin) - c.begin;
    // The data after a unit is prefetched with it, or when its own turn comes.
    load_tile(
        to, op, c, 1.0f, [&](i64 j) { return at(key + j); },
        [&](i64 j) {
          return at(pack.unit == 0 ? std::min(key + j + kAhead, last) : pack.key(std::min(j + kAhead, n - 1)));
        });
  });
  zero_rows(to, op, {n, round_up(n, Vec::kLanes)});
}

// Multiplies n products of a row, a multiple of the lanes.
inline void scale_row(float* row, i64 n, float scale) noexcept {
  for (i64 j = 0; j < n; j += Vec::kLanes) store(row + j, broadcast(scale) * load(row + j));
}

// Turns scaled products of a row and some columns into scores, if these have further terms, and stores the derivatives
// in `slope`, if given.
inline void to_scores(float* row, float* slope, const Problem& a, i64 g, i64 at, const Pack& pack,
                      Range columns) noexcept {
  if (a.p.softcap > 0) {
    const Vec cap = broadcast(a.p.softcap), twice = broadcast(2.0f / a.p.softcap), one = broadcast(1.0f);
    for (i64 j = 0; j < columns.size(); j += Vec::kLanes) {
      // tanh x = 1 - 2 / (1 + e^2x); e^2x is inf or 0 if tanh is 1 or -1.
      const Vec x = min(max(load(row + j) * twice, broadcast(-80.0f)), broadcast(80.0f));
      const Vec t = one - broadcast(2.0f) / (one + exp(x));
      store(row + j, cap * t);
      if (slope != nullptr) store(slope + j, one - t * t);
    }
  }
  if (a.p.bias == nullptr) return;
  const i64 reach = a.p.reach, query = a.query_place(at);
  const float* const bias = a.p.bias + (a.p.grid.head0 + g * a.R + a.head_of(at)) * (2 * reach + 1) + reach;
  pack.for_units(columns, [&](Range c) {
    const i64 first = a.p.grid.col0 + pack.key(c.begin) - query;
    float* const score = row + c.begin - columns.begin;
    i64 j = 0;
    for (; j + Vec::kLanes <= c.size() && first + j >= -reach && first + j + Vec::kLanes - 1 <= reach; j += Vec::kLanes)
      store(score + j, load(score + j) + load(bias + first + j));
    for (; j < c.size(); ++j) score[j] += bias[std::clamp(first + j, -reach, reach)];
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
