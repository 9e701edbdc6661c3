// SPDX-License-Identifier: Apache-2.0
// Attention in fp32, for runs and tests that need full precision: the algorithms of attention_fwd.cu and
// attention_bwd.cu on plain multiply-adds, in squares of threads (square_tile.h). Weights reach the threads of other
// columns through shared memory; those of a row are lanes of one warp.

#include "cuda/attention_rows.h"
#include "cuda/square_tile.h"

namespace ds::cuda::attention {
namespace {

using square::add_products;
using square::clear;
using square::kSide;
using square::kThreads;
using square::Plan;
using square::products;
using square::thread_x;
using square::thread_y;
using square::Tile;

template <bool kGeneral, int kD, bool kGroup>
using StepsOf = Steps<kGeneral, Plan<kD>::kRows, kGroup>;

template <int kD, bool kGeneral>
struct ForwardShared : StepsOf<kGeneral, kD, false>::Shared {
  alignas(128) Tile<Plan<kD>::kRows, kD> q, k, v;
  Tile<Plan<kD>::kRows, Plan<kD>::kRows> weight;
};
template <int kD, bool kGeneral>
struct BackwardShared : StepsOf<kGeneral, kD, true>::Shared {
  alignas(128) Tile<Plan<kD>::kRows, kD> own[2], met[2];
  Tile<Plan<kD>::kRows, Plan<kD>::kRows> weight, ds;
};

// Loads a tile four elements at a time: read(part, row, column) fills some that are zeros before.
template <int kRows, int kColumns, class Read>
DS_DEVICE void load_by(Tile<kRows, kColumns>& tile, Read&& read) {
  DS_NO_UNROLL
  for (int i = thread_index(); i < kRows * kColumns / 4; i += kThreads) {
    const int row = i / (kColumns / 4), d = i % (kColumns / 4) * 4;
    float part[4] = {0, 0, 0, 0};
    read(part, row, d);
    store16(&tile[row][d], part);
  }
}
// The elements from column d on, of D, at `from`.
DS_DEVICE void read4(float (&part)[4], const float* from, int d, int D, bool whole_chunks) {
  if (whole_chunks) {
    if (d < D) load16(part, from);
  } else {
    DS_UNROLL
    for (int e = 0; e < 4; ++e) part[e] = d + e < D ? from[e] : 0.0f;
  }
}
// Loads tokens [first(i), first(i) + 16), which are adjacent from row row_of(first(i)) of a head on, to rows 16*i, ...
// of the tile.
template <int kRows, int kColumns, class First, class RowOf>
DS_DEVICE void load_rows(Tile<kRows, kColumns>& tile, const Head<const float>& x, First&& first, RowOf&& row_of,
                         int limit, int D) {
  load_by<kRows, kColumns>(tile, [&](float(&part)[4], int row, int d) {
    if (const int token = first(row / kSide), down = row % kSide; token + down < limit)
      read4(part, x.at(row_of(token) + down) + d, d, D, x.whole_chunks);
  });
}

template <int kRows, int kColumns, class First>
DS_DEVICE void load_rows(Tile<kRows, kColumns>& tile, const Head<const float>& x, First&& first, int limit, int D) {
  load_rows<kRows, kColumns>(
      tile, x, first, [](int token) { return token; }, limit, D);
}

template <int kRows, int kColumns>
DS_DEVICE void load_own(Tile<kRows, kColumns>& tile, const Head<const float>& x, int first, int limit, int D) {
  load_rows<kRows, kColumns>(
      tile, x, [&](int i) { return first + kSide * i; }, limit, D);
}

// The factors of dropout for s[r][c], as bits kR*r + c; element(r, c) is the number of the element.
template <int kR, class Element>
DS_DEVICE u32 kept_bits(const Dropout& d, Element&& element) {
  u32 bits = d.on ? 0 : ~0u;
  DS_NO_UNROLL
  for (int i = 0; d.on && i < kR * kR; ++i) bits |= kept(d, element(i / kR, i % kR)) << i;
  return bits;
}

// The score of a product, times log2(e), and its slope; `distance` is that from the query's token to the key's in the
// call.
template <bool kGeneral>
DS_DEVICE Capped score_of(const Problem<float>& p, int h, float product, int distance) {
  if (!kGeneral || !p.terms.any()) return {product * p.scale2, 1.0f};
  Capped score = {product * p.scale2, 1.0f};
  if (p.terms.capped()) score = capped(p.terms, product);
  if (const float* const bias = p.terms.bias_of(h); bias != nullptr) {
    score.value += kLog2E * bias[p.terms.within_reach(p.terms.distance0 + distance)];
  }
  return score;
}

template <int kR, int kC>
DS_DEVICE void store_results(const float (&x)[kR][kC], const Head<float>& to, int first, int limit, int D,
                             float scale) {
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const int row = first + thread_y() + kSide * r;
    DS_UNROLL
    for (int c = 0; c < kC; ++c) {
      const int d = thread_x() + kSide * c;
      if (row < limit && d < D) to.data[row * to.token + d] = x[r][c] * scale;
    }
  }
}

// Adds step n, whose keys and values are in shared memory, to the statistics and results of a tile of rows. `shift` is
// added to distances; token_of(row) is the query of a row.
template <int kD, bool kGeneral, class SomeMask, class TokenOf>
DS_DEVICE void attend_step(float (&x)[Plan<kD>::kR][Plan<kD>::kC], float (&top)[Plan<kD>::kR],
                           float (&sum)[Plan<kD>::kR], ForwardShared<kD, kGeneral>& shared, const Problem<float>& p,
                           const StepsOf<kGeneral, kD, false>& steps, int n, const SomeMask& mask, int b, int h,
                           int first, int shift, const TokenOf& token_of) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR;
  float s[kR][kR];
  products<kR, kRows, kD>(s, shared.q, shared.k);
  const u32 bits = kept_bits<kR>(p.dropout, [&](int r, int c) {
    return p.dropout.element(b, h, first + thread_y() + kSide * r, steps.first(n, c) + thread_x());
  });
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    const int row = token_of(first + thread_y() + kSide * r), block = steps.own_block(row);
    const auto seen = mask.keys_of_row(row);
    float high = top[r];
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      const int key = steps.first(n, c) + thread_x();
      const bool visible = steps.met_by(n, c, block) && seen.has(key);
      s[r][c] = visible ? score_of<kGeneral>(p, h, s[r][c], key - row + shift).value : -kInfinity;
      high = fmaxf(high, s[r][c]);
    }
    DS_UNROLL
    for (int lanes = kSide / 2; lanes > 0; lanes /= 2) high = fmaxf(high, warp_shuffle_xor(high, lanes));
    const float base = high == -kInfinity ? 0.0f : high, keep = fast_exp2(top[r] - base);
    top[r] = high;
    sum[r] *= keep;
    DS_UNROLL
    for (int c = 0; c < Plan<kD>::kC; ++c) x[r][c] *= keep;
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      const float w = fast_exp2(s[r][c] - base);
      sum[r] += w;
      shared.weight[thread_y() + kSide * r][thread_x() + kSide * c] = (bits >> (kR * r + c) & 1u) != 0 ? w : 0.0f;
    }
  }
  sync_warp();
  add_products<kR, Plan<kD>::kC, kRows, kD>(x, shared.weight, shared.v);
}

template <int kD, bool kGeneral>
__global__ void __launch_bounds__(kThreads) forward(ForwardArgs<float> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR;
  auto& shared = block_shared<ForwardShared<kD, kGeneral>>();
  const Problem<float>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.T + kRows - 1) / kRows, p.B * p.H, p.mask.causal);
  const int b = work.head / p.H, h = work.head % p.H, g = h / p.R, first = work.tile * kRows;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  float* const lse = a.lse(b, h);
  const Range rows = intersect({first, first + kRows}, {0, mask.T});
  StepsOf<kGeneral, kD, false> steps(shared, a.layout, {.own = rows, .seen = mask.keys_of_rows(rows), .head = h});
  steps.start();
  load_own<kRows, kD>(shared.q, p.q(b, h), first, mask.T, p.D);

  float x[kR][Plan<kD>::kC], top[kR], sum[kR];
  clear(x);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) top[r] = -kInfinity, sum[r] = 0;
  for (int n = 0; steps.has(n); ++n) {
    const auto from = [&](int slot) { return steps.first(n, slot); };
    sync_block();
    const auto row_of = [&](int token) { return steps.row_of(token); };
    load_rows<kRows, kD>(shared.k, p.k(b, g), from, row_of, mask.S, p.D);
    load_rows<kRows, kD>(shared.v, p.v(b, g), from, row_of, mask.S, p.Dv);
    steps.make(n + 2);
    sync_block();
    attend_step<kD>(x, top, sum, shared, p, steps, n, mask, b, h, first, 0, SameToken{});
  }
  const float factor = p.dropout.on ? p.dropout.factor : 1.0f;
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    DS_UNROLL
    for (int lanes = kSide / 2; lanes > 0; lanes /= 2) sum[r] += warp_shuffle_xor(sum[r], lanes);
    const float share = factor / sum[r];
    DS_UNROLL
    for (int c = 0; c < Plan<kD>::kC; ++c) x[r][c] = sum[r] == 0 ? 0.0f : x[r][c] * share;
    const int row = first + thread_y() + kSide * r;
    if (thread_x() == 0 && row < mask.T) {
      lse[row] = sum[r] == 0 ? kInfinity : (top[r] + fast_log2(sum[r])) * kLn2;
    }
  }
  store_results(x, a.o(b, h), first, mask.T, p.Dv, 1.0f);
}

// The same by row (attention_rows.h).
template <int kD>
__global__ void __launch_bounds__(kThreads) forward_by_row(ForwardArgs<float> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR, kC = Plan<kD>::kC;
  auto& shared = block_shared<ForwardShared<kD, true>>();
  const Problem<float>& p = a.problem;
  const RowTile<float, kRows> tile(a);
  if (tile.empty()) return;
  const SampleMask mask(tile.mask, tile.places, tile.b);
  const Range own = tile.queries({tile.first, tile.first + kRows});
  StepsOf<true, kD, false> steps(shared, tile.layout,
                                 {.own = own, .seen = tile.keys(mask.keys_of_rows(own)), .head = tile.head});
  steps.start();
  const int group = tile.head / p.R;
  load_by<kRows, kD>(shared.q, [&](float(&part)[4], int row, int d) {
    if (tile.first + row < tile.rows) read4(part, tile.in(p.q).at(tile.first + row) + d, d, p.D, p.q.whole_chunks);
  });
  const auto load_step = [&](auto& to, const Heads<const float>& from, const float* scales, int n, int D) {
    const Head<const float> head = from(tile.b, group);
    load_by<kRows, kD>(to, [&](float(&part)[4], int row, int d) {
      const int token = steps.first(n, row / kSide), down = row % kSide;
      if (token + down >= mask.S) return;
      const int at = steps.row_of(token) + down;
      if (scales == nullptr) return read4(part, head.at(at) + d, d, D, head.whole_chunks);
      float eight[8];
      tile.coded(from, scales, D).read(eight, at, d / 8 * 8, D);
      DS_UNROLL
      for (int e = 0; e < 4; ++e) part[e] = d % 8 == 0 ? eight[e] : eight[4 + e];
    });
  };

  float x[kR][kC], top[kR], sum[kR];
  RowTotal total[kR];
  clear(x);
  DS_UNROLL
  for (int r = 0; r < kR; ++r) top[r] = -kInfinity, sum[r] = 0;
  const auto row_sum = [&](int r) {
    float all = sum[r];
    DS_UNROLL
    for (int lanes = kSide / 2; lanes > 0; lanes /= 2) all += warp_shuffle_xor(all, lanes);
    return all;
  };
  // Adds the part to the totals; results so far are in memory, or after the last part in x.
  const auto end_part = [&](bool last) {
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      const RowTotal part = {top[r], row_sum(r)};
      const bool start = total[r].sum == 0, none = part.sum == 0;
      const PartWeights weights = none ? PartWeights{1, 0} : add_part(total[r], part);
      const int row = tile.first + thread_y() + kSide * r;
      float* const sums = tile.sums(row, 0);
      DS_UNROLL
      for (int c = 0; c < kC; ++c) {
        const int d = thread_x() + kSide * c;
        const bool exists = row < tile.rows && d < p.Dv;
        float y = x[r][c];
        if (exists && !start) y = none ? sums[d] : merged(sums[d], y, weights);
        if (exists && !last) sums[d] = y;
        x[r][c] = last ? y : 0.0f;
      }
      top[r] = -kInfinity, sum[r] = 0;
    }
  };
  const bool in_parts = a.rows.parts > 1 && !a.rows.split;
  int part = 0;
  for (int n = 0; steps.has(n); ++n) {
    if (in_parts) {
      const int next = steps.first(n, 0) / kPartKeys;
      if (n > 0 && next != part) end_part(false);
      part = next;
    }
    sync_block();
    load_step(shared.k, p.k, a.rows.k_scale, n, p.D);
    load_step(shared.v, p.v, a.rows.v_scale, n, p.Dv);
    steps.make(n + 2);
    sync_block();
    attend_step<kD>(x, top, sum, shared, p, steps, n, mask, tile.b, tile.head, tile.first, tile.shift,
                    [&](int row) { return tile.query(row); });
  }
  if (in_parts) end_part(true);

  const float factor = p.dropout.on ? p.dropout.factor : 1.0f;
  DS_UNROLL
  for (int r = 0; r < kR; ++r) {
    if (!in_parts) total[r] = {top[r], row_sum(r)};
    const RowTotal& t = total[r];
    const int row = tile.first + thread_y() + kSide * r;
    if (row >= tile.rows) continue;
    float* const to = a.rows.split ? tile.sums(row, tile.part) : tile.in(a.o).at(row);
    const float share = a.rows.split ? 1.0f : share_of<float>(factor, t.sum);
    DS_UNROLL
    for (int c = 0; c < kC; ++c) {
      const int d = thread_x() + kSide * c;
      if (d < p.Dv) to[d] = t.sum == 0 ? 0.0f : x[r][c] * share;
    }
    if (thread_x() != 0) continue;
    if (!a.rows.split) *tile.lse(row) = log_sum_exp(t);
    float* const end = to + RowPlan::row_floats(p.Dv) - 2;
    if (a.rows.split) end[0] = t.top, end[1] = t.sum;
  }
}

template <int kD, bool kGeneral>
__global__ void __launch_bounds__(kThreads) backward_keys(BackwardArgs<float> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR, kC = Plan<kD>::kC;
  auto& shared = block_shared<BackwardShared<kD, kGeneral>>();
  const Problem<float>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.S + kRows - 1) / kRows, p.B * p.G, false);
  const int b = work.head / p.G, g = work.head % p.G, first = work.tile * kRows;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  const Range keys = intersect({first, first + kRows}, {0, mask.S});
  StepsOf<kGeneral, kD, true> steps(shared, a.keys,
                                    {.own = keys, .seen = mask.rows_of_keys(keys), .head = g * p.R, .heads = p.R});
  steps.start();
  load_own<kRows, kD>(shared.own[0], p.k(b, g), first, mask.S, p.D);
  load_own<kRows, kD>(shared.own[1], p.v(b, g), first, mask.S, p.Dv);

  float dk[kR][kC], dv[kR][kC];
  clear(dk);
  clear(dv);
  for (int n = 0; steps.has(n); ++n) {
    const int h = g * p.R + steps.head(n);
    const i64 head = static_cast<i64>(b) * p.H + h;
    const auto from = [&](int slot) { return steps.first(n, slot); };
    sync_block();
    load_rows<kRows, kD>(shared.met[0], p.q(b, h), from, mask.T, p.D);
    load_rows<kRows, kD>(shared.met[1], a.dout(b, h), from, mask.T, p.Dv);
    steps.make(n + 2);
    sync_block();
    float s[kR][kR], grad[kR][kR];
    products<kR, kRows, kD>(s, shared.own[0], shared.met[0]);
    products<kR, kRows, kD>(grad, shared.own[1], shared.met[1]);
    const u32 bits = kept_bits<kR>(p.dropout, [&](int r, int c) {
      return p.dropout.element(b, h, steps.first(n, c) + thread_x(), first + thread_y() + kSide * r);
    });
    DS_UNROLL
    for (int c = 0; c < kR; ++c) {
      const int i = steps.first(n, c) + thread_x();
      float2 stats = make_float2(0.0f, 0.0f);
      if (!kGeneral || i < a.stats_rows) stats = a.stats[head * a.stats_rows + i];
      DS_UNROLL
      for (int r = 0; r < kR; ++r) {
        const int key = first + thread_y() + kSide * r;
        const bool seen = steps.met_by(n, c, steps.own_block(key)) && mask.rows_of_key(key).has(i);
        const Capped score = score_of<kGeneral>(p, h, s[r][c], key - i);
        const float w = fast_exp2(score.value - stats.x);
        const float z = !p.dropout.on ? 1.0f : (bits >> (kR * r + c) & 1u) != 0 ? p.dropout.factor : 0.0f;
        const int y = thread_y() + kSide * r, x = thread_x() + kSide * c;
        shared.weight[y][x] = seen ? w * z : 0.0f;
        shared.ds[y][x] = seen ? w * (grad[r][c] * z - stats.y) * score.slope : 0.0f;
      }
    }
    sync_warp();
    add_products<kR, kC, kRows, kD>(dv, shared.weight, shared.met[1]);
    add_products<kR, kC, kRows, kD>(dk, shared.ds, shared.met[0]);
  }
  store_results(dk, a.dk(b, g), first, mask.S, p.D, p.scale);
  store_results(dv, a.dv(b, g), first, mask.S, p.Dv, 1.0f);
}

template <int kD, bool kGeneral>
__global__ void __launch_bounds__(kThreads) backward_queries(BackwardArgs<float> a) {
  constexpr int kRows = Plan<kD>::kRows, kR = Plan<kD>::kR, kC = Plan<kD>::kC;
  auto& shared = block_shared<BackwardShared<kD, kGeneral>>();
  const Problem<float>& p = a.problem;
  const Work work = work_of(block_index().x, (p.mask.T + kRows - 1) / kRows, p.B * p.H, p.mask.causal);
  const int b = work.head / p.H, h = work.head % p.H, g = h / p.R, first = work.tile * kRows;
  decltype(auto) mask = mask_of<kGeneral>(p, b);
  const Range rows = intersect({first, first + kRows}, {0, mask.T});
  StepsOf<kGeneral, kD, false> steps(shared, a.queries, {.own = rows, .seen = mask.keys_of_rows(rows), .head = h});
  steps.start();
  load_own<kRows, kD>(shared.own[0], p.q(b, h), first, mask.T, p.D);
  load_own<kRows, kD>(shared.own[1], a.dout(b, h), first, mask.T, p.Dv);

  float dq[kR][kC];
  clear(dq);
  for (int n = 0; steps.has(n); ++n) {
    const auto from = [&](int slot) { return steps.first(n, slot); };
    sync_block();
    load_rows<kRows, kD>(shared.met[0], p.k(b, g), from, mask.S, p.D);
    load_rows<kRows, kD>(shared.met[1], p.v(b, g), from, mask.S, p.Dv);
    steps.make(n + 2);
    sync_block();
    float s[kR][kR], grad[kR][kR];
    products<kR, kRows, kD>(s, shared.own[0], shared.met[0]);
    products<kR, kRows, kD>(grad, shared.own[1], shared.met[1]);
    const u32 bits = kept_bits<kR>(p.dropout, [&](int r, int c) {
      return p.dropout.element(b, h, first + thread_y() + kSide * r, steps.first(n, c) + thread_x());
    });
    DS_UNROLL
    for (int r = 0; r < kR; ++r) {
      const int y = thread_y() + kSide * r, block = steps.own_block(first + y);
      const auto seen = mask.keys_of_row(first + y);
      const float2 stats = a.stats[work.head * a.stats_rows + first + y];
      DS_UNROLL
      for (int c = 0; c < kR; ++c) {
        const int x = thread_x() + kSide * c, key = steps.first(n, c) + thread_x();
        const Capped score = score_of<kGeneral>(p, h, s[r][c], key - (first + y));
        const float w = fast_exp2(score.value - stats.x);
        const float z = !p.dropout.on ? 1.0f : (bits >> (kR * r + c) & 1u) != 0 ? p.dropout.factor : 0.0f;
        const bool visible = steps.met_by(n, c, block) && seen.has(key);
        shared.ds[y][x] = visible ? w * (grad[r][c] * z - stats.y) * score.slope : 0.0f;
      }
    }
    sync_warp();
    add_products<kR, kC, kRows, kD>(dq, shared.ds, shared.met[0]);
  }
  store_results(dq, a.dq(b, h), first, mask.T, p.D, p.scale);
}

}  // namespace

void forward_fp32(const ForwardArgs<float>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 128, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value, kRows = Plan<kD>::kRows;
    const Problem<float>& p = a.problem;
    const dim3 grid = grid_of(num_tiles(p.mask.T, kRows), i64{p.B} * p.H);
    with_general(a.general, [&](auto general) {
      constexpr bool kGeneral = decltype(general)::value;
      launch(forward<kD, kGeneral>, {grid, kThreads, sizeof(ForwardShared<kD, kGeneral>)}, stream, a);
    });
  });
}

void forward_rows_fp32(ForwardArgs<float> a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 128, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value;
    a.rows.tiles = row_tiles(a, Plan<kD>::kRows);
    launch(forward_by_row<kD>, {row_grid(a), kThreads, sizeof(ForwardShared<kD, true>)}, stream, a);
  });
}

void backward_fp32(const BackwardArgs<float>& a, cudaStream_t stream) noexcept {
  with_head_dim<32, 64, 128, 256>(widest_head(a.problem), [&](auto dim) {
    constexpr int kD = decltype(dim)::value, kRows = Plan<kD>::kRows;
    const Problem<float>& p = a.problem;
    const dim3 keys = grid_of(num_tiles(p.mask.S, kRows), i64{p.B} * p.G);
    const dim3 queries = grid_of(num_tiles(p.mask.T, kRows), i64{p.B} * p.H);
    with_general(a.general, [&](auto general) {
      constexpr bool kGeneral = decltype(general)::value;
      constexpr size_t kBytes = sizeof(BackwardShared<kD, kGeneral>);
      launch(backward_keys<kD, kGeneral>, {keys, kThreads, kBytes}, stream, a);
      launch(backward_queries<kD, kGeneral>, {queries, kThreads, kBytes}, stream, a);
    });
  });
}

}  // namespace ds::cuda::attention
