// SPDX-License-Identifier: Apache-2.0
// Embedding lookup, and its gradient: rows are sorted by id in a stable order, then summed in that order per id and
// column.

#include "cuda/context.h"
#include "cuda/embedding_plan.h"
#include "cuda/row_matmul.h"
#include "cuda/vectors.h"

namespace ds::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// ---- lookup ----

constexpr int kRowPacks = 4;  // per lane: a warp copies 2 KiB of a row

// y[r] = table[ids[r] - first_id] (+ y[r]), or zeros; one warp per row, grid.y over its parts.
template <class T>
__global__ void lookup_kernel(T* y, const T* table, const i32* ids, i64 first_id, i64 V, i64 R, i64 C, bool accumulate,
                              bool wide) {
  constexpr int P = kPack<T>;
  const i64 r = i64{block_index().x} * kWarps + thread_index() / kWarp;
  if (r >= R) return;
  const i64 column = (i64{block_index().y} * kRowPacks * kWarp + thread_index() % kWarp) * P;
  const i64 id = i64{ids[r]} - first_id;
  const bool here = id >= 0 && id < V;
  if (!here && accumulate) return;
  const T* const row = table + (here ? id * C : 0);
  T* const out = y + r * C;
  if (wide && !accumulate) {
    uint4 packs[kRowPacks] = {};
    DS_UNROLL
    for (int k = 0; k < kRowPacks; ++k) {
      const i64 c = column + k * kWarp * P;
      if (here && c < C) packs[k] = *reinterpret_cast<const uint4*>(row + c);
    }
    DS_UNROLL
    for (int k = 0; k < kRowPacks; ++k) {
      const i64 c = column + k * kWarp * P;
      if (c < C) *reinterpret_cast<uint4*>(out + c) = packs[k];
    }
    return;
  }
  DS_UNROLL
  for (int k = 0; k < kRowPacks; ++k) {
    const i64 c = column + k * kWarp * P;
    float sum[P];
    load_some(sum, row + c, here ? C - c : 0, wide);
    if (accumulate) {
      float before[P];
      load_some(before, out + c, C - c, wide);
      DS_UNROLL
      for (int j = 0; j < P; ++j) sum[j] += before[j];
    }
    store_some(out + c, sum, C - c, wide);
  }
}

// ---- the stable order by id: a radix sort from the lowest digit ----

constexpr int kRounds = kTileKeys / kThreads;  // keys per lane; those of a warp are adjacent
static_assert(kThreads == kDigits, "one thread per digit");

// The input of a pass. rows null: row i is i, as before the first pass, when keys are ids and first_id is theirs;
// afterwards keys are rows of the table, or `num_ids` for all ids outside it, and first_id is 0.
struct Keys {
  const u32* keys;
  const u32* rows;
  i64 count;
  i64 first_id, num_ids;

  DS_DEVICE u32 operator[](i64 i) const {
    const i64 id = i64{static_cast<i32>(keys[i])} - first_id;
    return static_cast<u32>(id >= 0 && id < num_ids ? id : num_ids);
  }
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

// Counts the digits of each warp's keys in shared.count. ahead[round]: how many earlier keys of the warp have the digit
// of this lane's key; earlier rounds and lower lanes are earlier.
DS_DEVICE void count_digits(TileShared& shared, u32 (&ahead)[kRounds], const Keys& from, int shift) {
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  for (int w = 0; w < kWarps; ++w) shared.count[w][thread_index()] = 0;
  sync_block();
  for (int round = 0; round < kRounds; ++round) {
    const i64 i = key_index(round);
    const bool there = i < from.count;
    const u32 digit = there ? digit_of(from[i], shift) : 0;
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

// A key is placed after all keys of lower digits and those of its digit in earlier tiles, earlier warps, and ahead of
// it in its own warp, so keys with equal digits keep their order.
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
    const u32 key = from[i], at = shared.count[warp][digit_of(key, shift)] + ahead[round];
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

// Lists the starts of runs that are rows of the table, in any order.
__global__ void find_runs_kernel(Runs runs, i64 long_run) {
  const u32* const keys = runs.sorted.keys;
  const i64 n = runs.sorted.count, i = i64{block_index().x} * kThreads + thread_index();
  const int lane = thread_index() % kWarp;
  const bool starts = i < n && keys[i] != runs.sorted.num_ids && (i == 0 || keys[i - 1] != keys[i]);
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

// A warp's slice of a run: dtable[id] = (accumulate ? dtable[id] : 0) + dy[row] + ... in the order of the run.
// `column`: the lane's first column; it may be beyond the row, but the lane must call this, too.
constexpr int kSpan = 2;          // packs per lane, a warp's width apart
constexpr int kRowsInFlight = 2;  // of each
template <class To, class T>
DS_DEVICE void sum_short_run(To* dtable, const T* dy, const Keys& sorted, i64 start, i64 C, i64 column, bool accumulate,
                             bool wide) {
  constexpr int P = kPack<T>, kStep = kWarp * P;
  const int lane = thread_index() % kWarp;
  const u32 id = sorted.keys[start];
  const i64 there = C - column;
  To* const out = dtable + i64{id} * C + column;
  float sum[kSpan][P];
  DS_UNROLL
  for (int s = 0; s < kSpan; ++s) load_some(sum[s], out + s * kStep, accumulate ? there - s * kStep : 0, wide);
  for (i64 at = start;; at += kWarp) {
    const bool same = at + lane < sorted.count && sorted.keys[at + lane] == id;
    const u32 row = same ? sorted.rows[at + lane] : 0;
    const int count = std::popcount(warp_ballot(same));
    for (int first = 0; first < count; first += kRowsInFlight) {
      float x[kRowsInFlight][kSpan][P];
      DS_UNROLL
      for (int k = 0; k < kRowsInFlight; ++k) {
        const T* const from = dy + i64{warp_shuffle(row, first + k)} * C + column;
        DS_UNROLL
        for (int s = 0; s < kSpan; ++s)
          load_some(x[k][s], from + s * kStep, first + k < count ? there - s * kStep : 0, wide);
      }
      DS_UNROLL
      for (int k = 0; k < kRowsInFlight; ++k) {
        if (first + k < count) {
          DS_UNROLL
          for (int s = 0; s < kSpan; ++s) {
            DS_UNROLL
            for (int j = 0; j < P; ++j) sum[s][j] += x[k][s][j];
          }
        }
      }
    }
    if (count < kWarp) break;
  }
  DS_UNROLL
  for (int s = 0; s < kSpan; ++s) store_some(out + s * kStep, sum[s], there - s * kStep, wide);
}

// Finds the end of a run. All lanes of the warp must call this; each checks one key of the remaining range.
DS_DEVICE i64 end_of_run(const Keys& sorted, i64 start) {
  const u32 id = sorted.keys[start];
  i64 low = start, high = sorted.count;  // a key with the id, and the end or beyond
  while (high - low > 1) {
    const i64 step = (high - low + kWarp - 1) / kWarp, at = low + (thread_index() % kWarp + 1) * step;
    const i64 passed = std::popcount(warp_ballot(at < high && sorted.keys[at] == id)) * step;
    high = low + passed + step < high ? low + passed + step : high;
    low += passed;
  }
  return high;
}

// A long run is a chain of additions for every column. It is split into narrow slices of columns, so that many blocks
// share the run, with many rows in flight to shared memory. One warp adds, all warps copy.
constexpr int kLongLanes = 8;  // 16 bytes each: a slice is one line of 128 bytes
constexpr int kStageRows = kThreads / kLongLanes;
constexpr int kStages = 8;

struct SumShared {
  uint4 rows[kStages][kStageRows][kLongLanes];
  u32 ticket;
};

constexpr int kLongBytes = 16 * kLongLanes;
template <class T>
inline constexpr int kLongColumns = kLongBytes / static_cast<int>(sizeof(T));

// Like sum_short_run, for the columns [column, column + kLongColumns) and a whole block. Addresses must be aligned.
template <class To, class T>
DS_DEVICE void sum_long_run(To* dtable, const T* dy, const Keys& sorted, i64 start, i64 C, i64 column, bool accumulate,
                            SumShared& shared) {
  constexpr int kMine = kLongColumns<T> / kWarp;  // columns of an adding lane
  const i64 count = end_of_run(sorted, start) - start;
  const int lane = thread_index() % kWarp;
  const int copy_row = thread_index() / kLongLanes, copy_pack = thread_index() % kLongLanes;
  const i64 copy_column = column + copy_pack * kPack<T>;
  // A warp copies a few rows of every stage. Its lanes know the rows for kStages of them, and already for the next
  // kStages.
  constexpr int kWarpRows = kStageRows / kWarps;
  static_assert(kWarpRows * kStages == kWarp);
  const auto rows_of = [&](i64 round) {
    const i64 i =
        (round * kStages + lane / kWarpRows) * kStageRows + thread_index() / kWarp * kWarpRows + lane % kWarpRows;
    return i < count ? sorted.rows[start + i] : 0;
  };
  u32 rows = rows_of(0), next_rows = rows_of(1);
  const auto fetch = [&](i64 stage) {  // called for 0, 1, 2, ...
    const int slot = static_cast<int>(stage % kStages);
    const i64 row = warp_shuffle(rows, slot * kWarpRows + lane / kLongLanes);
    const bool wanted = stage * kStageRows + copy_row < count && copy_column < C;
    copy_async_16(&shared.rows[slot][copy_row][copy_pack], wanted ? dy + row * C + copy_column : dy, wanted);
    copies_commit();
    if (slot == kStages - 1) {
      rows = next_rows;
      next_rows = rows_of(stage / kStages + 2);
    }
  };
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(stage);

  const bool adds = thread_index() < kWarp && column + thread_index() * kMine < C;
  To* const out = dtable + i64{sorted.keys[start]} * C + column + thread_index() * kMine;
  float sum[kMine] = {};
  if (adds && accumulate) {
    DS_UNROLL
    for (int j = 0; j < kMine; ++j) sum[j] = load(out + j);
  }
  for (i64 stage = 0; stage * kStageRows < count; ++stage) {
    copies_wait<kStages - 2>();
    sync_block();  // this stage has arrived, and the previous one has been added
    fetch(stage + kStages - 1);
    if (!adds) continue;
    const auto add = [&](int r) {
      const u32 word = reinterpret_cast<const u32*>(shared.rows[stage % kStages][r])[thread_index()];
      if constexpr (kMine == 1) {
        sum[0] += std::bit_cast<float>(word);
      } else {
        const float2 x = unpack2<T>(word);
        sum[0] += x.x;
        sum[1] += x.y;
      }
    };
    const i64 left = count - stage * kStageRows;
    if (left >= kStageRows) {
      for (int r = 0; r < kStageRows; ++r) add(r);
    } else {
      for (int r = 0; r < left; ++r) add(r);
    }
  }
  if (adds) {
    DS_UNROLL
    for (int j = 0; j < kMine; ++j) store(out + j, sum[j]);
  }
  copies_wait<0>();
  sync_block();  // the stages may be reused
}

// Blocks draw work, long runs first: a ticket is a slice of a long run, or several slices of short runs for each warp.
constexpr i64 kItemsPerWarp = 8;
constexpr int kBlocksPerSm = 4;

template <class To, class T>
__global__ void sum_runs_kernel(To* dtable, const T* dy, Runs runs, i64 C, bool accumulate, bool wide) {
  constexpr i64 kShortColumns = kSpan * kWarp * kPack<T>;
  SumShared& shared = block_shared<SumShared>();
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const i64 short_slices = (C + kShortColumns - 1) / kShortColumns;
  const i64 long_slices = (C + kLongColumns<T> - 1) / kLongColumns<T>;
  const i64 short_items = short_slices * runs.counters->num_short;
  const i64 long_items = long_slices * runs.counters->num_long;
  for (;;) {
    if (thread_index() == 0) shared.ticket = atomic_add(&runs.counters->ticket, 1u);
    sync_block();
    const i64 ticket = shared.ticket;
    sync_block();
    if (ticket < long_items) {
      sum_long_run(dtable, dy, runs.sorted, i64{runs.long_runs[ticket / long_slices]}, C,
                   ticket % long_slices * kLongColumns<T>, accumulate, shared);
      continue;
    }
    const i64 begin = (ticket - long_items) * kWarps * kItemsPerWarp;
    if (begin >= short_items) break;
    for (i64 k = 0; k < kItemsPerWarp; ++k) {
      const i64 item = begin + warp * kItemsPerWarp + k;
      if (item >= short_items) break;
      sum_short_run(dtable, dy, runs.sorted, i64{runs.short_runs[item / short_slices]}, C,
                    item % short_slices * kShortColumns + lane * kPack<T>, accumulate, wide);
    }
  }
}

}  // namespace

void embedding_fwd(TensorView y, TensorView table, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept {
  if (table.codes) return look_up_codes(y, table, ids, first_id, accumulate, stream);
  Context& c = context(stream);
  const i64 R = y.dim(0), C = y.dim(1);
  with_work_type(y.dtype, [&]<class T>(T) {
    const i64 part = kRowPacks * kWarp * kPack<T>;
    const dim3 grid(static_cast<unsigned>((R + kWarps - 1) / kWarps), static_cast<unsigned>((C + part - 1) / part));
    launch(lookup_kernel<T>, {grid, kThreads, 0}, c.stream(), y.as<T>(), table.as<T>(), ids.as<i32>(), first_id,
           table.dim(0), R, C, accumulate, C % kPack<T> == 0 && all_aligned(16, {y.data, table.data}));
  });
  c.check(cudaGetLastError(), "embedding_fwd");
}

void embedding_bwd(TensorView dtable, TensorView dy, TensorView ids, i64 first_id, bool accumulate,
                   Stream& stream) noexcept {
  Context& c = context(stream);
  const i64 R = dy.dim(0), C = dy.dim(1);
  if (!accumulate) {  // ids without rows
    c.check(cudaMemsetAsync(dtable.data, 0, static_cast<size_t>(dtable.bytes()), c.stream()), "embedding_bwd, zeros");
  }
  if (R == 0) return;
  const i64 V = dtable.dim(0);
  const EmbeddingPlan plan = EmbeddingPlan::of(R, V + 1);  // including the ids outside the table
  char* const scratch = static_cast<char*>(c.scratch(plan.bytes));
  if (scratch == nullptr) return;
  const auto at = [&](size_t offset) { return reinterpret_cast<u32*>(scratch + offset); };
  u32 *const counts = at(plan.counts), *const totals = at(plan.totals);
  auto* const counters = reinterpret_cast<RunCounters*>(at(plan.counters));
  c.check(cudaMemsetAsync(counters, 0, sizeof(RunCounters), c.stream()), "embedding_bwd, counters");

  Keys from{ids.as<u32>(), nullptr, R, first_id, V};
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
    from = {keys, rows, R, 0, V};
  }
  const bool wide = C * dtype_bytes(dy.dtype) % 16 == 0 && all_aligned(16, {dtable.data, dy.data});
  const Runs runs{from, at(plan.short_runs), at(plan.long_runs), counters};
  launch(find_runs_kernel, {dim3(static_cast<unsigned>((R + kThreads - 1) / kThreads)), kThreads, 0}, c.stream(), runs,
         wide ? kLongRun : R);
  c.check(cudaGetLastError(), "embedding_bwd, runs");
  with_work_type(dy.dtype, [&]<class T>(T) {
    const Launch all{dim3(static_cast<unsigned>(kBlocksPerSm * c.num_multiprocessors())), kThreads, sizeof(SumShared)};
    if (dtable.dtype == DType::F32) {
      launch(sum_runs_kernel<float, T>, all, c.stream(), dtable.as<float>(), dy.as<T>(), runs, C, accumulate, wide);
    } else {
      launch(sum_runs_kernel<T, T>, all, c.stream(), dtable.as<T>(), dy.as<T>(), runs, C, accumulate, wide);
    }
  });
  c.check(cudaGetLastError(), "embedding_bwd");
}

}  // namespace ds::cuda
