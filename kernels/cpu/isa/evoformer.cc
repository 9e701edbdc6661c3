// SPDX-License-Identifier: Apache-2.0
// Evoformer attention by blocks of queries and keys in tiles of worker scratch, like flash attention
// (attention_fwd.cc): nothing of size N x T x T is stored. A row of bias2 is read in place for all n: neighbouring
// tiles are the sequences of one head and one range of queries, so it stays in the caches.
//
// Forward: a tile is (batch, head, range of queries, sequence). Keys are the outer loop, so a converted block serves
// all rows of the tile.
//
// Backward: a worker owns a chunk of keys of (batch, head) and processes the sequences in order. The sum over n for
// dbias2 therefore grows in place, dk and dv of a sequence are finished at once, and only dq is a sum over several
// workers. Its order is fixed by a Latin square: in phase f key chunk i meets chunk (f - i) mod C of the sequences,
// which have as many chunks. Sequences are processed in rounds, so that the unfinished sums of dq do not grow with N.

#include <cmath>
#include <limits>

#include "cpu/isa/kernels.h"
#include "cpu/isa/operands.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Enough tiles to feed and balance the threads of a rank; a constant, so that results depend on shapes only.
constexpr i64 kEvoformerTiles = 48;
constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Shape {
  i64 M, N, B, T, H, D;
  i64 width;   // D in whole vectors
  i64 ld;      // row stride of tiles: slightly more, so that rows do not map to the same cache sets
  i64 padded;  // T in whole vectors
  float scale;

  Shape(const TensorView& q, const EvoformerParams& p) noexcept
      : M(q.dim(0)),
        N(p.num_seq),
        B(M / N),
        T(q.dim(1)),
        H(q.dim(2)),
        D(q.dim(3)),
        width(round_up(D, Vec::kLanes)),
        ld(width + 16),
        padded(round_up(T, Vec::kLanes)),
        scale(p.scale) {}
  bool empty() const noexcept { return M * T * H * D == 0; }
};

// Offset of the vector of (sequence, token, head), or of the row of (batch, head, query) in bias2.
i64 offset(const TensorView& x, i64 m, i64 t, i64 h) noexcept {
  return m * x.stride[0] + t * x.stride[1] + h * x.stride[2];
}
i64 pair_offset(const TensorView& x, i64 b, i64 h, i64 i) noexcept {
  return b * x.stride[0] + h * x.stride[1] + i * x.stride[2];
}
i64 lse_offset(const TensorView& x, i64 m, i64 h, i64 t) noexcept { return m * x.stride[0] + h * x.stride[1] + t; }

// Scores are multiplied by log2(e), so that weights are powers of two. 2^x for x <= 0 within 2 ulp; results below
// 2^-126 are 0, so no subnormal arises. NaN passes.
Vec weight_of(Vec x) noexcept {
  const Vec least = broadcast(-126.0f), bounded = max(least, x), n = round(bounded), r = bounded - n;
  // Cephes' exp2f for |r| <= 1/2.
  Vec p = broadcast(1.535336188319500e-4f);
  p = fma(p, r, broadcast(1.339887440266574e-3f));
  p = fma(p, r, broadcast(9.618437357674640e-3f));
  p = fma(p, r, broadcast(5.550332471162809e-2f));
  p = fma(p, r, broadcast(2.402264791363012e-1f));
  p = fma(p, r, broadcast(6.931472028550421e-1f));
  p = fma(p, r, broadcast(1.0f));
  return select(less(x, least), zero(), scale_exp2(p, n));
}

// Calls f with the first element of a bias of fp32 or of dtype E, or with a null pointer.
template <class E, class F>
void with_bias(const TensorView& bias, F&& f) noexcept {
  if (!bias || bias.dtype == DType::F32) return f(static_cast<const float*>(bias.data));
  f(static_cast<const E*>(bias.data));
}

// The bias of each key of a sequence: bias1 minus its largest, times log2(e); -inf after the last key, up to whole
// vectors.
template <class E>
void load_mask(float* mask, const TensorView& bias1, const Shape& a, i64 m) noexcept {
  std::fill_n(mask, a.padded, kMasked);
  if (!bias1) return fill_zero(mask, a.T);
  with_bias<E>(bias1, [&](const auto* bias) {
    const auto* const row = bias + m * bias1.stride[0];
    Vec most = broadcast(kMasked);
    for_vectors(0, a.T, [&](i64 j, auto n) {
      store(mask + j, load(row + j, n), n);
      most = max(most, load(mask + j));
    });
    const float base = reduce_max(most);
    if (base == kMasked) return;
    for (i64 j = 0; j < a.padded; j += Vec::kLanes) {
      store(mask + j, (load(mask + j) - broadcast(base)) * broadcast(kLog2E));
    }
  });
}

// Tokens of (sequence, head).
template <class E>
void load_tokens(const RowForms& to, const TensorView& x, const Shape& a, const Operands<E>& op, i64 m, i64 h,
                 Range tokens, float scale) noexcept {
  constexpr i64 kAhead = 16;  // too far apart for the hardware to prefetch
  const auto token = [&](i64 t) { return x.as<E>() + offset(x, m, t, h); };
  load_tile(
      to, op, {0, tokens.size()}, scale, [&](i64 i) { return token(tokens.begin + i); },
      [&](i64 i) { return token(std::min(tokens.begin + i + kAhead, a.T - 1)); });
}
// Adds zero rows up to a multiple of the lanes.
template <class E>
void load_keys(const RowForms& to, const TensorView& x, const Shape& a, const Operands<E>& op, i64 m, i64 h,
               Range keys) noexcept {
  load_tokens(to, x, a, op, m, h, keys, 1.0f);
  zero_rows(to, op, {keys.size(), round_up(keys.size(), Vec::kLanes)});
}

template <class E>
struct Forward {
  static constexpr i64 kKeys = 256, kRows = 24;  // block of scores
  // Rows that share the converted keys, with their sums: at most half of an L2 cache.
  static constexpr i64 kTileBytes = 320 * 1024;

  using Op = Operands<E>;
  using Product = typename Op::Product;

  Shape a;
  TensorView o, lse, q, k, v, bias1, bias2;
  Op op{a.D, a.scale* kLog2E};

  struct Tiles {
    float *mask, *q, *k, *kt, *v, *score, *out, *top, *sum;
  };
  static Tiles carve(Arena& pieces, const Shape& a, i64 tile_rows) noexcept {
    const Op op(a.D, a.scale);
    return {.mask = pieces.take(a.padded),
            .q = pieces.take(tile_rows * op.inner_ld),
            .k = pieces.take(kKeys * op.inner_ld),
            .kt = pieces.take(kKeys * round_up(op.inner, 8)),
            .v = pieces.take(kKeys / Op::kDepth * a.ld),
            .score = pieces.take(kRows * kKeys),
            .out = pieces.take(tile_rows * a.ld),
            .top = pieces.take(tile_rows),
            .sum = pieces.take(tile_rows)};
  }

  // Turns a row of n products into weights 2^(score - top); returns the factor for the row's earlier sums, which are
  // empty for the first block of keys.
  template <class F>
  static float softmax_step(float* score, i64 n, Vec scale, const float* mask, const F* bias, bool first, float& top,
                            float& sum) noexcept {
    Vec high = broadcast(kMasked);
    for_vectors(0, n, [&](i64 j, auto lanes) {
      Vec s = fma(load(score + j), scale, load(mask + j));
      if (bias != nullptr) s = fma(load(bias + j, lanes), broadcast(kLog2E), s);
      store(score + j, s);
      high = max(high, s);
    });
    const float before = first ? kMasked : top;
    top = std::max(before, reduce_max(high));
    // While only -inf has been seen, all weights are 2^-inf = 0.
    const Vec base = broadcast(top == kMasked ? 0.0f : top);
    Vec total = zero();
    for (i64 j = 0; j < n; j += Vec::kLanes) {
      const Vec w = weight_of(load(score + j) - base);
      store(score + j, w);
      total = total + w;
    }
    if (first) {
      sum = reduce_add(total);
      return 1.0f;
    }
    float lanes[Vec::kLanes];
    store(lanes, weight_of(broadcast(before) - base));
    const float keep = before == top ? 1.0f : lanes[0];
    sum = sum * keep + reduce_add(total);
    return keep;
  }

  // Attention of a block of rows, which begins at row `at` of the tile, to a block of converted keys.
  void attend(const Tiles& tile, i64 b, i64 h, Range rows, Range keys, i64 at) const noexcept {
    const bool first = keys.begin == 0;
    const i64 lanes = round_up(keys.size(), Vec::kLanes);
    tile_product<Order::Rows, Product>(tile.score, kKeys, tile.q + at * op.inner_ld, op.inner_ld, tile.kt, kKeys,
                                       rows.size(), lanes, op.inner, false);
    with_bias<E>(bias2, [&](const auto* bias) {
      for (i64 r = 0; r < rows.size(); ++r) {
        const auto* const row =
            bias == nullptr ? nullptr : bias + pair_offset(bias2, b, h, rows.begin + r) + keys.begin;
        float* const score = tile.score + r * kKeys;
        const float kept = softmax_step(score, keys.size(), broadcast(op.score_scale), tile.mask + keys.begin, row,
                                        first, tile.top[at + r], tile.sum[at + r]);
        if constexpr (Op::kPairs) Product::round_to(score, score, lanes);
        float* const out = tile.out + (at + r) * a.ld;
        if (kept != 1.0f) load_row(out, out, a.width, broadcast(kept));
      }
    });
    tile_product<Order::Rows, Product>(tile.out + at * a.ld, a.ld, tile.score, kKeys, tile.v, a.ld, rows.size(),
                                       a.width, Op::words(keys.size()), !first);
  }

  void attend_tile(const Tiles& tile, i64 m, i64 h, Range rows) const noexcept {
    load_mask<E>(tile.mask, bias1, a, m);
    load_tokens<E>({tile.q, nullptr}, q, a, op, m, h, rows, op.query_scale);
    for (i64 j = 0; j < a.T; j += kKeys) {
      const Range keys = {j, std::min(a.T, j + kKeys)};
      load_keys<E>({tile.k, nullptr}, k, a, op, m, h, keys);
      load_keys<E>({nullptr, tile.v}, v, a, op, m, h, keys);
      transpose(tile.kt, kKeys, tile.k, op.inner_ld, round_up(keys.size(), Vec::kLanes), round_up(op.inner, 8));
      for (i64 r = rows.begin; r < rows.end; r += kRows) {
        attend(tile, m / a.N, h, {r, std::min(rows.end, r + kRows)}, keys, r - rows.begin);
      }
    }
    for (i64 r = 0; r < rows.size(); ++r) {
      const float sum = tile.sum[r];
      store_row(o.as<E>() + offset(o, m, rows.begin + r, h), tile.out + r * a.ld, a.D,
                broadcast(sum == 0 ? 0.0f : 1.0f / sum));
      lse.as<float>()[lse_offset(lse, m, h, rows.begin + r)] = sum == 0 ? -kMasked : tile.top[r] * kLn2 + std::log(sum);
    }
  }

  struct Cut {
    i64 tile_rows, row_tiles, bytes;
  };
  static Cut cut_of(const Shape& a) noexcept {
    if (a.empty()) return {};
    const i64 max_rows = std::max(kRows, kTileBytes / (2 * a.ld * i64{sizeof(float)}) / kRows * kRows);
    const i64 wanted = round_up(ceil_div(a.T * a.M * a.H, kEvoformerTiles), kRows);
    const i64 tile_rows = std::clamp(std::min(wanted, round_up(a.T, kRows)), kRows, max_rows);
    Arena pieces(nullptr);
    carve(pieces, a, tile_rows);
    return {tile_rows, ceil_div(a.T, tile_rows), pieces.bytes()};
  }

  void run(ThreadPool& pool) const noexcept {
    const Cut size = cut_of(a);
    if (size.row_tiles == 0) return;
    pool.reserve_scratch(static_cast<size_t>(size.bytes));
    pool.parallel_for(a.M * a.H * size.row_tiles, [&](i64 t, int worker) {
      Arena pieces(pool.scratch(worker));
      const Tiles tile = carve(pieces, a, size.tile_rows);
      const i64 n = t % a.N, part = t / a.N % size.row_tiles, h = t / (a.N * size.row_tiles) % a.H;
      const i64 b = t / (a.N * size.row_tiles * a.H);
      attend_tile(tile, b * a.N + n, h, part_of(a.T, kStrip, part, size.row_tiles));
    });
  }
};

template <class E>
struct Backward {
  static constexpr i64 kKeys = 64, kRows = 96;           // block of scores
  static constexpr i64 kKeysPacked = 256;                // keys that share the converted rows
  static constexpr i64 kMaxChunks = 8, kMinChunk = 128;  // every chunk reads the queries again
  // Maximum number of floats of sums that wait for the end of a round, unless those of C sequences are more.
  static constexpr i64 kSharedFloats = i64{1} << 18;

  using Op = Operands<E>;
  using Product = typename Op::Product;

  Shape a;
  TensorView dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, bias2;
  Op op{a.D, a.scale* kLog2E};

  struct Tiles {
    float* mask;
    RowForms k, q, dout;
    float *kt, *vt;  // [inner][keys], block by block
    ScoreGrads score;
    float *dk, *dv, *lse, *delta, *dq;
  };
  static Tiles carve(Arena& pieces, const Shape& a, bool with_dq) noexcept {
    const Op op(a.D, a.scale);
    return {.mask = pieces.take(a.padded),
            .k = RowForms::take(pieces, op, kKeysPacked),
            .q = RowForms::take(pieces, op, kRows),
            .dout = RowForms::take(pieces, op, kRows),
            .kt = pieces.take(kKeysPacked * round_up(op.inner, 8)),
            .vt = pieces.take(kKeysPacked * round_up(op.inner, 8)),
            .score = ScoreGrads::take(pieces, op, kRows, kKeys),
            .dk = pieces.take(kKeysPacked * a.ld),
            .dv = pieces.take(kKeysPacked * a.ld),
            .lse = pieces.take(kRows),
            .delta = pieces.take(kRows),
            .dq = with_dq ? pieces.take(a.T * a.width) : nullptr};
  }

  // Keys and values: transposed block by block, and keys as the right factor of dq.
  void load_packed(const Tiles& tile, i64 m, i64 h, Range keys) const noexcept {
    const i64 padded = round_up(keys.size(), Vec::kLanes);
    load_keys<E>({tile.k.along, nullptr}, v, a, op, m, h, keys);
    transpose_blocks(tile.vt, kKeys, tile.k.along, op, padded);
    load_keys<E>(tile.k, k, a, op, m, h, keys);
    transpose_blocks(tile.kt, kKeys, tile.k.along, op, padded);
  }

  // Queries (scaled for scores), output gradients, D = rowsum(dO * O) and the log-sum-exps of a block of rows.
  void load_block(const Tiles& tile, i64 m, i64 h, Range rows) const noexcept {
    load_tokens<E>(tile.q, q, a, op, m, h, rows, op.query_scale);
    load_tokens<E>(tile.dout, dout, a, op, m, h, rows, 1.0f);
    for (i64 r = 0; r < rows.size(); ++r) {
      const E* const out = o.as<E>() + offset(o, m, rows.begin + r, h);
      const E* const grad = dout.as<E>() + offset(dout, m, rows.begin + r, h);
      Vec sum = zero();
      for_vectors(0, a.D, [&](i64 d, auto n) { sum = fma(load(grad + d, n), load(out + d, n), sum); });
      tile.delta[r] = reduce_add(sum);
      tile.lse[r] = lse.as<float>()[lse_offset(lse, m, h, rows.begin + r)] * kLog2E;
    }
  }

  // The next block of rows; m < 0: none. Its data is prefetched during the work on this one.
  struct Next {
    i64 m;
    Range rows;
  };
  void fetch(const Next& next, i64 which, i64 h, i64 row) const noexcept {
    if (next.m < 0 || row >= next.rows.size() || which > 2) return;
    const TensorView& x = which == 0 ? q : which == 1 ? dout : o;
    const E* const from = x.as<E>() + offset(x, next.m, next.rows.begin + row, h);
    constexpr i64 kLine = 64 / sizeof(E);
    for (i64 d = 0; d < a.D; d += kLine) _mm_prefetch(reinterpret_cast<const char*>(from + d), _MM_HINT_T1);
  }

  // Turns products of rows and keys, and dL/d(probability), into probabilities and dL/d(score), which is added to the
  // sums of both biases. `columns`: [keys], for the sequence and head, or null.
  template <bool kBias, bool kSums, class F>
  void differentiate_scores(const Tiles& tile, const F* bias, i64 b, i64 h, Range rows, Range keys, float* columns,
                            const Next& next) const noexcept {
    float* const sums = kSums ? dbias2.as<float>() + pair_offset(dbias2, b, h, rows.begin) + keys.begin : nullptr;
    const i64 bias_row = kBias ? bias2.stride[2] : 0, sum_row = kSums ? dbias2.stride[2] : 0;
    if (kBias) bias += pair_offset(bias2, b, h, rows.begin) + keys.begin;
    const Vec scale = broadcast(op.score_scale);
    for_vectors(0, keys.size(), [&](i64 j, auto lanes) {
      const Vec mask = load(tile.mask + keys.begin + j);
      Vec total = zero();
      for (i64 r = 0; r < rows.size(); ++r) {
        float* const prob = tile.score.prob + r * kKeys + j;
        float* const dscore = tile.score.dscore + r * kKeys + j;
        Vec s = fma(load(prob), scale, mask);
        if constexpr (kBias) s = fma(load(bias + r * bias_row + j, lanes), broadcast(kLog2E), s);
        const Vec p = weight_of(s - broadcast(tile.lse[r]));
        const Vec ds = p * (load(dscore) - broadcast(tile.delta[r]));
        store(prob, p);
        store(dscore, ds);
        total = total + ds;
        if constexpr (kSums) {
          float* const sum = sums + r * sum_row + j;
          store(sum, load(sum, lanes) + ds, lanes);
        }
        fetch(next, j / Vec::kLanes, h, r);
      }
      if (columns != nullptr) store(columns + j, load(columns + j, lanes) + total, lanes);
    });
  }

  // A block of rows attends to at most kKeys of the packed keys, from `at` on.
  void differentiate(const Tiles& tile, float* dq_sum, float* columns, i64 b, i64 h, Range rows, Range keys, i64 at,
                     const Next& next) const noexcept {
    const i64 lanes = round_up(keys.size(), Vec::kLanes);
    const i64 column = at * round_up(op.inner, 8);
    tile_product<Order::Rows, Product>(tile.score.prob, kKeys, tile.q.along, op.inner_ld, tile.kt + column, kKeys,
                                       rows.size(), lanes, op.inner, false);
    tile_product<Order::Rows, Product>(tile.score.dscore, kKeys, tile.dout.along, op.inner_ld, tile.vt + column, kKeys,
                                       rows.size(), lanes, op.inner, false);
    with_bias<E>(bias2, [&](const auto* bias) {
      const auto run = [&]<bool kBias, bool kSums>() {
        differentiate_scores<kBias, kSums>(tile, bias, b, h, rows, keys, columns, next);
      };
      if (dbias2) {
        bias != nullptr ? run.template operator()<true, true>() : run.template operator()<false, true>();
      } else {
        bias != nullptr ? run.template operator()<true, false>() : run.template operator()<false, false>();
      }
    });
    const ScoreGrads& score = tile.score;
    if constexpr (Op::kPairs) {
      const Range all = {0, rows.size()};
      join_rows<Product>(score.prob_across, score.prob, kKeys, all, 0, keys.size());
      join_rows<Product>(score.dscore_across, score.dscore, kKeys, all, 0, keys.size());
      for (i64 r = 0; r < rows.size(); ++r) {
        Product::round_to(score.dscore_along + r * kKeys / 2, score.dscore + r * kKeys, lanes);
      }
    }
    tile_product<Order::Rows, Product>(dq_sum + rows.begin * a.width, a.width, score.dscore_along, kKeys / Op::kDepth,
                                       tile.k.across + at / Op::kDepth * a.ld, a.ld, rows.size(), a.width,
                                       Op::words(keys.size()), true);
    const bool add = rows.begin > 0;
    const i64 pairs = Op::words(rows.size());
    tile_product<Order::Columns, Product>(tile.dv + at * a.ld, a.ld, score.prob_across, kKeys, tile.dout.across, a.ld,
                                          keys.size(), a.width, pairs, add);
    tile_product<Order::Columns, Product>(tile.dk + at * a.ld, a.ld, score.dscore_across, kKeys, tile.q.across, a.ld,
                                          keys.size(), a.width, pairs, add);
  }

  // All rows of a sequence attend to a chunk of its keys. `columns`: [T], or null; next_m: the next sequence, or
  // negative.
  void accumulate(const Tiles& tile, float* dq_sum, float* columns, i64 m, i64 next_m, i64 h,
                  Range chunk) const noexcept {
    load_mask<E>(tile.mask, bias1, a, m);
    const float dk_scale = Op::kPairs ? a.scale : kLn2;  // queries have the rest
    for (i64 first = chunk.begin; first < chunk.end; first += kKeysPacked) {
      const Range packed = {first, std::min(chunk.end, first + kKeysPacked)};
      load_packed(tile, m, h, packed);
      for (i64 r = 0; r < a.T; r += kRows) {
        const Range rows = {r, std::min(a.T, r + kRows)};
        load_block(tile, m, h, rows);
        const bool last = rows.end == a.T;
        const Next next = {last && packed.end == chunk.end ? next_m : m,
                           last ? Range{0, std::min(a.T, kRows)} : Range{rows.end, std::min(a.T, rows.end + kRows)}};
        for (i64 j = packed.begin; j < packed.end; j += kKeys) {
          differentiate(tile, dq_sum, columns == nullptr ? nullptr : columns + j, m / a.N, h, rows,
                        {j, std::min(packed.end, j + kKeys)}, j - first, j == packed.begin ? next : Next{-1, {0, 0}});
        }
      }
      for (i64 j = packed.begin; j < packed.end; ++j) {
        store_row(dk.as<E>() + offset(dk, m, j, h), tile.dk + (j - first) * a.ld, a.D, broadcast(dk_scale));
        store_row(dv.as<E>() + offset(dv, m, j, h), tile.dv + (j - first) * a.ld, a.D, broadcast(1.0f));
      }
    }
  }

  // Memory shared by all workers for each sequence of a round: dq of each (b, h) if keys are in several chunks, and the
  // sums over queries that become dbias1.
  struct Cut {
    i64 chunks, round;      // C; sequences of a round
    i64 dq_floats, floats;  // of one (b, h) and sequence
    i64 shared_bytes, bytes;
  };
  static Cut cut_of(const Shape& a, bool with_dbias1) noexcept {
    if (a.empty()) return {};
    const i64 heads = a.B * a.H,
              wanted = ceil_div(kEvoformerTiles / 2, heads);  // half, since every chunk costs a phase
    const i64 chunks = std::max<i64>(1, std::min({wanted, ceil_div(a.T, kMinChunk), a.N, kMaxChunks}));
    const i64 dq_floats = chunks > 1 ? a.T * a.width : 0;
    const i64 floats = dq_floats + (with_dbias1 ? a.padded : 0);
    const i64 fit = floats == 0 ? a.N : kSharedFloats / (chunks * heads * floats);
    const i64 round = chunks * std::clamp(fit, i64{1}, ceil_div(a.N, chunks));
    Arena own(nullptr), shared(nullptr);
    carve(own, a, chunks == 1);
    shared.take(round * heads * floats);
    return {chunks, round, dq_floats, floats, shared.bytes(), shared.bytes() + own.bytes()};
  }

  void run(ThreadPool& pool) const noexcept {
    if (a.empty()) return;
    const Cut size = cut_of(a, static_cast<bool>(dbias1));
    const i64 C = size.chunks, heads = a.B * a.H;
    auto* const shared = static_cast<float*>(pool.reserve_scratch(static_cast<size_t>(size.bytes)));
    for (i64 first = 0; first < a.N; first += size.round) {
      const i64 round = std::min(size.round, a.N - first);
      for (i64 phase = 0; phase < C; ++phase) {
        pool.parallel_for(heads * C, [&](i64 t, int worker) {
          const i64 head = t / C, b = head / a.H, h = head % a.H;
          const Range keys = part_of(a.T, kKeys, t % C, C), part = part_of(round, 1, (phase + C - t % C) % C, C);
          void* const mine = pool.scratch(worker);
          Arena pieces(mine == shared ? shared + size.shared_bytes / i64{sizeof(float)} : mine);
          const Tiles tile = carve(pieces, a, C == 1);
          if (first == 0 && phase == 0) clear_pairs(b, h, keys);
          for (i64 n = part.begin; n < part.end; ++n) {
            const i64 m = b * a.N + first + n;
            float* const sums = shared + (n * heads + head) * size.floats;
            float* const dq_sum = C == 1 ? tile.dq : sums;
            float* const columns = dbias1 ? sums + size.dq_floats : nullptr;
            // In every phase each part of the sequences has one tile of a head: the first clears, the last stores.
            if (phase == 0) fill_zero(dq_sum, a.T * a.width);
            if (columns != nullptr) fill_zero(columns + keys.begin, keys.size());
            accumulate(tile, dq_sum, columns, m, n + 1 < part.end ? m + 1 : -1, h, keys);
            if (phase < C - 1) continue;
            for (i64 i = 0; i < a.T; ++i) {
              store_row(dq.as<E>() + offset(dq, m, i, h), dq_sum + i * a.width, a.D, broadcast(a.scale));
            }
          }
        });
      }
      if (!dbias1) continue;
      pool.parallel_for(a.B * round, [&](i64 t, int) {
        const i64 b = t / round, n = t % round;
        const float* const sums = shared + (n * heads + b * a.H) * size.floats + size.dq_floats;
        float* const to = dbias1.as<float>() + (b * a.N + first + n) * dbias1.stride[0];
        for_vectors(0, a.T, [&](i64 j, auto lanes) {
          Vec sum = load(sums + j, lanes);
          for (i64 h = 1; h < a.H; ++h) sum = sum + load(sums + h * size.floats + j, lanes);
          store(to + j, sum, lanes);
        });
      });
    }
  }

  void clear_pairs(i64 b, i64 h, Range keys) const noexcept {
    for (i64 i = 0; dbias2 && i < a.T; ++i) {
      fill_zero(dbias2.as<float>() + pair_offset(dbias2, b, h, i) + keys.begin, keys.size());
    }
  }
};

}  // namespace

void evoformer_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
                             TensorView bias2, const EvoformerParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype,
                 [&]<class E>(E) { Forward<E>{Shape(q, p), o, lse, q, k, v, bias1, bias2}.run(*stream.pool); });
}

void evoformer_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2,
                             TensorView dout, TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse,
                             TensorView bias1, TensorView bias2, const EvoformerParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) {
    Backward<E>{Shape(q, p), dq, dk, dv, dbias1, dbias2, dout, q, k, v, o, lse, bias1, bias2}.run(*stream.pool);
  });
}

void evoformer_attention_fwd_scratch(TensorView, TensorView, TensorView q, TensorView, TensorView, TensorView,
                                     TensorView, const EvoformerParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype,
                 [&]<class E>(E) { note_scratch(stream, static_cast<size_t>(Forward<E>::cut_of(Shape(q, p)).bytes)); });
}

void evoformer_attention_bwd_scratch(TensorView, TensorView, TensorView, TensorView dbias1, TensorView, TensorView,
                                     TensorView q, TensorView, TensorView, TensorView, TensorView, TensorView,
                                     TensorView, const EvoformerParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) {
    note_scratch(stream, static_cast<size_t>(Backward<E>::cut_of(Shape(q, p), static_cast<bool>(dbias1)).bytes));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
