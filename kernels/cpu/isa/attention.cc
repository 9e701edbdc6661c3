// SPDX-License-Identifier: Apache-2.0
// Flash attention (Dao et al.): blocks of queries attend to blocks of keys in fp32 tiles of worker scratch; no T x S
// matrix is stored. attention_blocks.h defines which rows attend to which keys.
//
// Forward: a tile is (batch, group, range of rows). Keys are the outer loop, so a converted block serves all rows of
// the tile. With few rows (decoding) the keys are also split into parts, whose results are merged in order.
//
// Backward: a tile is (batch, group, chunk of rows, chunk of keys). The n x n chunks run as a Latin square: in phase f
// row chunk i meets key chunk (f - i) mod n, so no two tiles of a phase share a sum, and every sum grows in the order
// of the phases. n is 1 if batch x groups alone provide enough work for the threads.

#include <cmath>
#include <limits>

#include "cpu/isa/attention_blocks.h"
#include "cpu/isa/kernels.h"
#include "cpu/loops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

// Enough tiles to feed and balance the threads of a rank; a constant, so that results depend on shapes only.
constexpr i64 kTargetTiles = 48;
// Distance of prefetching rows and keys, which are too far apart for the hardware to prefetch.
constexpr i64 kAhead = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// Rows `rows` of a query-like tensor as an fp32 tile.
template <class E>
void load_rows(float* to, const TensorView& x, const Problem& a, i64 b, i64 g, Range rows, float scale) noexcept {
  const i64 D = a.D, ld = a.ld, last = a.rows() - 1;
  const auto row = [&x, &a, b, g](i64 r) { return x.as<E>() + a.row_offset(x, b, g, r); };
  for (i64 r = rows.begin; r < rows.end; ++r, to += ld) {
    prefetch(row(std::min(r + kAhead, last)), D);
    load_row(to, row(r), D, broadcast(scale));
  }
}

// The keys of a whole pack of a key-like tensor as an fp32 tile, with zero rows up to a multiple of the lanes.
template <class E>
void load_keys(float* to, const TensorView& x, const Problem& a, i64 b, i64 g, const Pack& pack) noexcept {
  const i64 D = a.D, ld = a.ld, n = pack.columns.end, last = a.S - 1;
  const auto row = [&x, &a, b, g](i64 key) { return x.as<E>() + a.key_offset(x, b, g, key); };
  pack.for_units(pack.columns, [&](Range c) {
    const i64 key = pack.key(c.begin) - c.begin;
    // The data after a unit is prefetched with it, or when its own turn comes.
    for (i64 j = c.begin; j < c.end; ++j) {
      prefetch(row(pack.unit == 0 ? std::min(key + j + kAhead, last) : pack.key(std::min(j + kAhead, n - 1))), D);
      load_row(to + j * ld, row(key + j), D, broadcast(1.0f));
    }
  });
  for (i64 j = n; j < round_up(n, Vec::kLanes); ++j) fill_zero(to + j * ld, a.width);
}

// Turns scaled products of a row and some columns into scores, if these have further terms, and stores the derivatives
// in `slope`, if given.
void to_scores(float* row, float* slope, const Problem& a, i64 g, i64 at, const Pack& pack, Range columns) noexcept {
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

// Accumulators of the forward pass for a range of rows.
struct Partial {
  float* out;  // [rows, ld], not yet divided by sum
  float* top;  // [rows] the largest score so far
  float* sum;  // [rows] of e^(score - top)

  static i64 floats(const Problem& a, i64 rows) noexcept { return rows * a.ld + 2 * round_up(rows, 16); }
  Partial(float* memory, const Problem& a, i64 rows) noexcept
      : out(memory), top(out + rows * a.ld), sum(top + round_up(rows, 16)) {}
};

// Turns one row of scores into weights e^(score - top); returns the factor for the row's earlier sums. `seen`: the
// visible part of the n columns, unless the row is `whole`.
float softmax_step(float* score, i64 n, bool whole, const Seen& seen, float& top, float& sum) noexcept {
  Vec high = broadcast(-kInfinity);
  for (i64 j = 0; j < n; j += Vec::kLanes) {
    Vec s = load(score + j);
    if (!whole) {
      s = outside(s, j, seen, broadcast(-kInfinity));
      store(score + j, s);
    }
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
  static constexpr i64 kMinPartKeys = 512;       // minimum size of a part of the keys
  // Rows that share the converted keys, with their sums: at most half of an L2 cache.
  static constexpr i64 kTileBytes = 320 * 1024;

  Problem a;
  TensorView o, lse, q, k, v;

  struct Tiles {
    float *q, *k, *kt, *v, *score, *keep;
  };
  static Tiles carve(Arena& arena, const Problem& a, i64 tile_rows) noexcept {
    return {.q = arena.take(tile_rows * a.ld),
            .k = arena.take(kKeys * a.ld),
            .kt = arena.take(kKeys * a.width),
            .v = arena.take(kKeys * a.ld),
            .score = arena.take(kRows * kKeys),
            .keep = arena.take(keep_room(kKeys))};
  }

  // Attention of `rows` of (b, g) to `keys`.
  void accumulate(const Partial& part, const Tiles& tile, i64 b, i64 g, Range rows, Range keys) const noexcept {
    for (i64 r = 0; r < rows.size(); ++r) fill_zero(part.out + r * a.ld, a.width);
    std::fill_n(part.top, rows.size(), -kInfinity);
    fill_zero(part.sum, rows.size());
    load_rows<E>(tile.q, q, a, b, g, rows, a.p.scale);
    Pack pack;
    for (Met met(a, b, g, rows, keys, kKeys); met.next(pack);) {
      load_keys<E>(tile.k, k, a, b, g, pack);
      load_keys<E>(tile.v, v, a, b, g, pack);
      transpose(tile.kt, kKeys, tile.k, a.ld, round_up(pack.size(), Vec::kLanes), round_up(a.D, 8));
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
      tile_product<Order::Rows>(score(r, c), kKeys, tile.q + (r.begin - origin) * a.ld, a.ld, tile.kt + c.begin, kKeys,
                                r.size(), round_up(c.size(), Vec::kLanes), a.D, false);
      for (i64 row = r.begin; row < r.end; ++row) {
        const Seen seen = dense ? Seen{c, {0, 0}} : seen_of(a, b, row, pack, c);
        const bool whole = seen.near.begin <= c.begin && seen.near.end >= c.end && c.size() % Vec::kLanes == 0;
        float* const s = score({row, row + 1}, c);
        const i64 at = row - origin;
        if (a.has_terms()) to_scores(s, nullptr, a, g, row, pack, c);
        if (a.heads_differ()) hide_others(s, a, g, row, pack, c, -kInfinity);
        const float kept = softmax_step(s, c.size(), whole, seen.minus(c.begin), part.top[at], part.sum[at]);
        if (kept != 1.0f) load_row(part.out + at * a.ld, part.out + at * a.ld, a.width, broadcast(kept));
        if (a.p.dropout > 0) {
          for_factors(tile.keep, a, b, g, row, pack, c, [&](Range run, const float* keep) {
            float* const w = s + run.begin - c.begin;
            for (i64 x = 0; x < run.size(); x += Vec::kLanes) store(w + x, load(w + x) * load(keep + x));
          });
        }
      }
      tile_product<Order::Rows>(part.out + (r.begin - origin) * a.ld, a.ld, score(r, c), kKeys, tile.v + c.begin * a.ld,
                                a.ld, r.size(), a.width, c.size(), true);
    });
  }

  // Merges the parts in order into the first one, and stores the rows.
  void finish(float* memory, i64 parts, i64 b, i64 g, Range rows) const noexcept {
    const Partial total(memory, a, rows.size());
    for (i64 r = 0; r < rows.size(); ++r) {
      float* const out = total.out + r * a.ld;
      for (i64 i = 1; i < parts; ++i) {
        const Partial part(memory + i * Partial::floats(a, rows.size()), a, rows.size());
        const float top = std::max(total.top[r], part.top[r]);
        const auto weight = [top](float x) { return x == -kInfinity ? 0.0f : std::exp(x - top); };
        const float mine = weight(total.top[r]), other = weight(part.top[r]);
        for (i64 d = 0; d < a.width; d += Vec::kLanes) {
          store(out + d, fma(broadcast(other), load(part.out + r * a.ld + d), broadcast(mine) * load(out + d)));
        }
        total.sum[r] = total.sum[r] * mine + part.sum[r] * other;
        total.top[r] = top;
      }
      const i64 row = rows.begin + r;
      const float sum = total.sum[r];
      store_row(o.as<E>() + a.row_offset(o, b, g, row), out, a.D, broadcast(sum == 0 ? 0.0f : 1.0f / sum));
      lse.as<float>()[a.lse_offset(lse, b, g, row)] = sum == 0 ? kInfinity : total.top[r] + std::log(sum);
    }
  }

  // How the rows of a problem are cut, and its keys if rows are few.
  struct Cut {
    i64 tile_rows, row_tiles, tiles, parts, floats;
    CallScratch::Size scratch;
  };
  static Cut cut_of(const Problem& a) noexcept {
    const i64 groups = a.B * a.G;
    const i64 max_rows = std::max(kRows, kTileBytes / (2 * a.ld * i64{sizeof(float)}) / kRows * kRows);
    const i64 tile_rows = std::clamp(round_up(ceil_div(a.rows() * groups, kTargetTiles), kRows), kRows, max_rows);
    const i64 row_tiles = ceil_div(a.rows(), tile_rows), tiles = row_tiles * groups;
    if (tiles == 0) return {};
    const i64 parts = std::clamp(std::min(ceil_div(kTargetTiles, tiles), a.S / kMinPartKeys), i64{1}, kTargetTiles);
    const i64 floats = Partial::floats(a, std::min(tile_rows, a.rows()));
    Arena own(nullptr), shared(nullptr);
    carve(own, a, tile_rows);
    (parts > 1 ? shared : own).take(parts > 1 ? tiles * parts * floats : floats);
    return {tile_rows, row_tiles, tiles, parts, floats, {shared.bytes(), own.bytes()}};
  }

  void run(ThreadPool& pool) const noexcept {
    const Cut cut = cut_of(a);
    if (cut.tiles == 0) return;
    const i64 groups = a.B * a.G, row_tiles = cut.row_tiles, tiles = cut.tiles, parts = cut.parts, floats = cut.floats;
    // If causal, late rows see more keys, so they start first.
    const auto rows_of = [&](i64 tile) { return part_of(a.rows(), kStrip, row_tiles - 1 - tile / groups, row_tiles); };
    const CallScratch scratch(pool, cut.scratch);
    pool.parallel_for(tiles * parts, [&](i64 t, int worker) {
      const i64 tile = t / parts, b = tile % groups / a.G, g = tile % a.G;
      const Range rows = rows_of(tile);
      Arena arena = scratch.own(worker);
      const Tiles buffers = carve(arena, a, cut.tile_rows);
      float* const memory = parts > 1
                                ? scratch.shared() + tile * parts * floats + t % parts * Partial::floats(a, rows.size())
                                : arena.take(floats);
      accumulate(Partial(memory, a, rows.size()), buffers, b, g, rows, part_of(a.S, kKeys, t % parts, parts));
      if (parts == 1) finish(memory, 1, b, g, rows);
    });
    if (parts == 1) return;
    pool.parallel_for(tiles, [&](i64 tile, int) {
      finish(scratch.shared() + tile * parts * floats, parts, tile % groups / a.G, tile % a.G, rows_of(tile));
    });
  }
};

template <class E>
struct Backward {
  static constexpr i64 kKeys = 64, kRows = 96;   // block of scores
  static constexpr i64 kKeysPacked = 256;        // keys that share the converted rows
  static constexpr i64 kRowsPacked = 4 * kRows;  // with a layout: rows that share the converted keys
  static constexpr i64 kMaxChunks = 8;

  Problem a;
  TensorView dq, dk, dv, dout, q, k, v, o, lse;

  struct Tiles {
    float *k, *kt, *vt, *q, *dout, *prob, *dscore, *lse, *delta, *keep;
  };
  static Tiles carve(Arena& arena, const Problem& a) noexcept {
    return {.k = arena.take(kKeysPacked * a.ld),
            .kt = arena.take(kKeysPacked * a.width),
            .vt = arena.take(kKeysPacked * a.width),
            .q = arena.take(kRows * a.ld),
            .dout = arena.take(kRows * a.ld),
            .prob = arena.take(kRows * kKeys),
            .dscore = arena.take(kRows * kKeys),
            .lse = arena.take(kRows),
            .delta = arena.take(kRows),
            .keep = arena.take(keep_room(kKeys))};
  }

  // fp32 sums of one (batch, group), over all its rows and keys; dq lacks the factor `scale`.
  struct Sums {
    float *dq, *dk, *dv;
    static i64 floats(const Problem& a) noexcept { return (a.rows() + 2 * a.S) * a.ld; }
    Sums(float* memory, const Problem& a) noexcept : dq(memory), dk(dq + a.rows() * a.ld), dv(dk + a.S * a.ld) {}
  };

  // Adds the contributions of `rows` and `keys` of (b, g) to each other's gradients.
  void accumulate(const Sums& sums, const Tiles& tile, i64 b, i64 g, Range rows, Range keys) const noexcept {
    if (a.sparse()) return accumulate_sparse(sums, tile, b, g, rows, keys);
    for (i64 first = keys.begin; first < keys.end; first += kKeysPacked) {
      const Range packed = {first, std::min(keys.end, first + kKeysPacked)};
      const Range seen = intersect(rows, a.rows_of(b, packed));
      if (seen.empty()) continue;
      const Pack pack = {.columns = {0, packed.size()}, .first = {first}};
      load_transposed(tile.vt, tile.k, v, b, g, pack);
      load_transposed(tile.kt, tile.k, k, b, g, pack);
      for (i64 r = rows.begin + (seen.begin - rows.begin) / kRows * kRows; r < seen.end; r += kRows) {
        const Range block = {r, std::min(rows.end, r + kRows)};
        load_block(tile, b, g, block);
        for (i64 c = 0; c < pack.size(); c += kKeys) {
          const Range columns = {c, std::min(pack.size(), c + kKeys)};
          if (intersect(block, a.rows_of(b, pack.keys(columns))).empty()) continue;
          differentiate(sums, tile, b, g, block, pack.part(columns));
        }
      }
    }
  }

  // Gathers the keys that any of some blocks of rows attends to. Every sum grows in the same order.
  void accumulate_sparse(const Sums& sums, const Tiles& tile, i64 b, i64 g, Range rows, Range keys) const noexcept {
    for (i64 first = rows.begin; first < rows.end; first += kRowsPacked) {
      const Range some = {first, std::min(rows.end, first + kRowsPacked)};
      Pack pack;
      for (Met met(a, b, g, some, keys, kKeysPacked); met.next(pack);) {
        load_transposed(tile.vt, tile.k, v, b, g, pack);
        load_transposed(tile.kt, tile.k, k, b, g, pack);
        for (i64 r = some.begin; r < some.end; r += kRows) {
          const Range block = {r, std::min(some.end, r + kRows)};
          bool loaded = false;
          for (i64 c = 0; c < pack.size(); c += kKeys) {
            const Pack part = pack.part({c, std::min(pack.size(), c + kKeys)});
            if (!meets(b, g, block, part)) continue;
            if (!loaded) load_block(tile, b, g, block);
            loaded = true;
            differentiate(sums, tile, b, g, block, part);
          }
        }
      }
    }
  }
  bool meets(i64 b, i64 g, Range rows, const Pack& pack) const noexcept {
    bool any = false;
    for_visible(a, b, g, rows, pack, [&](Range, Range, bool) { any = true; });
    return any;
  }

  // Keys as a tile, and transposed block by block.
  void load_transposed(float* transposed, float* plain, const TensorView& x, i64 b, i64 g,
                       const Pack& pack) const noexcept {
    load_keys<E>(plain, x, a, b, g, pack);
    const i64 padded = round_up(pack.size(), Vec::kLanes);
    for (i64 j = 0; j < padded; j += kKeys) {
      transpose(transposed + j * a.width, kKeys, plain + j * a.ld, a.ld, std::min(kKeys, padded - j), round_up(a.D, 8));
    }
  }

  // Queries (scaled), output gradients, D = rowsum(dO * O) and the log-sum-exps of a block of rows.
  void load_block(const Tiles& tile, i64 b, i64 g, Range rows) const noexcept {
    load_rows<E>(tile.q, q, a, b, g, rows, a.p.scale);
    load_rows<E>(tile.dout, dout, a, b, g, rows, 1.0f);
    for (i64 r = rows.begin; r < rows.end; ++r) {
      const E* const out = o.as<E>() + a.row_offset(o, b, g, r);
      const float* const grad = tile.dout + (r - rows.begin) * a.ld;
      Vec sum = zero();
      for_vectors(0, a.D, [&](i64 d, auto n) { sum = fma(load(grad + d, n), load(out + d, n), sum); });
      tile.delta[r - rows.begin] = reduce_add(sum);
      tile.lse[r - rows.begin] = lse.as<float>()[a.lse_offset(lse, b, g, r)];
    }
  }

  // A block of rows attends to at most kKeys of the packed keys.
  void differentiate(const Sums& sums, const Tiles& tile, i64 b, i64 g, Range rows, const Pack& pack) const noexcept {
    const i64 origin = pack.columns.begin;
    const auto score = [&](float* matrix, Range r, Range c) {
      return matrix + (r.begin - rows.begin) * kKeys + c.begin - origin;
    };
    for_visible(a, b, g, rows, pack, [&](Range r, Range c, bool) {
      const i64 row = (r.begin - rows.begin) * a.ld, column = origin * a.width + c.begin - origin;
      const i64 lanes = round_up(c.size(), Vec::kLanes);
      tile_product<Order::Rows>(score(tile.prob, r, c), kKeys, tile.q + row, a.ld, tile.kt + column, kKeys, r.size(),
                                lanes, a.D, false);
      tile_product<Order::Rows>(score(tile.dscore, r, c), kKeys, tile.dout + row, a.ld, tile.vt + column, kKeys,
                                r.size(), lanes, a.D, false);
    });
    // Whole units, so that columns without a product become zero.
    for_same_units(a, g, rows, pack, [&](Range r, u32 units) {
      for_columns(pack, units, [&](Range c) {
        const bool whole = c.size() % Vec::kLanes == 0 && a.dense(b, r, pack.keys(c));
        for (i64 row = r.begin; row < r.end; ++row) {
          softmax_backward(tile, row - rows.begin, b, g, row, score(tile.prob, {row, row}, c),
                           score(tile.dscore, {row, row}, c), pack, c, whole);
        }
      });
    });
    for_visible(a, b, g, rows, pack, [&](Range r, Range c, bool) {
      tile_product<Order::Rows>(sums.dq + r.begin * a.ld, a.ld, score(tile.dscore, r, c), kKeys,
                                tile.k + c.begin * a.ld, a.ld, r.size(), a.width, c.size(), true);
    });
    for_same_units(a, g, rows, pack, [&](Range r, u32 units) {
      for_columns(pack, units, [&](Range columns) {
        const bool dense = a.dense(b, r, pack.keys(columns));
        const auto add = [&](Range seen, Range c) {
          if (seen.empty()) return;
          const i64 key = pack.key(c.begin) * a.ld, row = (seen.begin - rows.begin) * a.ld;
          tile_product<Order::Columns>(sums.dv + key, a.ld, score(tile.prob, seen, c), kKeys, tile.dout + row, a.ld,
                                       c.size(), a.width, seen.size(), true);
          tile_product<Order::Columns>(sums.dk + key, a.ld, score(tile.dscore, seen, c), kKeys, tile.q + row, a.ld,
                                       c.size(), a.width, seen.size(), true);
        };
        for_key_runs(pack, columns, [&](Range c) {
          if (dense) return add(r, c);
          for (i64 j = c.begin; j < c.end; j += kStrip) {
            const Range strip = {j, std::min(c.end, j + kStrip)};
            add(intersect(r, a.rows_of(b, pack.keys(strip))), strip);
          }
        });
      });
    });
  }

  // Calls f(columns) for the parts of a range of columns whose keys are adjacent, across units.
  template <class F>
  static void for_key_runs(const Pack& pack, Range columns, F&& f) noexcept {
    Range run = {columns.begin, columns.begin};
    pack.for_units(columns, [&](Range c) {
      if (!run.empty() && pack.key(c.begin) != pack.key(run.end - 1) + 1) {
        f(run);
        run.begin = c.begin;
      }
      run.end = c.end;
    });
    f(run);
  }

  // Turns a row of scores, and one of dL/d(dropped probability), into dropped probabilities and dL/d(score) for some
  // columns.
  [[gnu::always_inline]] void softmax_backward(const Tiles& tile, i64 at, i64 b, i64 g, i64 row, float* prob,
                                               float* dscore, const Pack& pack, Range columns,
                                               bool whole) const noexcept {
    const Vec log_sum = broadcast(tile.lse[at]), delta = broadcast(tile.delta[at]);
    const Seen seen = whole ? Seen{columns, {0, 0}} : seen_of(a, b, row, pack, columns);
    if (a.p.dropout <= 0 && !a.has_terms() && !a.heads_differ() && seen.sinks.empty()) {
      for (i64 j = columns.begin; j < columns.end; j += Vec::kLanes) {
        const i64 x = j - columns.begin;
        if (j >= seen.near.end || j + Vec::kLanes <= seen.near.begin) {
          store(prob + x, zero());
          store(dscore + x, zero());
          continue;
        }
        Vec p = exp_weight(load(prob + x) - log_sum), ds = p * (load(dscore + x) - delta);
        if (j < seen.near.begin || j + Vec::kLanes > seen.near.end) {
          p = outside(p, j, seen, zero());
          ds = outside(ds, j, seen, zero());
        }
        store(prob + x, p);
        store(dscore + x, ds);
      }
      return;
    }
    float slope[kKeys];
    if (a.has_terms()) to_scores(prob, slope, a, g, row, pack, columns);
    const auto differentiate = [&](Range c, const float* keep) {
      for (i64 j = c.begin; j < c.end; j += Vec::kLanes) {
        const i64 x = j - columns.begin;
        Vec p = exp_weight(load(prob + x) - log_sum);
        const Vec factor = keep != nullptr ? load(keep + j - c.begin) : broadcast(1.0f);
        Vec ds = p * (load(dscore + x) * factor - delta);
        p = p * factor;
        if (a.p.softcap > 0) ds = ds * load(slope + x);
        if (!whole) {
          p = outside(p, j, seen, zero());
          ds = outside(ds, j, seen, zero());
        }
        store(prob + x, p);
        store(dscore + x, ds);
      }
    };
    if (a.p.dropout > 0) {
      for_factors(tile.keep, a, b, g, row, pack, columns, differentiate);
    } else {
      differentiate(columns, nullptr);
    }
    if (!a.heads_differ()) return;
    hide_others(prob, a, g, row, pack, columns, 0);
    hide_others(dscore, a, g, row, pack, columns, 0);
  }

  void store_sums(const Sums& sums, i64 b, i64 g, Range rows, Range keys) const noexcept {
    for (i64 r = rows.begin; r < rows.end; ++r) {
      store_row(dq.as<E>() + a.row_offset(dq, b, g, r), sums.dq + r * a.ld, a.D, broadcast(a.p.scale));
    }
    for (i64 j = keys.begin; j < keys.end; ++j) {
      store_row(dk.as<E>() + a.key_offset(dk, b, g, j), sums.dk + j * a.ld, a.D, broadcast(1.0f));
      store_row(dv.as<E>() + a.key_offset(dv, b, g, j), sums.dv + j * a.ld, a.D, broadcast(1.0f));
    }
  }

  struct Cut {
    i64 chunks, floats;
    CallScratch::Size scratch;
  };
  static Cut cut_of(const Problem& a) noexcept {
    const i64 groups = a.B * a.G, row_blocks = ceil_div(a.rows(), kRows), key_blocks = ceil_div(a.S, kKeys);
    if (groups == 0) return {};
    const i64 wanted = ceil_div(kTargetTiles / 2, groups);  // half, since every chunk costs a phase
    const i64 chunks = std::max<i64>(1, std::min({wanted, row_blocks, key_blocks, kMaxChunks}));
    const i64 floats = Sums::floats(a);
    Arena own(nullptr), shared(nullptr);
    carve(own, a);
    (chunks > 1 ? shared : own).take(chunks > 1 ? groups * floats : floats);
    return {chunks, floats, {shared.bytes(), own.bytes()}};
  }

  void run(ThreadPool& pool) const noexcept {
    const Cut cut = cut_of(a);
    if (cut.chunks == 0) return;
    const i64 groups = a.B * a.G, chunks = cut.chunks, floats = cut.floats;
    const CallScratch scratch(pool, cut.scratch);
    for (i64 phase = 0; phase < chunks; ++phase) {
      pool.parallel_for(groups * chunks, [&](i64 t, int worker) {
        const i64 group = t / chunks, b = group / a.G, g = group % a.G, i = t % chunks;
        const Range rows = part_of(a.rows(), kRows, i, chunks);
        const Range keys = part_of(a.S, kKeys, (phase + chunks - i) % chunks, chunks);
        Arena arena = scratch.own(worker);
        const Tiles tile = carve(arena, a);
        const Sums sums(chunks > 1 ? scratch.shared() + group * floats : arena.take(floats), a);
        // In every phase each chunk of rows and each of keys has one tile: the first clears, the last stores.
        if (phase == 0) {
          fill_zero(sums.dq + rows.begin * a.ld, rows.size() * a.ld);
          fill_zero(sums.dk + keys.begin * a.ld, keys.size() * a.ld);
          fill_zero(sums.dv + keys.begin * a.ld, keys.size() * a.ld);
        }
        accumulate(sums, tile, b, g, rows, keys);
        if (phase == chunks - 1) store_sums(sums, b, g, rows, keys);
      });
    }
  }
};

}  // namespace

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) { Forward<E>{Problem(q, k, p), o, lse, q, k, v}.run(*stream.pool); });
}

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  with_work_type(
      q.dtype, [&]<class E>(E) { Backward<E>{Problem(q, k, p), dq, dk, dv, dout, q, k, v, o, lse}.run(*stream.pool); });
}

// Tiles are fp32 for every dtype.
void attention_fwd_scratch(TensorView, TensorView, TensorView q, TensorView k, TensorView, const AttentionParams& p,
                           Stream& stream) noexcept {
  note_scratch(stream, Forward<float>::cut_of(Problem(q, k, p)).scratch.bytes());
}

void attention_bwd_scratch(TensorView, TensorView, TensorView, TensorView, TensorView q, TensorView k, TensorView,
                           TensorView, TensorView, const AttentionParams& p, Stream& stream) noexcept {
  note_scratch(stream, Backward<float>::cut_of(Problem(q, k, p)).scratch.bytes());
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
