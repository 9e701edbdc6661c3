// SPDX-License-Identifier: Apache-2.0
// Attention by row (attention_rows.h) on the tensor core, and the merging of parts for all dtypes. The steps are those
// of attention_fwd.cu.

#include "cuda/attention_rows.h"

#include "cuda/attention_softmax.h"

namespace ds::cuda::attention {
namespace {

// Loads the rows of a tile from row `first` on, with zeros from row `limit` and from column D on.
template <int kD, int kRows, int kThreads, class E>
DS_DEVICE void load_packed(E* tile, const PackedRows<const E>& x, int first, int limit, int D) {
  constexpr int kChunks = kD / 8;
  DS_NO_UNROLL
  for (int i = thread_index(); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool exists = first + row < limit;
    const E* const from = x.at(first + row);
    E* const to = tile + swizzled<kD>(row, chunk);
    if (x.whole_chunks) {
      copy_async_16(to, from + chunk * 8, exists && chunk * 8 < D);
    } else {
      copy_elements(to, Head<const E>{from, 0, false}, 0, exists ? 1 : 0, chunk * 8, D);
    }
  }
}

// A step of keys or values of codes, decoded: like Steps::load, but complete after a barrier.
template <int kD, int kStep, int kThreads, class E>
DS_DEVICE void load_codes(E* tile, const CodedHead& x, const Steps<true, kStep>& steps, int n, int limit, int D) {
  constexpr int kChunks = kD / 8;
  DS_NO_UNROLL
  for (int i = thread_index(); i < kStep * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, token = steps.first(n, row / 16), down = row % 16;
    float x8[8] = {};
    if (token + down < limit) x.read(x8, steps.row_of(token) + down, chunk * 8, D);
    *reinterpret_cast<uint4*>(tile + swizzled<kD>(row, chunk)) =
        make_uint4(pack2<E>(x8[0], x8[1]), pack2<E>(x8[2], x8[3]), pack2<E>(x8[4], x8[5]), pack2<E>(x8[6], x8[7]));
  }
}

// A lane's sum of a row, over the four lanes that share it.
DS_DEVICE float row_sum(float lane_sum) {
  lane_sum += warp_shuffle_xor(lane_sum, 1);
  return lane_sum + warp_shuffle_xor(lane_sum, 2);
}

// Calls f(column, accumulator) for a lane's elements of half `half` of a row tile.
template <int kN, class F>
DS_DEVICE void for_columns(float (&x)[kN][4], int half, F&& f) {
  const int lane = thread_index() % kWarp;
  DS_UNROLL
  for (int n = 0; n < kN; ++n) {
    DS_UNROLL
    for (int e = 0; e < 2; ++e) f(8 * n + lane % 4 * 2 + e, x[n][2 * half + e]);
  }
}

template <class E, int kD>
__global__ void __launch_bounds__(ForwardPlan<kD>::kThreads) forward_by_row(ForwardArgs<E> a) {
  using Plan = ForwardPlan<kD>;
  constexpr int kM = Plan::kRowTiles, kThreads = Plan::kThreads;
  auto& shared = block_shared<ForwardShared<E, kD, true>>();
  const Problem<E>& p = a.problem;
  const RowTile<E, Plan::kOwn> tile(a);
  if (tile.empty()) return;
  const SampleMask mask(tile.mask, tile.places, tile.b);
  const Range own_queries = tile.queries({tile.first, tile.first + Plan::kOwn});
  ForwardSteps<true, kD> steps(
      shared, tile.layout, {.own = own_queries, .seen = tile.keys(mask.keys_of_rows(own_queries)), .head = tile.head});
  steps.start();

  const int lane = thread_index() % kWarp, warp = warp_shuffle(thread_index() / kWarp, 0);
  const int warp_row = tile.first + warp * 16 * kM, group = tile.head / p.R;
  const Range warp_queries = tile.queries({warp_row, warp_row + 16 * kM});
  const auto token_of = [&](int row) { return tile.query(row); };
  const WarpRows view{mask,
                      token_of,
                      tile.b,
                      tile.head,
                      warp_row,
                      warp_queries,
                      mask.keys_of_rows(warp_queries),
                      steps.own_blocks(warp_queries),
                      p.terms.distance0 + tile.shift};
  E* const own = shared.q + warp * 16 * kM * kD;
  Fragments<kD, kM, Plan::kHold, E> query(own);

  const auto load_step = [&](int n) {
    if (a.rows.k_scale != nullptr) {
      load_codes<kD, Plan::kStep, kThreads>(shared.k[n % 2], tile.coded(p.k, a.rows.k_scale, p.D), steps, n, mask.S,
                                            p.D);
      load_codes<kD, Plan::kStep, kThreads>(shared.v[n % 2], tile.coded(p.v, a.rows.v_scale, p.Dv), steps, n, mask.S,
                                            p.Dv);
    } else {
      steps.template load<kD, kThreads>(shared.k[n % 2], p.k(tile.b, group), n, mask.S, p.D);
      steps.template load<kD, kThreads>(shared.v[n % 2], p.v(tile.b, group), n, mask.S, p.Dv);
    }
    copies_commit();
  };
  if (steps.has(0)) {
    load_packed<kD, Plan::kOwn, kThreads>(shared.q, tile.in(p.q), tile.first, tile.rows, p.D);
    load_step(0);
    copies_wait<0>();
    sync_block();
    query.load();
  }

  Rows rows[kM];
  RowTotal total[kM][2];
  float x[kM][kD / 8][4];
  DS_UNROLL
  for (int m = 0; m < kM; ++m) clear(x[m]);
  const auto row_of = [&](int m, int half) { return warp_row + 16 * m + 8 * half + lane / 4; };
  // Adds the part to the totals; results so far are in memory, or after the last part in x.
  const auto end_part = [&](bool last) {
    DS_UNROLL
    for (int m = 0; m < kM; ++m) {
      DS_UNROLL
      for (int half = 0; half < 2; ++half) {
        const RowTotal part = {rows[m].top[half], row_sum(rows[m].sum[half])};
        const bool first = total[m][half].sum == 0, none = part.sum == 0;
        const PartWeights weights = none ? PartWeights{1, 0} : add_part(total[m][half], part);
        const int row = row_of(m, half);
        float* const sums = tile.sums(row, 0);
        for_columns(x[m], half, [&](int d, float& y) {
          const bool exists = row < tile.rows && d < p.Dv;
          float sum = y;
          if (exists && !first) sum = none ? sums[d] : merged(sums[d], y, weights);
          if (exists && !last) sums[d] = sum;
          y = last ? sum : 0.0f;
        });
      }
      rows[m] = Rows();
    }
  };
  const bool in_parts = a.rows.parts > 1 && !a.rows.split;
  int part = 0;
  DS_NO_UNROLL
  for (int n = 0; steps.has(n); ++n) {
    if (in_parts) {
      const int next = steps.first(n, 0) / kPartKeys;
      if (n > 0 && next != part) end_part(false);
      part = next;
    }
    if (steps.has(n + 1)) load_step(n + 1);
    steps.make(n + 2);
    attend_step<kD, Plan::kHold, true>(x, rows, p, steps, n, shared.k[n % 2], shared.v[n % 2], query, view);
    copies_wait<0>();
    sync_block();
  }
  if (in_parts) end_part(true);

  const float factor = p.dropout.on ? p.dropout.factor : 1.0f;
  DS_UNROLL
  for (int m = 0; m < kM; ++m) {
    DS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(m, half);
      if (!in_parts) total[m][half] = {rows[m].top[half], row_sum(rows[m].sum[half])};
      const RowTotal& t = total[m][half];
      if (a.rows.split) {
        if (row >= tile.rows) continue;
        float* const sums = tile.sums(row, tile.part);
        if (t.sum != 0) {
          for_columns(x[m], half, [&](int d, float y) {
            if (d < p.Dv) sums[d] = y;
          });
        }
        float* const end = sums + RowPlan::row_floats(p.Dv) - 2;
        if (lane % 4 == 0) end[0] = t.top, end[1] = t.sum;
        continue;
      }
      const float share = share_of<E>(factor, t.sum);
      for_columns(x[m], half, [&](int, float& y) { y = t.sum == 0 ? 0.0f : y * share; });
      if (lane % 4 == 0 && row < tile.rows) *tile.lse(row) = log_sum_exp(t);
    }
    if (!a.rows.split) store_rows<kD>(own + 16 * m * kD, x[m], tile.in(a.o), warp_row + 16 * m, tile.rows, 0, p.Dv);
  }
}

// Merges the parts of a row: a warp for each row and head.
constexpr int kMergeThreads = 128, kMergeWarps = kMergeThreads / kWarp;
template <class E>
__global__ void __launch_bounds__(kMergeThreads) merge_parts(ForwardArgs<E> a) {
  constexpr int kEach = 256 / kWarp;  // of the widest head
  const Problem<E>& p = a.problem;
  const int lane = thread_index() % kWarp;
  const i64 number = i64{block_index().x} * kMergeWarps + thread_index() / kWarp;
  if (number >= i64{p.B} * p.mask.T * p.H) return;
  const i64 b = number / p.H / p.mask.T, t = number / p.H % p.mask.T, h = number % p.H;
  const AttentionSequences& all = a.rows.sequences;
  const int S = all.count != 0 ? all.keys[all.of_row(t)] : p.mask.S;
  RowTotal total;
  float x[kEach] = {};
  for (int part = 0; part == 0 || part * kPartKeys < S; ++part) {
    const float* const sums = a.rows.sums_of(number, part, p.Dv);
    const float* const end = sums + RowPlan::row_floats(p.Dv) - 2;
    const RowTotal mine = {end[0], end[1]};
    if (mine.sum == 0) continue;
    const bool first = total.sum == 0;
    const PartWeights weights = add_part(total, mine);
    DS_UNROLL
    for (int i = 0; i < kEach; ++i) {
      const int d = lane + i * kWarp;
      if (d < p.Dv) x[i] = first ? sums[d] : merged(x[i], sums[d], weights);
    }
  }
  const float share = share_of<E>(p.dropout.on ? p.dropout.factor : 1.0f, total.sum);
  E* const o = a.o.data + b * a.o.batch + t * a.o.token + h * a.o.head;
  DS_UNROLL
  for (int i = 0; i < kEach; ++i) {
    const int d = lane + i * kWarp;
    if (d < p.Dv) store(o + d, total.sum == 0 ? 0.0f : x[i] * share);
  }
  if (lane == 0) a.lse(b, h)[t] = log_sum_exp(total);
}

template <class E>
void forward_16(ForwardArgs<E> a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 96, 128, 192, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    using Plan = ForwardPlan<kD>;
    a.rows.tiles = row_tiles(a, Plan::kOwn);
    launch(forward_by_row<E, kD>, {row_grid(a), Plan::kThreads, sizeof(ForwardShared<E, kD, true>)}, stream, a);
  });
}

}  // namespace

template <>
void forward_rows<float>(ForwardArgs<float> a, cudaStream_t stream) noexcept {
  forward_rows_fp32(a, stream);
}
template <>
void forward_rows<bf16>(ForwardArgs<bf16> a, cudaStream_t stream) noexcept {
  forward_16(a, stream);
}
template <>
void forward_rows<f16>(ForwardArgs<f16> a, cudaStream_t stream) noexcept {
  forward_16(a, stream);
}

template <class E>
void merge_rows(const ForwardArgs<E>& a, cudaStream_t stream) noexcept {
  const i64 rows = i64{a.problem.B} * a.problem.mask.T * a.problem.H;
  launch(merge_parts<E>, {grid_of(ceil_div(rows, kMergeWarps), 1), kMergeThreads, 0}, stream, a);
}
template void merge_rows(const ForwardArgs<float>&, cudaStream_t) noexcept;
template void merge_rows(const ForwardArgs<bf16>&, cudaStream_t) noexcept;
template void merge_rows(const ForwardArgs<f16>&, cudaStream_t) noexcept;

}  // namespace ds::cuda::attention
