// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which rows of an attention see which keys, tile by tile: masks by position, documents, sinks, and layouts of blocks.
//
// All query heads of one key/value head are rows of one problem, row r = query r / R of head g*R + r % R with R = H /
// G: a key block is converted once for the whole group, and the keys that a row sees are monotonic in r. With a
// block-sparse layout a tile contains only the blocks of keys that its rows attend to, side by side: columns of a tile
// are keys of blocks in ascending order (Pack). If all blocks are present, tiles and bits are those without a layout.

#include <array>
#include <bit>

#include "cpu/isa/tiling.h"
#include "cpu/philox.h"
#include "ds/kernels/ops.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

constexpr i64 kUnit = 64;            // maximum number of keys in a unit of a layout
constexpr i64 kMaxUnits = 256 / 16;  // of a tile

struct Problem {
  i64 B, T, H, D, S, G, R;
  i64 Dv;      // head dim of values
  bool coded;  // keys and values are 8-bit codes
  AttentionParams p;
  AttentionGrid grid;

  Problem(const TensorView& q, const TensorView& k, const TensorView& v, const AttentionParams& params) noexcept
      : B(q.dim(0)),
        T(q.dim(1)),
        H(q.dim(2)),
        D(q.dim(3)),
        S(k.dim(1)),
        G(k.dim(2)),
        R(H / G),
        Dv(v.dim(3)),
        coded(k.dtype == DType::I8),
        p(params),
        grid(params.grid.of(H, T, S)) {}

  i64 rows() const noexcept { return T * R; }
  // Begin and end of the document at a query's or key's position, in queries and keys of the call.
  i64 document_begin(i64 b, i64 place) const noexcept { return p.documents[b * p.positions + place]; }
  i64 document_end(i64 b, i64 place) const noexcept { return p.documents[(B + b) * p.positions + place]; }
  // The query of a row, and its head in the group. Most groups have one head, and divisions are slow.
  i64 query_of(i64 row) const noexcept { return R == 1 ? row : row / R; }
  i64 head_of(i64 row) const noexcept { return R == 1 ? 0 : row % R; }
  i64 query_place(i64 row) const noexcept { return p.grid.row0 + query_of(row); }

  // The keys that row r sees, and those that any of a range of rows sees, without sinks.
  Range keys_of(i64 b, i64 row) const noexcept { return keys_of(b, Range{row, row + 1}); }
  [[gnu::always_inline]] Range keys_of(i64 b, Range rows) const noexcept {
    if (rows.empty()) return {0, 0};
    const i64 first = query_of(rows.begin) + S - T, last = query_of(rows.end - 1) + S - T;
    Range seen = {p.window > 0 ? std::max<i64>(0, first - p.window + 1) : 0, p.causal ? std::min(S, last + 1) : S};
    if (p.documents == nullptr) return seen;
    return intersect(seen, {document_begin(b, query_place(rows.begin)) - p.grid.col0,
                            document_end(b, query_place(rows.end - 1)) - p.grid.col0});
  }
  bool has_sinks() const noexcept { return p.sinks > 0 && p.window > 0; }
  // The sinks that a row sees, and those that any of a range of rows sees, including gaps.
  Range sinks_of(i64 b, i64 row) const noexcept { return sinks_of(b, Range{row, row + 1}); }
  Range sinks_of(i64 b, Range rows) const noexcept {
    if (!has_sinks() || rows.empty()) return {0, 0};
    const i64 last = query_of(rows.end - 1) + S - T;
    i64 end = p.causal ? std::min(S, last + 1) : S;
    if (p.documents != nullptr) end = std::min(end, document_end(b, query_place(rows.end - 1)) - p.grid.col0);
    const auto begin = [&](i64 row) {
      return (p.documents != nullptr ? document_begin(b, query_place(row)) : 0) - p.grid.col0;
    };
    return intersect({begin(rows.begin), begin(rows.end - 1) + p.sinks}, {0, end});
  }
  // True if every row of a range sees every key of a range.
  bool dense(i64 b, Range rows, Range keys) const noexcept {
    return keys_of(b, rows.end - 1).begin <= keys.begin && keys_of(b, rows.begin).end >= keys.end;
  }
  // The rows that see any of a range of keys, including gaps.
  Range rows_of(i64 b, Range keys) const noexcept {
    const i64 before = S - T, first_key = p.grid.col0 + keys.begin, last_key = p.grid.col0 + keys.end - 1;
    Range seen = {p.causal ? std::max<i64>(0, keys.begin - before) : 0, T};
    if (p.window > 0) {
      // The first key is a sink, or a document with its own sinks begins among the keys.
      const i64 document = p.documents != nullptr ? document_begin(b, last_key) : 0;
      const bool sink = has_sinks() && first_key < document + p.sinks;
      if (!sink) seen.end = std::min(T, keys.end - 1 + p.window - before);
    }
    if (p.documents != nullptr) {
      seen = intersect(seen, {document_begin(b, first_key) - p.grid.row0, document_end(b, last_key) - p.grid.row0});
    }
    return {seen.begin * R, seen.end * R};
  }
  // Offsets of row r of (b, g) in a [B,T,H,D] view, and of key j in a [B,S,G,D] view.
  i64 row_offset(const TensorView& x, i64 b, i64 g, i64 row) const noexcept {
    return b * x.stride[0] + query_of(row) * x.stride[1] + (g * R + head_of(row)) * x.stride[2];
  }
  i64 key_offset(const TensorView& x, i64 b, i64 g, i64 key) const noexcept {
    return b * x.stride[0] + p.key_row(key) * x.stride[1] + g * x.stride[2];
  }
  // Offset of the statistics of row r in a [B,H,T] view.
  i64 lse_offset(const TensorView& lse, i64 b, i64 g, i64 row) const noexcept {
    return b * lse.stride[0] + (g * R + head_of(row)) * lse.stride[1] + query_of(row);
  }
  u64 element(i64 b, i64 g, i64 row, i64 key) const noexcept {
    return static_cast<u64>(grid.row(b, g * R + head_of(row), query_of(row)) + key);
  }

  // True if a score is more than a scaled product.
  bool has_terms() const noexcept { return p.softcap > 0 || p.bias != nullptr; }
  // True with a layout. A tile then takes its keys in units: blocks, or parts of them.
  bool sparse() const noexcept { return p.blocks.sparse(); }
  i64 unit() const noexcept { return std::min(p.blocks.block, kUnit); }
  bool heads_differ() const noexcept { return sparse() && p.blocks.layouts != 1 && R > 1; }
  i64 query_block(i64 row) const noexcept { return query_place(row) / p.blocks.block; }
  i64 key_block(i64 key) const noexcept { return (p.grid.col0 + key) / p.blocks.block; }
  // The end of the rows in the same block of queries as this row.
  i64 block_end(i64 row) const noexcept { return ((query_block(row) + 1) * p.blocks.block - p.grid.row0) * R; }
  // Word `word` of the bits of a block of queries: for one head of group g, and for any of its heads.
  u64 bits(i64 g, i64 head, i64 query, i64 word) const noexcept {
    return p.blocks.keys_of(p.grid.head0 + g * R + head, query)[word];
  }
  u64 bits(i64 g, i64 query, i64 word) const noexcept {
    u64 any = bits(g, 0, query, word);
    for (i64 head = 1; heads_differ() && head < R; ++head) any |= bits(g, head, query, word);
    return any;
  }
};

// The keys of a tile, as its columns: adjacent in the sequence, or in units of a layout, each of which is contiguous.
struct Pack {
  Range columns;                          // of a tile, or of a part of it
  i64 unit = 0;                           // columns per unit, except the last, which may have fewer; 0: a single unit
  std::array<i64, kMaxUnits> first = {};  // the key of each unit's first column

  i64 size() const noexcept { return columns.size(); }
  i64 unit_of(i64 column) const noexcept { return unit == 0 ? 0 : column / unit; }
  i64 key(i64 column) const noexcept { return unit == 0 ? first[0] + column : first[column / unit] + column % unit; }
  Range keys(Range c) const noexcept { return {key(c.begin), key(c.end - 1) + 1}; }  // including gaps
  // The columns among `some` whose keys are in a range.
  Range columns_of(Range keys, Range some) const noexcept {
    if (unit == 0) return intersect({keys.begin - first[0], keys.end - first[0]}, some);
    const auto before = [&](i64 key) {
      i64 column = some.begin / unit * unit;
      while (column < some.end && first[column / unit] + unit <= key) column += unit;
      if (column < some.end) column += std::max<i64>(0, key - first[column / unit]);
      return std::clamp(column, some.begin, some.end);
    };
    return {before(keys.begin), before(keys.end)};
  }
  Pack part(Range c) const noexcept {
    Pack some = *this;
    some.columns = c;
    return some;
  }
  // Calls f(columns) for the parts of a range of columns that belong to one unit, whose keys are adjacent.
  template <class F>
  void for_units(Range c, F&& f) const noexcept {
    if (unit == 0) return f(c);
    for (Range run = c; run.begin < c.end; run.begin = run.end) {
      run.end = std::min(c.end, (run.begin / unit + 1) * unit);
      f(run);
    }
  }
};

// Iterates over the keys that a range of rows attends to, starting where a tile may: tile after tile of `room` keys.
class Met {
 public:
  Met(const Problem& a, i64 b, i64 g, Range rows, Range keys, i64 room) noexcept
      : a_(a), b_(b), g_(g), room_(room), rows_(rows) {
    Range seen = intersect(keys, a.keys_of(b, rows));
    if (const Range sinks = intersect(keys, a.sinks_of(b, rows)); !sinks.empty())
      seen = seen.empty() ? sinks : Range{std::min(seen.begin, sinks.begin), std::max(seen.end, sinks.end)};
    if (seen.empty()) return;
    next_ = keys.begin + (seen.begin - keys.begin) / room * room;
    end_ = seen.end;
    limit_ = keys.end;
    if (a.sparse()) queries_ = {a.query_block(rows.begin), a.query_block(rows.end - 1) + 1};
  }
  bool next(Pack& pack) noexcept {
    if (!a_.sparse()) {
      while (next_ < end_ && nobody_sees({next_, std::min(limit_, next_ + room_)})) next_ += room_;
      if (next_ >= end_) return false;
      pack = {.columns = {0, std::min(limit_ - next_, room_)}, .first = {next_}};
      next_ += room_;
      return true;
    }
    pack.columns = {0, 0};
    pack.unit = a_.unit();
    while (next_ < end_ && pack.columns.end < room_) {
      const i64 block = a_.key_block(next_), ahead = blocks_to_next(block);
      if (ahead > 0) {
        next_ = (block + ahead) * a_.p.blocks.block - a_.p.grid.col0;
        continue;
      }
      const Range keys = {next_, std::min(limit_, next_ + pack.unit)};
      next_ += pack.unit;
      if (nobody_sees(keys)) continue;
      pack.first[pack.columns.end / pack.unit] = keys.begin;
      pack.columns.end += keys.size();
    }
    return !pack.columns.empty();
  }

 private:
  // True for keys between sinks and windows, or between documents' sinks.
  bool nobody_sees(Range keys) const noexcept {
    return a_.has_sinks() && intersect(rows_, a_.rows_of(b_, keys)).empty();
  }
  // 0 if a block is present; else the number of blocks to skip.
  i64 blocks_to_next(i64 block) noexcept {
    if (block / 64 != word_) {
      word_ = block / 64;
      bits_ = 0;
      for (i64 query = queries_.begin; query < queries_.end; ++query) bits_ |= a_.bits(g_, query, word_);
    }
    const u64 rest = bits_ >> (block % 64);
    return rest == 0 ? 64 - block % 64 : std::countr_zero(rest);
  }

  const Problem& a_;
  i64 b_, g_, room_;
  Range rows_;
  i64 next_ = 0, end_ = 0, limit_ = 0;
  Range queries_ = {0, 0};
  i64 word_ = -1;
  u64 bits_ = 0;
};

// Calls f(rows, units) for rows that attend to the same units of a tile; without a layout, once for all rows.
template <class F>
void for_same_units(const Problem& a, i64 g, Range rows, const Pack& pack, F&& f) noexcept {
  if (!a.sparse()) return f(rows, u32{1});
  const i64 first = pack.unit_of(pack.columns.begin), last = pack.unit_of(pack.columns.end - 1);
  const auto units_of = [&](i64 row) {
    const i64 query = a.query_block(row);
    u32 units = 0;
    for (i64 u = first; u <= last; ++u) {
      const i64 block = a.key_block(pack.first[u]);
      units |= static_cast<u32>(a.bits(g, query, block / 64) >> (block % 64) & 1) << u;
    }
    return units;
  };
  Range same = {rows.begin, rows.begin};
  u32 units = 0;
  while (same.end < rows.end) {
    const u32 more = units_of(same.end);
    if (more != units && !same.empty()) {
      if (units != 0) f(same, units);
      same.begin = same.end;
    }
    units = more;
    same.end = std::min(rows.end, a.block_end(same.end));
  }
  if (units != 0) f(same, units);
}

// Calls f(columns) for the adjacent columns of the units in a set.
template <class F>
void for_columns(const Pack& pack, u32 units, F&& f) noexcept {
  if (pack.unit == 0) return f(pack.columns);
  while (units != 0) {
    const int begin = std::countr_zero(units), end = begin + std::countr_one(units >> begin);
    f(intersect(pack.columns, {begin * pack.unit, end * pack.unit}));
    units = end < 32 ? units >> end << end : 0;
  }
}

// Sets the columns of a tile to which head `head` of a group does not attend to `value`, if its heads have their own
// layouts.
inline void hide_others(float* row, const Problem& a, i64 g, i64 at, const Pack& pack, Range columns,
                        float value) noexcept {
  pack.for_units(columns, [&](Range c) {
    const i64 block = a.key_block(pack.key(c.begin));
    if ((a.bits(g, a.head_of(at), a.query_block(at), block / 64) >> (block % 64) & 1) == 0) {
      std::fill_n(row + c.begin - columns.begin, c.size(), value);
    }
  });
}

// Calls f(columns) for the columns of a run that any of a range of rows sees; their begin is rounded down to whole
// vectors.
template <class F>
void for_seen(const Problem& a, i64 b, Range rows, const Pack& pack, Range run, F&& f) noexcept {
  const auto whole = [&](Range c) {
    c.begin -= (c.begin - run.begin) % Vec::kLanes;
    return c;
  };
  Range seen = pack.columns_of(a.keys_of(b, rows), run);
  if (const Range sinks = pack.columns_of(a.sinks_of(b, rows), run); !sinks.empty()) {
    if (seen.empty() || whole(seen).begin > sinks.end) {
      f(whole(sinks));
    } else {
      seen = {std::min(seen.begin, sinks.begin), std::max(seen.end, sinks.end)};
    }
  }
  if (!seen.empty()) f(whole(seen));
}

// Calls f for the visible part of a block of scores: f(rows, columns, true) once if it is dense, else f(strip, columns,
// false) for each strip of rows with the columns that any row of it sees, whose begin is rounded down to whole vectors.
template <class F>
void for_visible(const Problem& a, i64 b, i64 g, Range rows, const Pack& pack, F&& f) noexcept {
  for_same_units(a, g, rows, pack, [&](Range same, u32 units) {
    for_columns(pack, units, [&](Range c) {
      if (a.dense(b, same, pack.keys(c))) return f(same, c, true);
      for (i64 r = same.begin; r < same.end; r += kStrip) {
        const Range strip = {r, std::min(same.end, r + kStrip)};
        for_seen(a, b, strip, pack, c, [&](Range seen) { f(strip, seen, false); });
      }
    });
  });
}

// The columns that a row sees: two ranges; the second, of sinks, may be empty.
struct Seen {
  Range near, sinks;
  Seen minus(i64 n) const noexcept { return {{near.begin - n, near.end - n}, {sinks.begin - n, sinks.end - n}}; }
};

[[gnu::always_inline]] inline Seen seen_of(const Problem& a, i64 b, i64 row, const Pack& pack, Range columns) noexcept {
  return {pack.columns_of(a.keys_of(b, row), columns),
          a.has_sinks() ? pack.columns_of(a.sinks_of(b, row), columns) : Range{0, 0}};
}

// The factors of dropout for a row's probabilities in some columns: calls f(columns, factors) for each run of keys.
template <class F>
void for_factors(float* buffer, const Problem& a, i64 b, i64 g, i64 row, const Pack& pack, Range columns,
                 F&& f) noexcept {
  pack.for_units(columns, [&](Range c) {
    f(c, keep_factors(buffer, a.p.rng, a.p.dropout, a.element(b, g, row, pack.key(c.begin)), c.size()));
  });
}

}  // namespace ds::cpu::DS_ISA_NAMESPACE
