// SPDX-License-Identifier: Apache-2.0
#pragma once
// Layout: the one pure function that decides which rank owns which element: (parameter rows, ranks, ZeRO stage) ->
// places. The engine, checkpoints and the memory model read it; none of them computes ownership again. Rajbhandari et
// al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC'20).
//
// A unit (a layer, or the matrix that two layers share) is gathered and reduced as one. Its rows lie one after the
// other in one or two segments, each row at a multiple of 8 elements, in their order but for rows that lie directly
// after an earlier one (ParamRow::after); a segment is padded to a multiple of P * 128 elements and cut into P equal
// slices; rank r owns slice r. If states are stored in blocks, both alignments are
// multiples of a block, so that no block is cut:
//
//   unit buffer   | persistent rows .... pad | sharded rows ................................ pad |
//   slices        | 0    | 1    | .. | P-1   | 0             | 1             | .. | P-1          |
//
// Only stage 3 has persistent segments (rows of at most stage3_param_persistence_threshold elements, which are always
// whole on every rank; rows that lie directly after each other count as one), and tiles: if a layer has more than
// stage3_tile_size elements, each of its matrices is cut into blocks of rows of at most so many elements, and each
// block is a unit of its own, numbered after those of the layers, so that neither the layer nor a matrix is ever whole
// in memory (Rajbhandari et al., "ZeRO-Infinity", 2021: memory-centric tiling). At other stages a unit is one segment.
// Matrices that are gathered as codes of FP8 products have a segment of their own, too, after the other sharded rows.
// Rows that are not trained have segments of their own, after the trained ones of their unit, one for each form in
// which they are stored, and tiles that are numbered after all trained ones: a layout of gradients is the same without
// them. Ownership is the same at stages 0 to 2, and does not depend on bucket sizes. Rows of a unit that are reduced
// over other ranks have a layout of their own, with the same numbers of units and parameters: a layer has a unit in
// each layout. A rank may hold only some of the units (a pipeline stage): all units keep their numbers, and are cut as
// if all were there, so that a unit on two stages is cut alike on both. Shard arrays (fp32 sums, masters, moments) are
// the owned slices of all trained segments, one after the other; at stage 0 every rank keeps all slices.

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "ds/layer.h"

namespace ds::zero {

inline constexpr i64 kSliceAlignment = 128;  // elements: whole SIMD registers, 512-byte direct I/O for fp32

// Rows begin at multiples of so many elements: 16 bytes in 16 bits, as a GPU's products need for their operands. So the
// choice of a product's kernel, and the bits of a loss, depend neither on the rows before one nor on the number of
// ranks.
inline constexpr i64 kRowAlignment = 8;

// The ZeRO table: which states are cut into P shards.
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
  i64 block = 1;                        // elements of a row that are never cut, from its first one on; a power of two
  i64 tile_elems = 0;                   // stage 3: most elements of a tile (but 8 rows at least); 0: no tiles
  size_t group = 0;                     // only rows of this group (ParamRow::group) have places
  bool of_gradients = false;            // only rows that are trained have places
  bool fp8 = false;                     // stage 3: matrices of FP8 products are gathered as their codes
  i64 page = 1;                         // slices are multiples of so many elements; a power of two
  // Bytes of an element. Slices of one rank may have matrices of codes, which take the place of as many elements as
  // have their bytes, and follow each other without gaps.
  i64 width = 0;

  i64 row_alignment() const noexcept { return std::max(kRowAlignment, block); }
  i64 elems_of(const model::ParamRow& row) const noexcept {
    return row.codes && kZero[stage].shard_params ? row.view(DType::F32, nullptr).bytes() / width : row.numel();
  }
  i64 slice_alignment() const noexcept { return std::max({kSliceAlignment, block, page}); }
};

struct Segment {
  i64 unit = 0;
  bool persistent = false;
  bool trained = true;
  model::Storage storage = model::Storage::Work;
  bool fp8 = false;      // gathered as codes
  i64 offset = 0;        // in the unit's buffer, elements
  i64 numel = 0;         // up to the end of the last row
  i64 slice = 0;         // elements per rank
  i64 shard_offset = 0;  // of this segment in the shard arrays, elements; after their end if it is not trained
};

// Elements [begin, begin + numel) of a parameter's row: all of it, or a tile.
struct RowPlace {
  i64 param = 0;     // number over the whole model
  i64 segment = -1;  // of what is not here
  i64 offset = 0;    // in the segment
  i64 numel = 0;
  i64 begin = 0;
};

// Rows [first, first + rows) of a matrix, or of a batch of matrices one below the other, in a unit of their own.
struct MatrixTile {
  i64 param = 0, unit = 0;
  i64 first = 0, rows = 0, cols = 0;
  bool trained = true;
  model::Storage storage = model::Storage::Work;
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

// Elements of a block of codes that are sent (ZeRO++).
inline constexpr i64 kCodeBlock = 256;
static_assert(kCodeBlock <= model::kRowBlock && kRowAlignment <= model::kRowBlock);

class Layout {
 public:
  // units[u]: the rows of unit u, in the order of the model; perhaps none. Units of tiles follow.
  using Units = std::span<const std::span<const model::ParamRow>>;
  static Layout make(Units units, const LayoutOptions& options);

  const LayoutOptions& options() const noexcept { return options_; }
  int num_ranks() const noexcept { return options_.num_ranks; }
  StageRow states() const noexcept { return kZero[options_.stage]; }
  std::span<const UnitPlace> units() const noexcept { return units_; }
  std::span<const Segment> segments() const noexcept { return segments_; }
  std::span<const Segment> segments_of(i64 unit) const noexcept {
    const UnitPlace& u = units_[unit];
    return std::span(segments_).subspan(u.first_segment, u.num_segments);
  }
  // By number of the parameter; for a row in tiles, its first tile.
  std::span<const RowPlace> rows() const noexcept { return rows_; }
  // All of them, in the order of parameters.
  std::span<const RowPlace> places() const noexcept { return places_; }
  // In the order of parameters, and of the rows of each.
  std::span<const MatrixTile> tiles() const noexcept { return tiles_; }
  std::span<const MatrixTile> tiles_of(i64 param) const noexcept;
  bool is_tile(i64 unit) const noexcept { return unit >= num_units_; }
  // Whether a run that does not train packs a parameter here, whose row this is (ParamRow::packs): if a rank stores the
  // whole matrix in the work dtype or as codes, and no product in FP8 encodes it.
  bool packs(i64 param, const model::ParamRow& row) const noexcept;
  i64 num_params() const noexcept { return num_elements_; }  // elements here, without padding

  // Elements of the shard arrays of one rank: all slices at stage 0, else one slice of every trained segment.
  i64 shard_elems() const noexcept { return shard_elems_; }
  bool is_trained(const Piece& piece) const noexcept { return segments_[piece.segment].trained; }
  i64 largest_slice() const noexcept {
    i64 most = 0;
    for (const Segment& s : segments_) most = std::max(most, s.slice);
    return most;
  }
  // The elements [first, first + count) of a segment that a rank's shard arrays hold.
  struct Range {
    i64 first, count;
  };
  Range held(const Segment& s, int rank) const noexcept {
    if (!states().shard_optimizer) return {0, s.slice * num_ranks()};
    return {s.slice * rank, s.slice};
  }
  // The gaps between the rows of a unit, in its buffer, without the padding of segments: after a row whose length is no
  // multiple of the alignment, or that has room for a longer row.
  std::vector<Range> gaps_of(i64 unit) const;
  // The pieces of parameters in slice `rank` of every segment, without padding. Every element of every parameter is in
  // exactly one piece of one rank.
  std::vector<Piece> owned_pieces(int rank) const;
  // Whole rows (or tiles) as pieces; their shard_offset is undefined.
  std::vector<Piece> whole_pieces() const { return pieces(0, true); }
  // The pieces that a rank's shard arrays hold: all of them at stage 0, else the owned ones.
  std::vector<Piece> held_pieces(int rank) const;

  // The name of this layout in checkpoints, e.g. "unit-slices/v3 ranks=4 stage=3 align=128"; with tiles, " tile=65536"
  // follows, with segments of codes " fp8", with rows that are not trained " frozen=" and a hash of which they are and
  // how they are stored, and with rows that lie in another order than the model's " moved=" and a hash of the order.
  std::string id() const;

 private:
  enum class Kept : u8;
  static std::vector<std::vector<Kept>> kept_rows(Units units, const LayoutOptions& options);
  void add_rows(std::span<const model::ParamRow> rows, std::span<const Kept> kept);
  void add_segment(std::span<const model::ParamRow> rows, std::span<const Kept> kept, Kept want, bool of_trained,
                   model::Storage storage = model::Storage::Work);
  void add_unit_of(MatrixTile& tile);
  void place_shards();
  std::vector<Piece> pieces(int rank, bool whole) const;
  LayoutOptions options_;
  std::vector<UnitPlace> units_;
  std::vector<Segment> segments_;
  std::vector<RowPlace> rows_, places_;
  std::vector<MatrixTile> tiles_;
  i64 shard_elems_ = 0, num_elements_ = 0, num_units_ = 0;  // num_units_: before those of tiles
  std::string frozen_, moved_;  // the parts of id() about rows that are not trained, and that lie after others
};

}  // namespace ds::zero
