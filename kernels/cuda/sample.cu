// SPDX-License-Identifier: Apache-2.0
// Tokens drawn from rows of logits, a block per row. Instead of sorting the row, which is in the L2 cache, it runs
// through it many times.

#include "cuda/context.h"
#include "cuda/ops.h"
#include "cuda/simt.h"
#include "sampling.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kDigit = 2, kDigits = 1 << kDigit;  // bits of order_of that border() finds in one run; their values

struct SampleShared {
  u64 sums[kWarps][kDigits];
  i32 found;
};

template <class F>
DS_DEVICE u64 over_warp(u64 x, F f) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = f(x, warp_shuffle_xor(x, mask));
  return x;
}
DS_DEVICE u64 sum_of(u64 a, u64 b) { return a + b; }

// All threads of a block call its functions alike, and get the same results.
class BlockRow {
 public:
  DS_DEVICE BlockRow(float* z, i64 n, SampleShared& shared)
      : size(static_cast<i32>(n)), z_(z), shared_(shared), thread_(thread_index()) {}

  const i32 size;

  // 0 if a logit is not finite, or banned.
  DS_DEVICE u32 largest(bool may_be_banned) {
    u32 most = 0;
    bool sound = true;
    for (i32 i = thread_; i < size; i += kThreads) {
      const float z = z_[i];
      const u32 mine = sampling::order_of(z);
      most = mine > most ? mine : most;
      sound = sound && (may_be_banned || sampling::is_finite(z));
    }
    u64 sums[kDigits] = {most, sound ? 0u : 1u};
    const auto larger = [](u64 a, u64 b) { return a > b ? a : b; };
    over_block(sums, larger);
    return sums[1] == 0 ? static_cast<u32>(sums[0]) : 0;
  }

  // By digits from the first on. Only logits that share the digits so far are measured.
  template <class Measure, class Need>
  DS_DEVICE sampling::Border border(const Measure& measure, const Need& need) {
    u64 before = 0, needed = 0, prefix = 0;
    for (int above = 32; above > 0; above -= kDigit) {
      u64 sums[kDigits] = {};
      for (i32 i = thread_; i < size; i += kThreads) {
        const float z = z_[i];
        const u32 order = sampling::order_of(z), digit = order >> (above - kDigit) & (kDigits - 1);
        if (u64{order} >> above != prefix) continue;
        const u64 mine = measure(z, i);
        DS_UNROLL
        for (u32 d = 0; d < kDigits; ++d) sums[d] += d == digit ? mine : 0;
      }
      over_block(sums, sum_of);
      if (above == 32) needed = need(sums[0] + sums[1] + sums[2] + sums[3]);
      u64 digit = 0;
      bool found = false;
      DS_UNROLL
      for (int d = kDigits - 1; d >= 0; --d) {
        if (found) continue;
        found = d == 0 || before + sums[d] >= needed;
        digit = static_cast<u64>(d);
        if (!found) before += sums[d];
      }
      prefix = prefix << kDigit | digit;
    }
    return {static_cast<u32>(prefix), before};
  }

  // A warp counts neighbouring logits, and the warp that has the place runs through its own again.
  DS_DEVICE i32 nth(u32 order, u64 n) {
    const int warp = thread_ / kWarp, lane = thread_ % kWarp;
    const i32 part = (size + kThreads - 1) / kThreads * kWarp;
    const i32 begin = warp * part, end = begin + part < size ? begin + part : size;
    const auto matches = [&](i32 first) {
      return warp_ballot(first + lane < end && sampling::order_of(z_[first + lane]) == order);
    };
    u64 count = 0;
    for (i32 first = begin; first < end; first += kWarp) count += static_cast<u64>(std::popcount(matches(first)));
    sync_block();  // all have read the last results
    if (lane == 0) shared_.sums[warp][0] = count;
    sync_block();
    u64 before = 0;
    for (int w = 0; w < warp; ++w) before += shared_.sums[w][0];
    for (i32 first = begin; before <= n && n < before + count; first += kWarp) {
      const u32 found = matches(first);
      const u64 here = static_cast<u64>(std::popcount(found));
      const bool mine =
          (found >> lane & 1) != 0 && before + static_cast<u64>(std::popcount(found & ((1u << lane) - 1))) == n;
      if (mine) shared_.found = first + lane;
      if (n < before + here) break;
      before += here, count -= here;
    }
    sync_block();
    return shared_.found;
  }

  template <class F>
  DS_DEVICE void for_changes(LogitChange* changes, i64 n, F f) {
    sync_block();
    for (i64 i = thread_; i < n; i += kThreads) f(z_[changes[i].id], changes[i]);
    sync_block();
  }

 private:
  template <class F>
  DS_DEVICE void over_block(u64 (&sums)[kDigits], F f) {
    sync_block();  // all have read the last results
    for (int d = 0; d < kDigits; ++d) {
      sums[d] = over_warp(sums[d], f);
      if (thread_ % kWarp == 0) shared_.sums[thread_ / kWarp][d] = sums[d];
    }
    sync_block();
    for (int d = 0; d < kDigits; ++d) {
      sums[d] = shared_.sums[0][d];
      for (int w = 1; w < kWarps; ++w) sums[d] = f(sums[d], shared_.sums[w][d]);
    }
  }

  float* z_;
  SampleShared& shared_;
  int thread_;
};

__global__ void __launch_bounds__(kThreads) sample_kernel(i32* tokens, i32* most_likely, float* logits, i64 stride,
                                                          i64 V, const Draw* draws, LogitChange* changes) {
  const i64 r = block_index().x;
  BlockRow row(logits + r * stride, V, block_shared<SampleShared>());
  const u32 top = row.largest(false);
  const Draw d = draws[r];
  const i32 most = top == 0 ? -1 : row.nth(top, 0);
  i32 token = most;
  if (top != 0 && (d.num_changes > 0 || !sampling::is_greedy(d))) {
    LogitChange* const mine = changes + d.first_change;
    row.for_changes(mine, d.num_changes, [](float& z, LogitChange& c) {
      c.kept = z;
      z = sampling::changed(z, c);
    });
    token = sampling::draw(row, d, d.num_changes > 0 ? row.largest(true) : top);
    row.for_changes(mine, d.num_changes, [](float& z, LogitChange& c) { z = c.kept; });
  }
  if (thread_index() == 0) tokens[r] = token, most_likely[r] = most;
}

}  // namespace

void sample(TensorView tokens, TensorView most_likely, TensorView logits, const Draw* draws, LogitChange* changes,
            Stream& s) noexcept {
  Context& c = context(s);
  launch(sample_kernel, {dim3(static_cast<unsigned>(logits.dim(0))), kThreads, sizeof(SampleShared)}, c.stream(),
         tokens.as<i32>(), most_likely.as<i32>(), logits.as<float>(), logits.stride[0], logits.dim(1), draws, changes);
  c.check(cudaGetLastError(), "sample");
}

}  // namespace ds::cuda
