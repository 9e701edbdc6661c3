// SPDX-License-Identifier: Apache-2.0
#pragma once
// Attention in which a query's bits depend on its own sequence alone (AttentionParams::rowwise).
//
// Keys come in parts of kPartKeys, counted from the first key of the sequence. Each part has a maximum, a sum and
// results of its own, and parts are merged in ascending order. A block computes all parts of its rows one after the
// other, or, where a call has few rows for its keys, one part of them (Dao et al., "Flash-Decoding", 2023), and another
// kernel merges the parts by the same operations. Steps are whole (Layout::aligned), so that the place of a key in its
// step does not depend on the rows of the tile.
//
// Row r of a tile is head r % pack of query r / pack: the queries of a single head, or those of all heads of a group,
// so that decoding reads keys once for a group.

#include "cuda/attention_steps.h"

namespace ds::cuda::attention {

// The sums of a row over the parts so far.
struct RowTotal {
  float top = -kInfinity, sum = 0;
};
struct PartWeights {
  float before, part;
};
// Adds a part that has keys (its sum is not 0), and returns the factors of the results so far and of its own; those so
// far are not used if there are none.
DS_DEVICE PartWeights add_part(RowTotal& total, const RowTotal& part) {
  const float top = fmaxf(total.top, part.top);
  const PartWeights weights = {fast_exp2(total.top - top), fast_exp2(part.top - top)};
  total.sum = total.sum == 0 ? part.sum : fmaf(total.sum, weights.before, part.sum * weights.part);
  total.top = top;
  return weights;
}
DS_DEVICE float merged(float before, float part, const PartWeights& weights) {
  return fmaf(before, weights.before, part * weights.part);
}
// The factor of a row's results at the end.
template <class E>
DS_DEVICE float share_of(float factor, float sum) {
  if constexpr (std::is_same_v<E, float>) return factor / sum;
  return factor * fast_rcp(sum);
}
DS_DEVICE float log_sum_exp(const RowTotal& total) {
  return total.sum == 0 ? kInfinity : (total.top + fast_log2(total.sum)) * kLn2;
}

// Rows of a tile in a view [B, tokens, heads, D].
template <class E>
struct PackedRows {
  E* data;
  i64 token, head;
  int pack;
  bool whole_chunks;

  DS_DEVICE E* at(int row) const {
    const int query = row / pack;
    return data + query * token + (row - query * pack) * head;
  }
};

// Keys or values of one head as codes: a code times the scale of its row is an element.
struct CodedHead {
  const std::int8_t* codes;
  const float* scales;
  i64 token, next_scale;
  bool whole_chunks;  // eight codes can be read at a time

  // Eight elements of a row from column d on; zeros from column D on.
  DS_DEVICE void read(float (&x)[8], i64 row, int d, int D) const {
    const float scale = scales[row * next_scale];
    const std::int8_t* const from = codes + row * token + d;
    if (whole_chunks && d + 8 <= D) {
      const uint2 raw = *reinterpret_cast<const uint2*>(from);
      DS_UNROLL
      for (int e = 0; e < 8; ++e) {
        const u32 byte = (e < 4 ? raw.x : raw.y) >> (e % 4 * 8) & 0xFFu;
        x[e] = static_cast<float>(static_cast<std::int8_t>(byte)) * scale;
      }
      return;
    }
    DS_UNROLL
    for (int e = 0; e < 8; ++e) x[e] = d + e < D ? static_cast<float>(from[e]) * scale : 0.0f;
  }
};

// The tile of a block: some rows of one sequence, and all of its keys or one part of them.
template <class E, int kOwn>
struct RowTile {
  const ForwardArgs<E>& a;
  int b, head;      // sample; first head of the call that has rows here
  int query0 = 0;   // the first query of the sequence, in the call
  int first, rows;  // the first row of the tile; rows of the sequence
  int part = 0;     // with RowCall::split
  int shift = 0;    // of distances from queries to keys, from those of the call's terms
  Mask mask;
  Places places;
  Layout layout;

  DS_DEVICE explicit RowTile(const ForwardArgs<E>& args)
      : a(args), mask(args.problem.mask), places(args.problem.places), layout(args.layout) {
    const RowCall& c = a.rows;
    unsigned index = block_index().x;
    if (c.split) {
      part = static_cast<int>(index % static_cast<unsigned>(c.parts));
      index /= static_cast<unsigned>(c.parts);
    }
    const int packs = a.problem.H / c.pack;
    const Work work = work_of(index, c.tiles, a.problem.B * packs, mask.causal);
    b = work.head / packs;
    head = work.head % packs * c.pack;
    int tile = work.tile;
    if (const AttentionSequences& all = c.sequences; all.count != 0) {
      // The tiles of sequence s are numbers begins[s] * pack / kOwn + s and up, which are always enough.
      const auto first_tile = [&](i64 s) { return static_cast<int>(all.begins[s] * c.pack / kOwn + s); };
      i64 s = 0;
      for (i64 end = all.count; end - s > 1;) {
        const i64 middle = (s + end) / 2;
        (first_tile(middle) <= tile ? s : end) = middle;
      }
      tile -= first_tile(s);
      query0 = all.begins[s];
      mask.T = all.begins[s + 1] - query0;
      mask.S = all.keys[s];
      shift = places.query0 - (mask.S - mask.T);
      places.query0 = mask.S - mask.T;
      if (layout.bits != nullptr) layout.own0 = places.query0;
      layout.pages += all.tables[s] * all.stride;
    }
    first = tile * kOwn;
    rows = mask.T * c.pack;
  }
  DS_DEVICE bool empty() const { return first >= rows || (part > 0 && part * kPartKeys >= mask.S); }

  DS_DEVICE int query(int row) const { return row / a.rows.pack; }
  // The queries of some rows that exist.
  DS_DEVICE Range queries(Range some) const {
    some = intersect(some, {0, rows});
    return some.empty() ? Range{} : Range{query(some.begin), query(some.end - 1) + 1};
  }
  DS_DEVICE Seen keys(Seen seen) const {
    if (a.rows.split) seen.all = intersect(seen.all, {part * kPartKeys, (part + 1) * kPartKeys});
    return seen;
  }

  template <class X>
  DS_DEVICE PackedRows<X> in(const Heads<X>& x) const {
    return {x.data + b * x.batch + query0 * x.token + head * x.head, x.token, x.head, a.rows.pack, x.whole_chunks};
  }
  DS_DEVICE float* lse(int row) const {
    const int q = query(row);
    return a.lse(b, head + row - q * a.rows.pack) + query0 + q;
  }
  // The memory of a row's sums, in a part of them.
  DS_DEVICE float* sums(int row, int in_part) const {
    const int q = query(row);
    const i64 number = (i64{b} * a.problem.mask.T + query0 + q) * a.problem.H + head + row - q * a.rows.pack;
    return a.rows.sums_of(number, in_part, a.problem.Dv);
  }
  DS_DEVICE CodedHead coded(const Heads<const E>& x, const float* scales, int D) const {
    const i64 at = b * x.batch + head / a.problem.R * x.head;
    return {reinterpret_cast<const std::int8_t*>(x.data) + at, scales + at / D, x.token, x.token / D, x.whole_chunks};
  }
};

// The tiles of kOwn rows of each head, or group, of a sample, at most; and a block for each, or for each of its parts.
template <class E>
int row_tiles(const ForwardArgs<E>& a, i64 own) noexcept {
  const i64 rows = i64{a.problem.mask.T} * a.rows.pack, sequences = a.rows.sequences.count;
  return static_cast<int>(sequences != 0 ? rows / own + sequences : num_tiles(rows, own));
}
template <class E>
dim3 row_grid(const ForwardArgs<E>& a) noexcept {
  return grid_of(i64{a.rows.tiles} * (a.rows.split ? a.rows.parts : 1), i64{a.problem.B} * a.problem.H / a.rows.pack);
}

}  // namespace ds::cuda::attention
