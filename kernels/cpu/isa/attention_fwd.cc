// SPDX-License-Identifier: Apache-2.0
// Flash attention (Dao et al.): blocks of queries attend to blocks of keys in tiles of worker scratch; no T x S matrix
// is stored. attention_blocks.h defines which rows attend to which keys. Sums, scores and the softmax are fp32. The
// factors of products are bf16 if the tensors are and the CPU multiplies pairs of such numbers: weights are then
// rounded to bf16, as in other flash attention kernels.
//
// A tile is (batch, group, range of rows). Keys are the outer loop, so a converted block serves all rows of the tile.
// Parts of kPart keys, counted from the first key, have a softmax of their own, and are merged in order: a row's bits
// depend only on its keys. With few rows (decoding) several workers share the parts of a tile.

#include <algorithm>
#include <array>
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

  // A tile by itself: part after part of the keys that its rows see.
  void attend_tile(Arena& arena, const Tiles& tile, i64 b, i64 g, Range rows, bool in_parts) const noexcept {
    const i64 floats = Partial::floats(value.ld, rows.size()), parts = num_parts();
    float* const memory = arena.take((in_parts ? 2 : 1) * floats);
    const Partial total(memory, value.ld, rows.size()), next(memory + floats, value.ld, rows.size());
    const Range seen = keys_seen(b, rows);
    const i64 first = seen.begin / kPart;
    accumulate(total, tile, b, g, rows, keys_of(std::min(first, parts - 1)));
    for (i64 part = first + 1; part < parts && part * kPart < seen.end; ++part) {
      accumulate(next, tile, b, g, rows, keys_of(part));
      merge(total, next, rows.size());
    }
    store_rows(total, b, g, rows);
  }

  i64 num_parts() const noexcept { return std::max(i64{1}, ceil_div(a.S, kPart)); }
  Range keys_of(i64 part) const noexcept { return {part * kPart, std::min(a.S, (part + 1) * kPart)}; }

  // Keys outside are seen by none of the rows. A part of them would add zeros.
  Range keys_seen(i64 b, Range rows) const noexcept {
    Range seen = a.keys_of(b, rows);
    if (const Range sinks = a.sinks_of(b, rows); !sinks.empty()) seen.begin = std::min(seen.begin, sinks.begin);
    return {std::clamp(seen.begin, i64{0}, a.S), std::clamp(seen.end, i64{0}, a.S)};
  }
};

// A call, as a problem for each of its sequences; without these there is one problem, with B of them. A job is a tile
// of rows of a group. If a tile makes up much of a call, which one with few rows and many keys may, its parts are jobs:
// then their sums are shared, and merged at the end.
template <class E>
class ForwardCall {
 public:
  ForwardCall(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p) noexcept
      : o_(o), lse_(lse), q_(q), k_(k), v_(v), p_(p), cut_(cut()) {}

  CallScratch::Size scratch() const noexcept { return cut_.scratch; }

  void run(ThreadPool& pool) const noexcept {
    if (cut_.tile_rows == 0) return;
    const CallScratch scratch(pool, cut_.scratch);
    std::array<Place, 2> two;
    Place* const places = p_.sequences ? reinterpret_cast<Place*>(scratch.shared()) : two.data();
    float* const sums = scratch.shared() + table_floats();
    lay_out(places);
    const auto find = [&](i64 n, i64 Place::*first) {
      const Place* const next =
          std::upper_bound(places, places + count() + 1, n, [&](i64 x, const Place& p) { return x < p.*first; });
      return next - 1 - places;
    };
    const auto sums_of = [&](const One& x, const Place& place, i64 number, Range rows) {
      return Partial(sums + place.sums + number * floats_of(rows.size()), x.value.ld, rows.size());
    };
    const i64 jobs = places[count()].job, merged = places[count()].merged;
    // The last sequences are those with most rows, and, if causal, late rows see most keys: they begin.
    pool.parallel_for(jobs, [&](i64 n, int worker) {
      const i64 job = jobs - 1 - n, s = find(job, &Place::job);
      const One x = sequence(s);
      const Tiling t = tiling(x);
      const bool shared = places[s + 1].merged > places[s].merged;
      const i64 index = job - places[s].job, tile = shared ? index / t.parts : index, group = tile % t.groups;
      const Range rows = t.rows(tile);
      Arena arena = scratch.own(worker);
      const auto buffers = One::carve(arena, x.a, cut_.tile_rows);
      if (!shared) return x.attend_tile(arena, buffers, group / x.a.G, group % x.a.G, rows, cut_.in_parts);
      x.accumulate(sums_of(x, places[s], index, rows), buffers, group / x.a.G, group % x.a.G, rows,
                   x.keys_of(t.first_part + index % t.parts));
    });
    if (merged == 0) return;
    pool.parallel_for(merged, [&](i64 n, int) {
      const i64 s = find(n, &Place::merged), tile = n - places[s].merged;
      const One x = sequence(s);
      const Tiling t = tiling(x);
      const Range rows = t.rows(tile);
      const Partial total = sums_of(x, places[s], tile * t.parts, rows);
      for (i64 part = 1; part < t.parts; ++part)
        x.merge(total, sums_of(x, places[s], tile * t.parts + part, rows), rows.size());
      x.store_rows(total, tile / x.a.G, tile % x.a.G, rows);
    });
  }

 private:
  using One = Forward<E>;
  // The first job of a sequence, the first of its tiles among those that are merged, and the place of their sums.
  struct Place {
    i64 job, merged, sums;
  };
  // The rows of one problem in tiles, and the parts of keys that any row sees.
  struct Tiling {
    i64 num_rows, groups, row_tiles, first_part, parts;
    i64 tiles() const noexcept { return row_tiles * groups; }
    Range rows(i64 tile) const noexcept { return part_of(num_rows, kStrip, tile / groups, row_tiles); }
  };
  struct Cut {
    i64 tile_rows;  // at most; 0: there is nothing to do
    bool in_parts;
    CallScratch::Size scratch;
  };
  // Sums that sequences share, at most: each worker reserves as much.
  static constexpr i64 kSharedFloats = i64{2} << 18;

  i64 count() const noexcept { return p_.sequences ? p_.sequences.count : 1; }
  One sequence(i64 s) const noexcept {
    if (!p_.sequences) return {Problem(q_, k_, v_, p_), o_, lse_, q_, k_, v_};
    const i64 begin = p_.sequences.begins[s], n = p_.sequences.begins[s + 1] - begin;
    const auto rows = [&](TensorView x, int dim) {
      x.data = x.as<char>() + begin * x.stride[dim] * dtype_bytes(x.dtype);
      x.shape[dim] = n;
      return x;
    };
    TensorView k = k_, v = v_;
    k.shape[1] = v.shape[1] = p_.sequences.keys[s];
    const TensorView q = rows(q_, 1);
    return {Problem(q, k, v, p_.of_sequence(s)), rows(o_, 1), rows(lse_, 2), q, k, v};
  }
  Tiling tiling(const One& x) const noexcept {
    const i64 rows = x.a.rows(), all = x.num_parts();
    Range parts = {0, all};
    if (p_.sequences) {
      const Range seen = x.keys_seen(0, {0, rows});
      parts = {std::min(seen.begin / One::kPart, all - 1), ceil_div(seen.end, One::kPart)};
    }
    return {rows, x.a.B * x.a.G, ceil_div(rows, cut_.tile_rows), parts.begin, std::max(i64{1}, parts.size())};
  }
  i64 floats_of(i64 rows) const noexcept { return Partial::floats(Operands<E>(v_.dim(3), 1.0f).ld, rows); }
  // The table of places, before the sums.
  i64 table_floats() const noexcept {
    return p_.sequences ? round_up((q_.dim(1) + 1) * i64{sizeof(Place) / sizeof(float)}, 16) : 0;
  }

  // A tile is shared if its keys are more than an even share of the keys of all tiles.
  void lay_out(Place* places) const noexcept {
    i64 all = 0;
    for (i64 s = 0; s < count(); ++s) {
      const Tiling t = tiling(sequence(s));
      all += t.tiles() * t.parts;
    }
    places[0] = {0, 0, 0};
    for (i64 s = 0; s < count(); ++s) {
      const Tiling t = tiling(sequence(s));
      const i64 sums = t.tiles() * t.parts * floats_of(t.num_rows), room = shared_floats() - places[s].sums;
      const bool shared = t.row_tiles == 1 && t.parts > 1 && t.parts * kTargetTiles > all && sums <= room;
      places[s + 1] = {places[s].job + t.tiles() * (shared ? t.parts : 1), places[s].merged + (shared ? t.tiles() : 0),
                       places[s].sums + (shared ? sums : 0)};
    }
  }

  // From shapes alone, so that scratch can be predicted.
  i64 shared_floats() const noexcept { return cut_.scratch.shared / i64{sizeof(float)} - table_floats(); }
  Cut cut() const noexcept {
    const Problem a(q_, k_, v_, p_);
    const Operands<E> op(a.D, a.p.scale), value(a.Dv, a.p.scale);
    const i64 groups = a.B * a.G, parts = std::max(i64{1}, ceil_div(a.S, One::kPart)), sums = parts > 1 ? 2 : 1;
    if (a.rows() * groups == 0) return {};
    const i64 row_bytes = (op.ld + sums * value.ld) * i64{sizeof(float)};
    const i64 max_rows = std::max(One::kRows, One::kTileBytes / row_bytes / One::kRows * One::kRows);
    const i64 tile_rows =
        std::clamp(round_up(ceil_div(a.rows() * groups, kTargetTiles), One::kRows), One::kRows, max_rows);
    Arena own(nullptr), all(nullptr);
    One::carve(own, a, tile_rows);
    const i64 rows = std::min(tile_rows, a.rows());
    if (p_.sequences) {
      own.take(sums * floats_of(rows));
      all.take(table_floats());
      if (parts > 1) all.take(std::min(kSharedFloats, parts * a.rows() * a.G * floats_of(1)));
    } else if (parts > 1 && groups < kTargetTiles && a.rows() <= tile_rows) {
      all.take(groups * parts * floats_of(rows));
    } else {
      own.take(sums * floats_of(rows));
    }
    return {tile_rows, parts > 1, {all.bytes(), own.bytes()}};
  }

  TensorView o_, lse_, q_, k_, v_;
  const AttentionParams& p_;
  Cut cut_;
};

}  // namespace

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) { ForwardCall<E>(o, lse, q, k, v, p).run(*stream.pool); });
}

void attention_fwd_scratch(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v,
                           const AttentionParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype,
                 [&]<class E>(E) { note_scratch(stream, ForwardCall<E>(o, lse, q, k, v, p).scratch().bytes()); });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
