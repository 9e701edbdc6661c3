// SPDX-License-Identifier: Apache-2.0
#pragma once
// Layout: the one pure function that says which rank owns which element. (parameter rows, ranks, ZeRO stage) -> places.
// The engine, checkpoints and the memory model read it; none computes ownership again. Rajbhandari et al., "ZeRO:
// Memory Optimizations Toward Training Trillion Parameter Models" (SC'20).
//
// A unit (a layer, or the matrix that two layers share) is what is gathered and reduced as one. Its rows lie one after
// the other in one or two segments, each at a multiple of 8 elements; a segment is padded to P * 128 elements and cut
// in P equal slices, slice r owned by rank r (where states are kept in blocks, both are multiples of a block, so that
// no block is cut):
//
//   unit buffer   | persistent rows .... pad | sharded rows ................................ pad |
//   slices        | 0    | 1    | .. | P-1   | 0             | 1             | .. | P-1          |
//
// Only stage 3 has persistent segments (rows of at most stage3_param_persistence_threshold elements: always whole on
// every rank), and tiles: where a layer has more than stage3_tile_size elements, each of its matrices is cut in blocks
// of at most so many, rows of it, and each block is a unit of its own behind those of the layers, so that neither the
// layer nor a matrix is ever there as a whole (Rajbhandari et al., "ZeRO-Infinity", 2021: memory-centric tiling).
// Elsewhere a unit is one segment. Ownership is the same in stages 0 to 2, and does not depend on bucket sizes. Rows of
// a unit that are reduced over other ranks have a layout of their own, with the same numbers of units and parameters: a
// layer has a unit in each layout. A rank may have some of the units only (a pipeline stage): all keep their numbers,
// and are cut as if all were there, so that a unit that stands on two stages is cut alike on both. Shard arrays (fp32
// accumulators, masters, moments) are the owned slices of all segments, one after the other; at stage 0 every rank
// keeps all slices.

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "model/layer.h"

namespace ds::zero {

inline constexpr i64 kSliceAlignment = 128;  // elements: whole SIMD registers, 512-byte direct I/O for fp32

// Elements at which rows begin: 16 bytes in 16 bit, which a GPU's products want of their operands. Which of them is
// chosen, and so the bits of a loss, does not depend on which rows stand before one, nor on how many ranks there are.
inline constexpr i64 kRowAlignment = 8;

// Which states are cut in P shards: the ZeRO table.
struct StageRow {
  bool shard_optimizer;  // fp32 master, moments, accumulators
  bool shard_grads;      // work-dtype gradients exist only in buckets
  bool shard_params;     // parameters are gathered for use
};
inline constexpr StageRow kZero[4] = {
    {false, false, false}, {true, false, false}, {true, true, false}, {true, true, true}};

struct LayoutOptions {
  int num_ranks = 1;
  int stage = 0;
  i64 persistence_threshold = 0;        // stage 3: rows of at most so many elements stay whole
  i64 model_persistence_threshold = 0;  // stage 3: as long as their total does not exceed this
  std::vector<bool> here = {};          // by unit: whether this rank has it; empty: it has all
  i64 block = 1;                        // elements of a row that stay together, from its first one on; a power of two
  i64 tile_elems = 0;                   // stage 3: of larger layers, elements of a tile (8 rows at least); 0: no tiles
  size_t group = 0;                     // rows of other groups (ParamRow::group) are not here

  i64 row_alignment() const noexcept { return std::max(kRowAlignment, block); }
  i64 slice_alignment() const noexcept { return std::max(kSliceAlignment, block); }
};

struct Segment {
  i64 unit = 0;
  bool persistent = false;
  i64 offset = 0;        // in the unit's buffer, elements
  i64 numel = 0;         // up to the end of the last row
  i64 slice = 0;         // elements per rank
  i64 shard_offset = 0;  // of this segment in the shard arrays, elements
};

// Elements [begin, begin + numel) of a parameter's row: all of it, or a tile.
struct RowPlace {
  i64 param = 0;     // number over the whole model
  i64 segment = -1;  // of what is not here
  i64 offset = 0;    // in the segment
  i64 numel = 0;
  i64 begin = 0;
};

// Rows [first, first + rows) of a matrix, in a unit of their own.
struct MatrixTile {
  i64 param = 0, unit = 0;
  i64 first = 0, rows = 0, cols = 0;
};

struct UnitPlace {
  i64 first_param = 0;
  i64 first_segment = 0, num_segments = 0;
  i64 padded = 0;  // elements of the unit's buffer
  i64 numel = 0;
};

// Elements [begin, begin + count) of a flattened row, which may be a slice of the parameter; at shard_offset of the
// owner's shard arrays.
struct Piece {
  i64 param = 0, begin = 0, count = 0;
  i64 segment = 0;
  i64 segment_offset = 0;  // where the piece starts in its segment
  i64 shard_offset = 0;
  // Its elements [first, first + n).
  Piece part(i64 first, i64 n) const noexcept {
    return {param, begin + first, n, segment, segment_offset + first, shard_offset + first};
  }
};

// Elements of a block of what travels in codes (ZeRO++).
inline constexpr i64 kCodeBlock = 256;

class Layout {
 public:
  // units[u] = the rows of unit u, in the order of the model; perhaps none. Units of tiles follow.
  static Layout make(std::span<const std::span<const model::ParamRow>> units, const LayoutOptions& options);

  const LayoutOptions& options() const noexcept { return options_; }
  int num_ranks() const noexcept { return options_.num_ranks; }
  StageRow states() const noexcept { return kZero[options_.stage]; }
  std::span<const UnitPlace> units() const noexcept { return units_; }
  std::span<const Segment> segments() const noexcept { return segments_; }
  std::span<const Segment> segments_of(i64 unit) const noexcept {
    const UnitPlace& u = units_[unit];
    return std::span(segments_).subspan(u.first_segment, u.num_segments);
  }
  // Indexed by param number; of a row in tiles the first one.
  std::span<const RowPlace> rows() const noexcept { return rows_; }
  // All of them, in the order of parameters.
  std::span<const RowPlace> places() const noexcept { return places_; }
  // In the order of parameters, and of the rows of each.
  std::span<const MatrixTile> tiles() const noexcept { return tiles_; }
  std::span<const MatrixTile> tiles_of(i64 param) const noexcept;
  bool is_tile(i64 unit) const noexcept { return unit >= num_units_; }
  i64 num_params() const noexcept { return num_elements_; }  // elements here, without padding

  // Elements of the shard arrays of one rank: all slices at stage 0, else one slice of every segment.
  i64 shard_elems() const noexcept { return shard_elems_; }
  i64 largest_slice() const noexcept {
    i64 most = 0;
    for (const Segment& s : segments_) most = std::max(most, s.slice);
    return most;
  }
  // What this rank's shard arrays hold of a segment: elements [first, first + count) of the segment.
  struct Range {
    i64 first, count;
  };
  Range held(const Segment& s, int rank) const noexcept {
    if (!states().shard_optimizer) return {0, s.slice * num_ranks()};
    return {s.slice * rank, s.slice};
  }
  // Between the rows of a unit, in its buffer, the padding of its segments left out: where a row's length is no
  // multiple of what rows begin at, or it has room for a longer one.
  std::vector<Range> gaps_of(i64 unit) const;
  // The pieces of parameters in slice `rank` of every segment (padding left out). Every element of every parameter is
  // in exactly one piece of one rank.
  std::vector<Piece> owned_pieces(int rank) const;
  // All pieces, cut nowhere; their shard_offset means nothing.
  std::vector<Piece> whole_pieces() const { return pieces(0, true); }
  // The pieces that this rank's shard arrays hold: all of them at stage 0, else the owned ones.
  std::vector<Piece> held_pieces(int rank) const;

  // Names this layout in checkpoints, e.g. "unit-slices/v3 ranks=4 stage=3 align=128"; behind it " tile=65536".
  std::string id() const;

 private:
  std::vector<Piece> pieces(int rank, bool whole) const;
  LayoutOptions options_;
  std::vector<UnitPlace> units_;
  std::vector<Segment> segments_;
  std::vector<RowPlace> rows_, places_;
  std::vector<MatrixTile> tiles_;
  i64 shard_elems_ = 0, num_elements_ = 0, num_units_ = 0;  // num_units_: before those of tiles
};

}  // namespace ds::zero
