// SPDX-License-Identifier: Apache-2.0
// Embedding lookup, and its gradient: rows sorted by id in a stable order, then one sum per id and column, in that
// order.

#include "cuda/context.h"
#include "cuda/embedding_plan.h"
#include "cuda/packs.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// ---- lookup ----

constexpr int kRowPacks = 4;  // of a lane: a warp copies 2 KiB of a row

// y[r] = table[ids[r]] (+ y[r]); a warp per row, grid.y over its parts.
template <class T>
__global__ void lookup_kernel(T* y, const T* table, const i32* ids, i64 R, i64 C, bool accumulate, bool wide) {
  constexpr int P = kPack<T>;
  const i64 r = i64{block_index().x} * kWarps + thread_index() / kWarp;
  if (r >= R) return;
  const i64 column = (i64{block_index().y} * kRowPacks * kWarp + thread_index() % kWarp) * P;
  const T* const row = table + i64{ids[r]} * C;
  T* const out = y + r * C;
  if (wide && !accumulate) {
    uint4 packs[kRowPacks];
    for (int k = 0; k < kRowPacks; ++k) {
      const i64 c = column + k * kWarp * P;
      if (c < C) packs[k] = *reinterpret_cast<const uint4*>(row + c);
    }
    for (int k = 0; k < kRowPacks; ++k) {
      const i64 c = column + k * kWarp * P;
      if (c < C) *reinterpret_cast<uint4*>(out + c) = packs[k];
    }
    return;
  }
  for (int k = 0; k < kRowPacks; ++k) {
    const i64 c = column + k * kWarp * P;
    float sum[P];
    load_some(sum, row + c, C - c, wide);
    if (accumulate) {
      float before[P];
      load_some(before, out + c, C - c, wide);
      for (int j = 0; j < P; ++j) sum[j] += before[j];
    }
    store_some(out + c, sum, C - c, wide);
  }
}

// ---- the stable order by id: a radix sort from the lowest digit ----

constexpr int kRounds = kTileKeys / kThreads;  // keys of a lane; a warp's lie side by side
static_assert(kThreads == kDigits, "one thread per digit");

// What a pass reads; rows null: row i is i, as before the first pass.
struct Keys {
  const u32* keys;
  const u32* rows;
  i64 count;
};

struct TileShared {
  u32 count[kWarps][kDigits];
  u32 of_warp[kWarps];
};

DS_DEVICE u32 digit_of(u32 key, int shift) { return key >> shift & (kDigits - 1); }
DS_DEVICE i64 key_index(int round) {
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  return i64{block_index().x} * kTileKeys + warp * kRounds * kWarp + round * kWarp + lane;
}

// Counts the digits of each warp's keys in shared.count. ahead[round]: how many of the warp's earlier keys have the
// digit of this lane's key, earlier rounds and lower lanes being earlier.
DS_DEVICE void count_digits(TileShared& shared, u32 (&ahead)[kRounds], const Keys& from, int shift) {
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  for (int w = 0; w < kWarps; ++w) shared.count[w][thread_index()] = 0;
  sync_block();
  for (int round = 0; round < kRounds; ++round) {
    const i64 i = key_index(round);
    const bool there = i < from.count;
    const u32 digit = there ? digit_of(from.keys[i], shift) : 0;
    u32 same = warp_ballot(there);  // lanes whose key has the same digit
    for (u32 bit = 1; bit < kDigits; bit <<= 1) {
      const u32 set = warp_ballot((digit & bit) != 0);
      same &= (digit & bit) != 0 ? set : ~set;
    }
    const u32 before = static_cast<u32>(std::popcount(same & ((1u << lane) - 1)));
    ahead[round] = shared.count[warp][digit] + before;
    sync_warp();
    if (there && before == 0) shared.count[warp][digit] += static_cast<u32>(std::popcount(same));
    sync_warp();
  }
  sync_block();
}

// counts[digit][tile] = the tile's keys with that digit.
__global__ void count_kernel(u32* counts, Keys from, int shift) {
  TileShared& shared = block_shared<TileShared>();
  u32 ahead[kRounds];
  count_digits(shared, ahead, from, shift);
  u32 sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared.count[w][thread_index()];
  counts[i64{thread_index()} * grid_size().x + block_index().x] = sum;
}

// The sum of x over this lane and the lower ones.
DS_DEVICE u32 warp_inclusive_scan(u32 x) {
  for (int delta = 1; delta < kWarp; delta *= 2) {
    const u32 y = warp_shuffle_up(x, delta);
    if (thread_index() % kWarp >= delta) x += y;
  }
  return x;
}

// A warp per digit: counts[digit][tile] becomes the sum over earlier tiles, totals[digit] the sum over all.
__global__ void scan_kernel(u32* counts, u32* totals, i64 num_tiles) {
  const int lane = thread_index() % kWarp;
  const i64 digit = i64{block_index().x} * kWarps + thread_index() / kWarp;
  u32* const count = counts + digit * num_tiles;
  u32 sum = 0;
  for (i64 at = 0; at < num_tiles; at += kWarp) {
    const u32 x = at + lane < num_tiles ? count[at + lane] : 0;
    const u32 upto = warp_inclusive_scan(x);
    if (at + lane < num_tiles) count[at + lane] = sum + upto - x;
    sum += warp_shuffle(upto, kWarp - 1);
  }
  if (lane == 0) totals[digit] = sum;
}

// A key goes behind all keys of lower digits, those of its digit in earlier tiles, in earlier warps, and ahead of it in
// its own: keys of one digit keep their order.
__global__ void scatter_kernel(u32* keys, u32* rows, Keys from, const u32* counts, const u32* totals, int shift) {
  TileShared& shared = block_shared<TileShared>();
  u32 ahead[kRounds];
  count_digits(shared, ahead, from, shift);
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const u32 total = totals[thread_index()], upto = warp_inclusive_scan(total);
  if (lane == kWarp - 1) shared.of_warp[warp] = upto;
  sync_block();
  u32 first = upto - total + counts[i64{thread_index()} * grid_size().x + block_index().x];
  for (int w = 0; w < warp; ++w) first += shared.of_warp[w];
  for (int w = 0; w < kWarps; ++w) {
    const u32 count = shared.count[w][thread_index()];
    shared.count[w][thread_index()] = first;
    first += count;
  }
  sync_block();
  for (int round = 0; round < kRounds; ++round) {
    const i64 i = key_index(round);
    if (i >= from.count) continue;
    const u32 key = from.keys[i], at = shared.count[warp][digit_of(key, shift)] + ahead[round];
    keys[at] = key;
    rows[at] = from.rows != nullptr ? from.rows[i] : static_cast<u32>(i);
  }
}

// ---- runs of one id ----

struct Runs {
  Keys sorted;
  u32 *short_runs, *long_runs;  // where they start
  RunCounters* counters;
};

// Lists the starts of runs, in any order.
__global__ void find_runs_kernel(Runs runs, i64 long_run) {
  const u32* const keys = runs.sorted.keys;
  const i64 n = runs.sorted.count, i = i64{block_index().x} * kThreads + thread_index();
  const int lane = thread_index() % kWarp;
  const bool starts = i < n && (i == 0 || keys[i - 1] != keys[i]);
  const bool is_long = starts && i + long_run < n && keys[i + long_run] == keys[i];
  const auto list = [&](u32* starts_of, u32* counter, bool mine) {
    const u32 lanes = warp_ballot(mine);
    u32 first = lane == 0 && lanes != 0 ? atomic_add(counter, static_cast<u32>(std::popcount(lanes))) : 0;
    first = warp_shuffle(first, 0);
    if (mine) starts_of[first + static_cast<u32>(std::popcount(lanes & ((1u << lane) - 1)))] = static_cast<u32>(i);
  };
  list(runs.short_runs, &runs.counters->num_short, starts && !is_long);
  list(runs.long_runs, &runs.counters->num_long, is_long);
}

// One lane's columns of one run: dtable[id] = (accumulate ? dtable[id] : 0) + dy[row] + ... in the order of the run.
// All lanes of the warp come; `there` are the columns that the lane has, perhaps none.
constexpr int kRowsInFlight = 4;
template <class To, class T>
DS_DEVICE void sum_run(To* dtable, const T* dy, const Keys& sorted, i64 start, i64 C, i64 column, bool accumulate,
                       bool wide) {
  constexpr int P = kPack<T>;
  const int lane = thread_index() % kWarp;
  const u32 id = sorted.keys[start];
  const i64 there = C - column;
  To* const out = dtable + i64{id} * C + column;
  float sum[P];
  load_some(sum, out, accumulate ? there : 0, wide);
  for (i64 at = start;; at += kWarp) {
    const bool same = at + lane < sorted.count && sorted.keys[at + lane] == id;
    const u32 row = same ? sorted.rows[at + lane] : 0;
    const int count = std::popcount(warp_ballot(same));
    for (int first = 0; first < count; first += kRowsInFlight) {
      float x[kRowsInFlight][P];
      for (int k = 0; k < kRowsInFlight; ++k) {
        const i64 r = warp_shuffle(row, first + k);
        if (first + k < count) load_some(x[k], dy + r * C + column, there, wide);
      }
      for (int k = 0; k < kRowsInFlight; ++k) {
        if (first + k < count) {
          for (int j = 0; j < P; ++j) sum[j] += x[k][j];
        }
      }
    }
    if (count < kWarp) break;
  }
  store_some(out, sum, there, wide);
}

// A block draws its work, items of a run and a slice of columns, until there is none.
constexpr i64 kItemsPerWarp = 8;

struct SumShared {
  u32 ticket;
};

template <class To, class T>
__global__ void sum_runs_kernel(To* dtable, const T* dy, Runs runs, i64 C, bool accumulate, bool wide) {
  constexpr int P = kPack<T>;
  SumShared& shared = block_shared<SumShared>();
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const i64 slices = (C + kWarp * P - 1) / (kWarp * P);
  const i64 num_items = slices * runs.counters->num_short;
  for (;;) {
    if (thread_index() == 0) shared.ticket = atomic_add(&runs.counters->ticket, 1u);
    sync_block();
    const i64 begin = i64{shared.ticket} * kWarps * kItemsPerWarp;
    sync_block();
    if (begin >= num_items) break;
    for (i64 k = 0; k < kItemsPerWarp; ++k) {
      const i64 item = begin + warp * kItemsPerWarp + k;
      if (item >= num_items) break;
      const i64 run = item / slices, slice = item % slices;
      sum_run(dtable, dy, runs.sorted, i64{runs.short_runs[run]}, C, (slice * kWarp + lane) * P, accumulate, wide);
    }
  }
}

}  // namespace

void embedding_fwd(TensorView y, TensorView table, TensorView ids, bool accumulate, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = y.dim(0), C = y.dim(1);
  with_work_type(y.dtype, [&]<class T>(T) {
    const i64 part = kRowPacks * kWarp * kPack<T>;
    const dim3 grid(static_cast<unsigned>((R + kWarps - 1) / kWarps), static_cast<unsigned>((C + part - 1) / part));
    launch(lookup_kernel<T>, {grid, kThreads, 0}, c.stream(), y.as<T>(), table.as<T>(), ids.as<i32>(), R, C, accumulate,
           C % kPack<T> == 0 && all_aligned(16, {y.data, table.data}));
  });
  c.check(cudaGetLastError(), "embedding_fwd");
}

void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, bool accumulate, Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = dy.dim(0), C = dy.dim(1);
  if (!accumulate) {  // ids without rows
    c.check(cudaMemsetAsync(dtable.data, 0, static_cast<size_t>(dtable.bytes()), c.stream()), "embedding_bwd, zeros");
  }
  if (R == 0) return;
  const EmbeddingPlan plan = EmbeddingPlan::of(R, dtable.dim(0));
  char* const scratch = static_cast<char*>(c.scratch(plan.bytes));
  if (scratch == nullptr) return;
  const auto at = [&](size_t offset) { return reinterpret_cast<u32*>(scratch + offset); };
  u32 *const counts = at(plan.counts), *const totals = at(plan.totals);
  auto* const counters = reinterpret_cast<RunCounters*>(at(plan.counters));
  c.check(cudaMemsetAsync(counters, 0, sizeof(RunCounters), c.stream()), "embedding_bwd, counters");

  Keys from{ids.as<u32>(), nullptr, R};
  const dim3 tiles(static_cast<unsigned>(plan.num_tiles));
  for (int pass = 0; pass < plan.num_passes; ++pass) {
    const int shift = 8 * pass;
    u32 *const keys = at(plan.keys[pass % 2]), *const rows = at(plan.rows[pass % 2]);
    launch(count_kernel, {tiles, kThreads, sizeof(TileShared)}, c.stream(), counts, from, shift);
    c.check(cudaGetLastError(), "embedding_bwd, counting digits");
    launch(scan_kernel, {dim3(kDigits / kWarps), kThreads, 0}, c.stream(), counts, totals, plan.num_tiles);
    c.check(cudaGetLastError(), "embedding_bwd, scan of the counts");
    launch(scatter_kernel, {tiles, kThreads, sizeof(TileShared)}, c.stream(), keys, rows, from, counts, totals, shift);
    c.check(cudaGetLastError(), "embedding_bwd, sorting");
    from = {keys, rows, R};
  }
  const Runs runs{from, at(plan.short_runs), at(plan.long_runs), counters};
  launch(find_runs_kernel, {dim3(static_cast<unsigned>((R + kThreads - 1) / kThreads)), kThreads, 0}, c.stream(), runs,
         R);
  c.check(cudaGetLastError(), "embedding_bwd, runs");
  with_work_type(dy.dtype, [&]<class T>(T) {
    const bool wide = C % kPack<T> == 0 && all_aligned(16, {dtable.data, dy.data});
    const Launch all{dim3(static_cast<unsigned>(8 * c.num_multiprocessors())), kThreads, sizeof(SumShared)};
    if (dtable.dtype == DType::F32) {
      launch(sum_runs_kernel<float, T>, all, c.stream(), dtable.as<float>(), dy.as<T>(), runs, C, accumulate, wide);
    } else {
      launch(sum_runs_kernel<T, T>, all, c.stream(), dtable.as<T>(), dy.as<T>(), runs, C, accumulate, wide);
    }
  });
  c.check(cudaGetLastError(), "embedding_bwd");
}

}  // namespace ds::cuda
