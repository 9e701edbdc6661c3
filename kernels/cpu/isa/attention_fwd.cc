// SPDX-License-Identifier: Apache-2.0
// Flash attention (Dao et al.): blocks of queries attend to blocks of keys in tiles of worker scratch; no T x S matrix
// is stored. attention_blocks.h defines which rows attend to which keys. Sums, scores and the softmax are fp32. The
// factors of products are bf16 if the tensors are and the CPU multiplies pairs of such numbers: weights are then
// rounded to bf16, as in other flash attention kernels.
//
// A tile is (batch, group, range of rows). Keys are the outer loop, so a converted block serves all rows of the tile.
// Parts of kPart keys, counted from the first key, have a softmax of their own, and are merged in order: a row's bits
// depend only on its keys. With few rows (decoding) several workers share the parts of a tile.

#include <cmath>

#include "cpu/isa/attention_tiles.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Accumulators of the forward pass for a range of rows, with `ld` floats for each row of outputs.
struct Partial {
  float* out;  // [rows, ld], not yet divided by sum
  float* top;  // [rows] the largest score so far
  float* sum;  // [rows] of e^(score - top)

  static i64 floats(i64 ld, i64 rows) noexcept { return rows * ld + 2 * round_up(rows, 16); }
  Partial(float* memory, i64 ld, i64 rows) noexcept
      : out(memory), top(out + rows * ld), sum(top + round_up(rows, 16)) {}
};

// Turns one row of products into weights e^(score - top); returns the factor for the row's earlier sums. A score is
// `scale` times the product. `seen`: the visible part of the n columns, unless the row is `whole`.
float softmax_step(float* score, i64 n, Vec scale, bool whole, const Seen& seen, float& top, float& sum) noexcept {
  Vec high = broadcast(-kInfinity);
  for (i64 j = 0; j < n; j += Vec::kLanes) {
    Vec s = scale * load(score + j);
    if (!whole) s = outside(s, j, seen, broadcast(-kInfinity));
    store(score + j, s);
    high = max(high, s);
  }
  const float new_top = std::max(top, reduce_max(high));
  // While only -inf has been seen, all weights are e^-inf = 0.
  const Vec base = broadcast(new_top == -kInfinity ? 0.0f : new_top);
  Vec total = zero();
  for (i64 j = 0; j < n; j += Vec::kLanes) {
    const Vec w = exp_weight(load(score + j) - base);
    store(score + j, w);
    total = total + w;
  }
  float keep = 1.0f;
  if (new_top != top) {
    float lanes[Vec::kLanes];
    store(lanes, exp_weight(broadcast(top) - base));
    keep = lanes[0];
  }
  sum = sum * keep + reduce_add(total);
  top = new_top;
  return keep;
}

template <class E>
struct Forward {
  static constexpr i64 kKeys = 128, kRows = 48;  // block of scores
  static constexpr i64 kPart = 512;
  // Rows that share the converted keys, with their sums: at most half of an L2 cache.
  static constexpr i64 kTileBytes = 320 * 1024;

  using Op = Operands<E>;
  using Product = typename Op::Product;

  Problem a;
  TensorView o, lse, q, k, v;
  Op op{a.D, a.p.scale}, value{a.Dv, a.p.scale};  // of queries and keys; of values and outputs

  struct Tiles {
    float *q, *k, *kt, *v, *score, *keep;
    E* decoded;  // keys or values of a block
  };
  static Tiles carve(Arena& arena, const Problem& a, i64 tile_rows) noexcept {
    const Op op(a.D, a.p.scale), value(a.Dv, a.p.scale);
    return {.q = arena.take(tile_rows * op.inner_ld),
            .k = arena.take(kKeys * op.inner_ld),
            .kt = arena.take(kKeys * round_up(op.inner, 8)),
            .v = arena.take(kKeys / Op::kDepth * value.ld),
            .score = arena.take(kRows * kKeys),
            .keep = arena.take(keep_room(kKeys)),
            .decoded = reinterpret_cast<E*>(arena.take(a.coded ? kKeys * std::max(a.D, a.Dv) : 0))};
  }

  // Attention of `rows` of (b, g) to `keys`.
  void accumulate(const Partial& part, const Tiles& tile, i64 b, i64 g, Range rows, Range keys) const noexcept {
    for (i64 r = 0; r < rows.size(); ++r) fill_zero(part.out + r * value.ld, value.width);
    std::fill_n(part.top, rows.size(), -kInfinity);
    fill_zero(part.sum, rows.size());
    load_rows<E>({tile.q, nullptr}, q, a, op, b, g, rows, op.query_scale);
    Pack pack;
    for (Met met(a, b, g, rows, keys, kKeys); met.next(pack);) {
      load_keys<E>({tile.k, nullptr}, k, a, op, b, g, pack, tile.decoded);
      load_keys<E>({nullptr, tile.v}, v, a, value, b, g, pack, tile.decoded);
      transpose(tile.kt, kKeys, tile.k, op.inner_ld, round_up(pack.size(), Vec::kLanes), round_up(op.inner, 8));
      for (i64 r = rows.begin; r < rows.end; r += kRows) {
        attend(part, tile, b, g, {r, std::min(rows.end, r + kRows)}, pack, rows.begin);
      }
    }
  }

  // Attention of a block of rows to a converted block of keys; the tile begins at row `origin`.
  void attend(const Partial& part, const Tiles& tile, i64 b, i64 g, Range rows, const Pack& pack,
              i64 origin) const noexcept {
    const auto score = [&](Range r, Range c) { return tile.score + (r.begin - rows.begin) * kKeys + c.begin; };
    for_visible(a, b, g, rows, pack, [&](Range r, Range c, bool dense) {
      const i64 lanes = round_up(c.size(), Vec::kLanes);
      tile_product<Order::Rows, Product>(score(r, c), kKeys, tile.q + (r.begin - origin) * op.inner_ld, op.inner_ld,
                                         tile.kt + c.begin, kKeys, r.size(), lanes, op.inner, false);
      for (i64 row = r.begin; row < r.end; ++row) {
        const Seen seen = dense ? Seen{c, {0, 0}} : seen_of(a, b, row, pack, c);
        const bool whole = seen.near.begin <= c.begin && seen.near.end >= c.end && c.size() % Vec::kLanes == 0;
        float* const s = score({row, row + 1}, c);
        const i64 at = row - origin;
        float scale = op.score_scale;
        if (Op::kPairs && (a.has_terms() || a.heads_differ())) scale_row(s, lanes, std::exchange(scale, 1.0f));
        if (a.has_terms()) to_scores(s, nullptr, a, g, row, pack, c);
        if (a.heads_differ()) hide_others(s, a, g, row, pack, c, -kInfinity);
        const float kept =
            softmax_step(s, c.size(), broadcast(scale), whole, seen.minus(c.begin), part.top[at], part.sum[at]);
        if (kept != 1.0f) load_row(part.out + at * value.ld, part.out + at * value.ld, value.width, broadcast(kept));
        if (a.p.dropout > 0) {
          for_factors(tile.keep, a, b, g, row, pack, c, [&](Range run, const float* keep) {
            float* const w = s + run.begin - c.begin;
            for_vectors(0, run.size(), [&](i64 x, auto n) { store(w + x, load(w + x, n) * load(keep + x, n), n); });
          });
        }
        if constexpr (Op::kPairs) Product::round_to(s, s, lanes);
      }
      tile_product<Order::Rows, Product>(part.out + (r.begin - origin) * value.ld, value.ld, score(r, c), kKeys,
                                         tile.v + c.begin / Op::kDepth * value.ld, value.ld, r.size(), value.width,
                                         Op::words(c.size()), true);
    });
  }

  // Adds the result of a later part of the keys.
  void merge(const Partial& total, const Partial& part, i64 rows) const noexcept {
    for (i64 r = 0; r < rows; ++r) {
      float* const out = total.out + r * value.ld;
      const float top = std::max(total.top[r], part.top[r]);
      const auto weight = [top](float x) { return x == -kInfinity ? 0.0f : std::exp(x - top); };
      const float mine = weight(total.top[r]), other = weight(part.top[r]);
      for (i64 d = 0; d < value.width; d += Vec::kLanes) {
        store(out + d, fma(broadcast(other), load(part.out + r * value.ld + d), broadcast(mine) * load(out + d)));
      }
      total.sum[r] = total.sum[r] * mine + part.sum[r] * other;
      total.top[r] = top;
    }
  }

  void store_rows(const Partial& total, i64 b, i64 g, Range rows) const noexcept {
    for (i64 r = 0; r < rows.size(); ++r) {
      const i64 row = rows.begin + r;
      const float sum = total.sum[r];
      store_row(o.as<E>() + a.row_offset(o, b, g, row), total.out + r * value.ld, a.Dv,
                broadcast(sum == 0 ? 0.0f : 1.0f / sum));
      lse.as<float>()[a.lse_offset(lse, b, g, row)] = sum == 0 ? kInfinity : total.top[r] + std::log(sum);
    }
  }

  // How the rows of a problem are cut, and the parts of its keys; `shared`: workers share the parts of a tile.
  struct Cut {
    i64 tile_rows, row_tiles, tiles, parts, floats;
    bool shared;
    CallScratch::Size scratch;
  };
  static Cut cut_of(const Problem& a) noexcept {
    const Op op(a.D, a.p.scale), value(a.Dv, a.p.scale);
    const i64 groups = a.B * a.G, parts = std::max(i64{1}, ceil_div(a.S, kPart)), sums = parts > 1 ? 2 : 1;
    const i64 max_rows = std::max(kRows, kTileBytes / ((op.ld + sums * value.ld) * i64{sizeof(float)}) / kRows * kRows);
    const i64 tile_rows = std::clamp(round_up(ceil_div(a.rows() * groups, kTargetTiles), kRows), kRows, max_rows);
    const i64 row_tiles = ceil_div(a.rows(), tile_rows), tiles = row_tiles * groups;
    if (tiles == 0) return {};
    const bool shared = parts > 1 && tiles < kTargetTiles && row_tiles == 1;
    const i64 floats = Partial::floats(value.ld, std::min(tile_rows, a.rows()));
    Arena own(nullptr), all(nullptr);
    carve(own, a, tile_rows);
    if (shared) {
      all.take(tiles * parts * floats);
    } else {
      own.take(sums * floats);
    }
    return {tile_rows, row_tiles, tiles, parts, floats, shared, {all.bytes(), own.bytes()}};
  }

  void run(ThreadPool& pool) const noexcept {
    const Cut cut = cut_of(a);
    if (cut.tiles == 0) return;
    const i64 groups = a.B * a.G, row_tiles = cut.row_tiles, parts = cut.parts, floats = cut.floats;
    // If causal, late rows see more keys, so they start first.
    const auto rows_of = [&](i64 tile) { return part_of(a.rows(), kStrip, row_tiles - 1 - tile / groups, row_tiles); };
    const auto keys_of = [&](i64 part) { return Range{part * kPart, std::min(a.S, (part + 1) * kPart)}; };
    const CallScratch scratch(pool, cut.scratch);
    const auto work = [&](i64 tile, int worker, auto&& body) {
      const i64 b = tile % groups / a.G, g = tile % a.G;
      Arena arena = scratch.own(worker);
      const Tiles buffers = carve(arena, a, cut.tile_rows);
      body(arena, buffers, b, g, rows_of(tile));
    };
    if (!cut.shared) {
      pool.parallel_for(cut.tiles, [&](i64 tile, int worker) {
        work(tile, worker, [&](Arena& arena, const Tiles& buffers, i64 b, i64 g, Range rows) {
          float* const memory = arena.take((parts > 1 ? 2 : 1) * floats);
          const Partial total(memory, value.ld, rows.size()), next(memory + floats, value.ld, rows.size());
          const Range seen = keys_seen(b, rows);
          const i64 first = seen.begin / kPart;
          accumulate(total, buffers, b, g, rows, keys_of(std::min(first, parts - 1)));
          for (i64 part = first + 1; part < parts && part * kPart < seen.end; ++part) {
            accumulate(next, buffers, b, g, rows, keys_of(part));
            merge(total, next, rows.size());
          }
          store_rows(total, b, g, rows);
        });
      });
      return;
    }
    const auto part_of_tile = [&](i64 tile, i64 part, Range rows) {
      return Partial(scratch.shared() + (tile * parts + part) * floats, value.ld, rows.size());
    };
    pool.parallel_for(cut.tiles * parts, [&](i64 t, int worker) {
      const i64 tile = t / parts, part = t % parts;
      work(tile, worker, [&](Arena&, const Tiles& buffers, i64 b, i64 g, Range rows) {
        accumulate(part_of_tile(tile, part, rows), buffers, b, g, rows, keys_of(part));
      });
    });
    pool.parallel_for(cut.tiles, [&](i64 tile, int) {
      const Range rows = rows_of(tile);
      const Partial total = part_of_tile(tile, 0, rows);
      for (i64 part = 1; part < parts; ++part) merge(total, part_of_tile(tile, part, rows), rows.size());
      store_rows(total, tile % groups / a.G, tile % a.G, rows);
    });
  }

  // Keys outside are seen by none of the rows. A part of them would add zeros.
  Range keys_seen(i64 b, Range rows) const noexcept {
    Range seen = a.keys_of(b, rows);
    if (const Range sinks = a.sinks_of(b, rows); !sinks.empty()) seen.begin = std::min(seen.begin, sinks.begin);
    return {std::clamp(seen.begin, i64{0}, a.S), std::clamp(seen.end, i64{0}, a.S)};
  }
};

}  // namespace

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) { Forward<E>{Problem(q, k, v, p), o, lse, q, k, v}.run(*stream.pool); });
}

void attention_fwd_scratch(TensorView, TensorView, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                           Stream& stream) noexcept {
  with_work_type(q.dtype,
                 [&]<class E>(E) { note_scratch(stream, Forward<E>::cut_of(Problem(q, k, v, p)).scratch.bytes()); });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
