// SPDX-License-Identifier: Apache-2.0
// Tokens drawn from rows of logits, a row per worker.

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "cpu/isa/kernels.h"
#include "sampling.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

namespace {

using sampling::order_of;

class SampledRow {
 public:
  SampledRow(float* z, i64 n) noexcept : size(static_cast<i32>(n)), z_(z) {}

  const i32 size;

  // NaN does not count.
  u32 largest() const noexcept {
    u32 most = 0;
    for (i32 i = 0; i < size; ++i) most = std::max(most, order_of(z_[i]));
    return most;
  }
  bool is_finite() const noexcept {
    u32 infinite = 0;
    for (i32 i = 0; i < size; ++i) infinite |= static_cast<u32>(!sampling::is_finite(z_[i]));
    return infinite == 0;
  }

  // Digits of order_of from the first on. A histogram shows which one the border has.
  template <class Measure, class Need>
  sampling::Border border(const Measure& measure, const Need& need) const noexcept {
    constexpr int kBits = 11;
    u64 sums[1 << kBits];
    u64 before = 0, needed = 0;
    u64 prefix = 0;  // the digits so far
    for (int above = 32; above > 0;) {
      const int bits = std::min(kBits, above), shift = above - bits;
      std::ranges::fill(sums, u64{0});
      in_pieces(prefix, above, measure,
                [&](u32 order, u64 mine) { sums[order >> shift & ((1u << bits) - 1)] += mine; });
      if (above == 32) needed = need(std::accumulate(std::begin(sums), std::end(sums), u64{0}));
      u64 digit = (1u << bits) - 1;
      for (; before + sums[digit] < needed; --digit) before += sums[digit];
      prefix = prefix << bits | digit;
      above = shift;
    }
    return {static_cast<u32>(prefix), before};
  }

  i32 nth(u32 order, u64 n) const noexcept {
    constexpr i32 kPiece = 1024;
    for (i32 begin = 0;; begin += kPiece) {
      const i32 end = std::min(size, begin + kPiece);
      u32 count = 0;
      for (i32 i = begin; i < end; ++i) count += static_cast<u32>(order_of(z_[i]) == order);
      if (n >= count) {
        n -= count;
        continue;
      }
      for (i32 i = begin;; ++i) {
        if (order_of(z_[i]) == order && n-- == 0) return i;
      }
    }
  }

 private:
  // Calls f(order, measure) for the logits whose order begins with `prefix`, above bit `above`.
  template <class Measure, class F>
  void in_pieces(u64 prefix, int above, const Measure& measure, const F& f) const noexcept {
    constexpr i32 kPiece = 512;
    u64 measures[kPiece];
    u32 orders[kPiece];
    for (i32 begin = 0; begin < size; begin += kPiece) {
      const i32 n = std::min(kPiece, size - begin);
      const float* const z = z_ + begin;
      u32 matches = 0;
      for (i32 i = 0; i < n; ++i) {
        orders[i] = order_of(z[i]);
        matches |= static_cast<u32>(u64{orders[i]} >> above == prefix);
      }
      if (matches == 0) continue;
      for (i32 i = 0; i < n; ++i) measures[i] = measure(z[i], begin + i);
      for (i32 i = 0; i < n; ++i) {
        if (u64{orders[i]} >> above == prefix) f(orders[i], measures[i]);
      }
    }
  }

  float* const z_;
};

}  // namespace

void sample(TensorView tokens, TensorView most_likely, TensorView logits, const Draw* draws, LogitChange* changes,
            Stream& stream) noexcept {
  stream.pool->parallel_for(logits.dim(0), [=](i64 r, int) {
    float* const z = logits.as<float>() + r * logits.stride[0];
    SampledRow row(z, logits.dim(1));
    i32 &token = tokens.as<i32>()[r], &most = most_likely.as<i32>()[r];
    token = most = -1;
    if (!row.is_finite()) return;
    const u32 top = row.largest();
    token = most = row.nth(top, 0);
    const Draw& d = draws[r];
    const std::span<LogitChange> mine(changes + d.first_change, static_cast<size_t>(d.num_changes));
    if (mine.empty() && sampling::is_greedy(d)) return;
    for (LogitChange& c : mine) c.kept = std::exchange(z[c.id], sampling::changed(z[c.id], c));
    token = sampling::draw(row, d, mine.empty() ? top : row.largest());
    for (const LogitChange& c : mine) z[c.id] = c.kept;
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
