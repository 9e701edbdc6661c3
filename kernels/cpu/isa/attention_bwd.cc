// SPDX-License-Identifier: Apache-2.0
// The backward pass of flash attention (attention_fwd.cc). A tile is (batch, group, chunk of rows, chunk of keys). The
// n x n chunks run as a Latin square: in phase f row chunk i meets key chunk (f - i) mod n, so no two tiles of a phase
// share a sum, and every sum grows in the order of the phases. n is 1 if batch x groups alone provide enough work for
// the threads.

#include "cpu/isa/attention_tiles.h"

namespace ds::cpu::DS_ISA_NAMESPACE {
namespace {

template <class E>
struct Backward {
  static constexpr i64 kKeys = 64, kRows = 96;   // block of scores
  static constexpr i64 kKeysPacked = 256;        // keys that share the converted rows
  static constexpr i64 kRowsPacked = 4 * kRows;  // with a layout: rows that share the converted keys
  static constexpr i64 kMaxChunks = 8;

  using Op = Operands<E>;
  using Product = typename Op::Product;
  static constexpr i64 kDepth = Op::kDepth;

  Problem a;
  TensorView dq, dk, dv, dout, q, k, v, o, lse;
  Op op{a.D, a.p.scale}, value{a.Dv, a.p.scale};  // of queries and keys; of values and outputs

  struct Tiles {
    RowForms k, q, dout;  // k: also values before they are transposed
    float *kt, *vt;       // [inner][keys], block by block
    ScoreGrads score;
    float *lse, *delta, *keep;
  };
  static Tiles carve(Arena& arena, const Problem& a) noexcept {
    const Op op(a.D, a.p.scale), value(a.Dv, a.p.scale), wider(std::max(a.D, a.Dv), a.p.scale);
    return {.k = RowForms::take(arena, wider, kKeysPacked),
            .q = RowForms::take(arena, op, kRows),
            .dout = RowForms::take(arena, value, kRows),
            .kt = arena.take(kKeysPacked * round_up(op.inner, 8)),
            .vt = arena.take(kKeysPacked * round_up(value.inner, 8)),
            .score = ScoreGrads::take(arena, op, kRows, kKeys),
            .lse = arena.take(kRows),
            .delta = arena.take(kRows),
            .keep = arena.take(keep_room(kKeys))};
  }

  // fp32 sums of one (batch, group), over all its rows and keys; dq lacks the factor `scale`.
  struct Sums {
    float *dq, *dk, *dv;
    static i64 floats(const Problem& a) noexcept {
      const Op op(a.D, a.p.scale), value(a.Dv, a.p.scale);
      return (a.rows() + a.S) * op.ld + a.S * value.ld;
    }
    Sums(float* memory, const Problem& a, i64 ld) noexcept : dq(memory), dk(dq + a.rows() * ld), dv(dk + a.S * ld) {}
  };

  // Adds the contributions of `rows` and `keys` of (b, g) to each other's gradients.
  void accumulate(const Sums& sums, const Tiles& tile, i64 b, i64 g, Range rows, Range keys) const noexcept {
    if (a.sparse()) return accumulate_sparse(sums, tile, b, g, rows, keys);
    for (i64 first = keys.begin; first < keys.end; first += kKeysPacked) {
      const Range packed = {first, std::min(keys.end, first + kKeysPacked)};
      const Range seen = intersect(rows, a.rows_of(b, packed));
      if (seen.empty()) continue;
      const Pack pack = {.columns = {0, packed.size()}, .first = {first}};
      load_packed(tile, b, g, pack);
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
        load_packed(tile, b, g, pack);
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

  // Keys and values of a pack: transposed block by block, and keys as the right factor of dq.
  void load_packed(const Tiles& tile, i64 b, i64 g, const Pack& pack) const noexcept {
    const i64 padded = round_up(pack.size(), Vec::kLanes);
    load_keys<E>({tile.k.along, nullptr}, v, a, value, b, g, pack);
    transpose_blocks(tile.vt, kKeys, tile.k.along, value, padded);
    load_keys<E>(tile.k, k, a, op, b, g, pack);
    transpose_blocks(tile.kt, kKeys, tile.k.along, op, padded);
  }

  // Queries (scaled), output gradients, D = rowsum(dO * O) and the log-sum-exps of a block of rows.
  void load_block(const Tiles& tile, i64 b, i64 g, Range rows) const noexcept {
    load_rows<E>(tile.q, q, a, op, b, g, rows, op.query_scale);
    load_rows<E>(tile.dout, dout, a, value, b, g, rows, 1.0f);
    for (i64 r = rows.begin; r < rows.end; ++r) {
      const E* const out = o.as<E>() + a.row_offset(o, b, g, r);
      const E* const grad = dout.as<E>() + a.row_offset(dout, b, g, r);
      Vec sum = zero();
      for_vectors(0, a.Dv, [&](i64 d, auto n) { sum = fma(load(grad + d, n), load(out + d, n), sum); });
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
    const auto ds_words = [&](i64 row, Range c) {
      return tile.score.dscore_along + ((row - rows.begin) * kKeys + c.begin - origin) / kDepth;
    };
    for_visible(a, b, g, rows, pack, [&](Range r, Range c, bool) {
      const i64 row = r.begin - rows.begin, column = c.begin - origin;
      const i64 lanes = round_up(c.size(), Vec::kLanes);
      tile_product<Order::Rows, Product>(score(tile.score.prob, r, c), kKeys, tile.q.along + row * op.inner_ld,
                                         op.inner_ld, tile.kt + origin * round_up(op.inner, 8) + column, kKeys,
                                         r.size(), lanes, op.inner, false);
      tile_product<Order::Rows, Product>(score(tile.score.dscore, r, c), kKeys, tile.dout.along + row * value.inner_ld,
                                         value.inner_ld, tile.vt + origin * round_up(value.inner, 8) + column, kKeys,
                                         r.size(), lanes, value.inner, false);
    });
    // Whole units, so that columns without a product become zero.
    for_same_units(a, g, rows, pack, [&](Range r, u32 units) {
      for_columns(pack, units, [&](Range c) {
        const bool whole = c.size() % Vec::kLanes == 0 && a.dense(b, r, pack.keys(c));
        for (i64 row = r.begin; row < r.end; ++row) {
          softmax_backward(tile, row - rows.begin, b, g, row, score(tile.score.prob, {row, row}, c),
                           score(tile.score.dscore, {row, row}, c), pack, c, whole);
          if constexpr (Op::kPairs) {
            Product::round_to(ds_words(row, c), score(tile.score.dscore, {row, row}, c),
                              round_up(c.size(), Vec::kLanes));
          }
        }
      });
    });
    for_visible(a, b, g, rows, pack, [&](Range r, Range c, bool) {
      tile_product<Order::Rows, Product>(sums.dq + r.begin * op.ld, op.ld, ds_words(r.begin, c), kKeys / kDepth,
                                         tile.k.across + c.begin / kDepth * op.ld, op.ld, r.size(), op.width,
                                         Op::words(c.size()), true);
    });
    for_same_units(a, g, rows, pack, [&](Range r, u32 units) {
      for_columns(pack, units, [&](Range columns) {
        const bool dense = a.dense(b, r, pack.keys(columns));
        if constexpr (Op::kPairs) {
          const Range inside = {r.begin - rows.begin, r.end - rows.begin};
          join_rows<Product>(tile.score.prob_across, tile.score.prob, kKeys, inside, columns.begin - origin,
                             columns.size());
          join_rows<Product>(tile.score.dscore_across, tile.score.dscore, kKeys, inside, columns.begin - origin,
                             columns.size());
        }
        // Rows are added in pairs: the other row of a pair at the edge has no weight for these keys.
        const auto add = [&](Range seen, Range c) {
          if (seen.empty()) return;
          const Range pairs = {(seen.begin - rows.begin) / kDepth, Op::words(seen.end - rows.begin)};
          const i64 key = pack.key(c.begin), row = pairs.begin;
          const i64 weight = pairs.begin * kKeys + c.begin - origin;
          tile_product<Order::Columns, Product>(sums.dv + key * value.ld, value.ld, tile.score.prob_across + weight,
                                                kKeys, tile.dout.across + row * value.ld, value.ld, c.size(),
                                                value.width, pairs.size(), true);
          tile_product<Order::Columns, Product>(sums.dk + key * op.ld, op.ld, tile.score.dscore_across + weight, kKeys,
                                                tile.q.across + row * op.ld, op.ld, c.size(), op.width, pairs.size(),
                                                true);
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
    const Vec scale = broadcast(op.score_scale);
    const Seen seen = whole ? Seen{columns, {0, 0}} : seen_of(a, b, row, pack, columns);
    if (a.p.dropout <= 0 && !a.has_terms() && !a.heads_differ() && seen.sinks.empty()) {
      for (i64 j = columns.begin; j < columns.end; j += Vec::kLanes) {
        const i64 x = j - columns.begin;
        if (j >= seen.near.end || j + Vec::kLanes <= seen.near.begin) {
          store(prob + x, zero());
          store(dscore + x, zero());
          continue;
        }
        Vec p = exp_weight(scale * load(prob + x) - log_sum), ds = p * (load(dscore + x) - delta);
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
    if (Op::kPairs) scale_row(prob, round_up(columns.size(), Vec::kLanes), op.score_scale);
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
      store_row(dq.as<E>() + a.row_offset(dq, b, g, r), sums.dq + r * op.ld, a.D, broadcast(a.p.scale));
    }
    for (i64 j = keys.begin; j < keys.end; ++j) {
      store_row(dk.as<E>() + a.key_offset(dk, b, g, j), sums.dk + j * op.ld, a.D, broadcast(op.score_scale));
      store_row(dv.as<E>() + a.key_offset(dv, b, g, j), sums.dv + j * value.ld, a.Dv, broadcast(1.0f));
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
        const Sums sums(chunks > 1 ? scratch.shared() + group * floats : arena.take(floats), a, op.ld);
        // In every phase each chunk of rows and each of keys has one tile: the first clears, the last stores.
        if (phase == 0) {
          fill_zero(sums.dq + rows.begin * op.ld, rows.size() * op.ld);
          fill_zero(sums.dk + keys.begin * op.ld, keys.size() * op.ld);
          fill_zero(sums.dv + keys.begin * value.ld, keys.size() * value.ld);
        }
        accumulate(sums, tile, b, g, rows, keys);
        if (phase == chunks - 1) store_sums(sums, b, g, rows, keys);
      });
    }
  }
};

}  // namespace

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype, [&]<class E>(E) {
    Backward<E>{Problem(q, k, v, p), dq, dk, dv, dout, q, k, v, o, lse}.run(*stream.pool);
  });
}

void attention_bwd_scratch(TensorView, TensorView, TensorView, TensorView, TensorView q, TensorView k, TensorView v,
                           TensorView, TensorView, const AttentionParams& p, Stream& stream) noexcept {
  with_work_type(q.dtype,
                 [&]<class E>(E) { note_scratch(stream, Backward<E>::cut_of(Problem(q, k, v, p)).scratch.bytes()); });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
