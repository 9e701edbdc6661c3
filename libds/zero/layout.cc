// SPDX-License-Identifier: Apache-2.0
#include "zero/layout.h"

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace ds::zero {
namespace {

// Rows of a matrix in each tile but the last one. Tiles begin at the alignment that a GPU's products need, and cut no
// block.
i64 rows_of_tile(i64 rows, i64 cols, const LayoutOptions& options) {
  i64 step = kRowAlignment;
  while (step * cols % options.block != 0) step *= 2;
  const i64 most = std::max(options.tile_elems / cols / step, i64{1}) * step;
  return align_up(div_ceil(rows, div_ceil(rows, most)), step);
}

// By number of the parameter, as bytes.
std::string trained_rows(std::span<const std::span<const model::ParamRow>> units) {
  std::string trained;
  for (const auto& unit : units) {
    for (const model::ParamRow& row : unit) trained.push_back(row.trained ? 1 : 0);
  }
  return trained;
}

}  // namespace

Layout Layout::make(std::span<const std::span<const model::ParamRow>> units, const LayoutOptions& options) {
  DS_ASSERT(options.num_ranks >= 1 && options.stage >= 0 && options.stage <= 3);
  Layout layout;
  layout.options_ = options;
  layout.num_units_ = std::ssize(units);
  const i64 P = options.num_ranks;
  const bool sharded_params = kZero[options.stage].shard_params;
  const i64 copies = kZero[options.stage].shard_optimizer ? 1 : P;

  i64 persistent_total = 0;
  const std::string trained = trained_rows(units);
  if (trained.find('\0') != trained.npos)
    layout.frozen_ = fmt::format(" frozen={:08x}", static_cast<u32>(XXH3_64bits(trained.data(), trained.size())));
  layout.rows_.resize(trained.size());

  i64 param = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    // In registration order, as DeepSpeed decides: small parameters persist until their total reaches the model's
    // threshold.
    enum class Kept : u8 { Sharded, Persistent, Tiled, Elsewhere };
    std::vector<Kept> kept(units[u].size(), Kept::Sharded);
    for (size_t r = 0; r < units[u].size(); ++r) {
      if (units[u][r].group != options.group) kept[r] = Kept::Elsewhere;
    }
    i64 sharded = 0;
    for (size_t r = 0; r < units[u].size() && sharded_params; ++r) {
      if (kept[r] == Kept::Elsewhere) continue;
      const i64 n = std::max(units[u][r].numel(), units[u][r].room);  // equal on all ranks of a tensor-parallel group
      if (n <= options.persistence_threshold && persistent_total + n <= options.model_persistence_threshold) {
        kept[r] = Kept::Persistent;
        persistent_total += n;
      } else {
        sharded += n;
      }
    }
    for (size_t r = 0; r < units[u].size() && options.tile_elems > 0 && sharded > options.tile_elems; ++r) {
      if (units[u][r].tiles && kept[r] == Kept::Sharded) kept[r] = Kept::Tiled;
    }
    UnitPlace place{.first_param = param, .first_segment = narrow<i64>(layout.segments_.size())};
    const bool here = options.here.empty() || options.here[u];
    for (size_t r = 0; r < units[u].size(); ++r)
      layout.rows_[static_cast<size_t>(param) + r].param = param + narrow<i64>(r);
    const auto add_segment = [&](Kept want, bool of_trained) {
      Segment s{.unit = narrow<i64>(u),
                .persistent = want == Kept::Persistent,
                .trained = of_trained,
                .offset = place.padded};
      bool any = false;
      for (size_t r = 0; r < units[u].size(); ++r) {
        if (kept[r] != want || units[u][r].trained != of_trained) continue;
        any = true;
        const i64 n = units[u][r].numel(), number = param + narrow<i64>(r);
        s.numel = align_up(s.numel, options.row_alignment());
        layout.rows_[number] = {number, narrow<i64>(layout.segments_.size()), s.numel, n};
        s.numel += std::max(n, units[u][r].room);
        place.numel += n;
      }
      if (!any) return;
      s.slice = align_up(div_ceil(s.numel, P), options.slice_alignment());
      place.padded += s.slice * P;
      layout.segments_.push_back(s);
    };
    for (const bool of_trained : {true, false}) {
      for (const Kept want : {Kept::Persistent, Kept::Sharded}) {
        if (here && (of_trained || !options.of_gradients)) add_segment(want, of_trained);
      }
    }
    place.num_segments = narrow<i64>(layout.segments_.size()) - place.first_segment;
    for (size_t r = 0; r < units[u].size() && here; ++r) {
      if (kept[r] != Kept::Tiled || (options.of_gradients && !units[u][r].trained)) continue;
      const model::MatrixShape m = units[u][r].matrices();
      const i64 rows = m.count * m.rows, cols = m.cols, most = rows_of_tile(rows, cols, options);
      for (i64 first = 0; first < rows; first += most)
        layout.tiles_.push_back({.param = param + narrow<i64>(r),
                                 .first = first,
                                 .rows = std::min(most, rows - first),
                                 .cols = cols,
                                 .trained = units[u][r].trained});
    }
    param += narrow<i64>(units[u].size());
    layout.num_elements_ += place.numel;
    layout.units_.push_back(place);
  }
  const auto add_tile = [&](MatrixTile& tile) {
    tile.unit = narrow<i64>(layout.units_.size());
    const i64 n = tile.rows * tile.cols, slice = align_up(div_ceil(n, P), options.slice_alignment());
    const RowPlace at{tile.param, narrow<i64>(layout.segments_.size()), 0, n, tile.first * tile.cols};
    if (tile.first == 0) layout.rows_[tile.param] = at;
    layout.places_.push_back(at);
    layout.units_.push_back(
        {.first_param = tile.param, .first_segment = at.segment, .num_segments = 1, .padded = slice * P, .numel = n});
    layout.segments_.push_back({.unit = tile.unit, .trained = tile.trained, .numel = n, .slice = slice});
    layout.num_elements_ += n;
  };
  for (const bool of_trained : {true, false}) {
    for (MatrixTile& tile : layout.tiles_) {
      if (tile.trained == of_trained) add_tile(tile);
    }
  }
  i64 end = 0;  // of the shard arrays
  for (const bool of_trained : {true, false}) {
    for (Segment& s : layout.segments_) {
      if (s.trained == of_trained) s.shard_offset = std::exchange(end, end + s.slice * copies);
    }
    if (of_trained) layout.shard_elems_ = end;
  }
  for (const RowPlace& row : layout.rows_) {
    if (row.segment >= 0 && layout.segments_[row.segment].unit < std::ssize(units)) layout.places_.push_back(row);
  }
  std::ranges::stable_sort(layout.places_, {}, &RowPlace::param);
  return layout;
}

std::span<const MatrixTile> Layout::tiles_of(i64 param) const noexcept {
  const auto found = std::ranges::equal_range(tiles_, param, {}, &MatrixTile::param);
  return {found.begin(), found.end()};
}

std::vector<Layout::Range> Layout::gaps_of(i64 unit) const {
  const size_t u = static_cast<size_t>(unit), first = static_cast<size_t>(units_[u].first_param),
               last = unit + 1 < num_units_ ? static_cast<size_t>(units_[u + 1].first_param) : rows_.size();
  std::vector<Range> gaps;
  if (is_tile(unit)) return gaps;
  for (const Segment& s : segments_of(unit)) {
    i64 end = 0;
    const auto up_to = [&](i64 begin) {
      if (begin > end) gaps.push_back({s.offset + end, begin - end});
    };
    for (const RowPlace& row : std::span(rows_).subspan(first, last - first)) {
      if (row.segment != &s - segments_.data()) continue;
      up_to(row.offset);
      end = row.offset + row.numel;
    }
    up_to(s.numel);
  }
  return gaps;
}

std::vector<Piece> Layout::pieces(int rank, bool whole) const {
  std::vector<Piece> result;
  for (const RowPlace& row : places_) {
    const Segment& s = segments_[row.segment];
    const i64 first = whole ? 0 : s.slice * rank;
    const i64 last = whole ? s.slice * num_ranks() : first + s.slice;
    const i64 begin = std::max(row.offset, first), end = std::min(row.offset + row.numel, last);
    if (begin >= end) continue;
    const i64 held_first = states().shard_optimizer ? first : 0;
    result.push_back({row.param, row.begin + begin - row.offset, end - begin, row.segment, begin,
                      s.shard_offset + begin - held_first});
  }
  return result;
}

std::vector<Piece> Layout::owned_pieces(int rank) const { return pieces(rank, false); }

std::vector<Piece> Layout::held_pieces(int rank) const { return pieces(rank, !states().shard_optimizer); }

std::string Layout::id() const {
  return fmt::format("unit-slices/v3 ranks={} stage={} align={}{}{}", options_.num_ranks, options_.stage,
                     options_.slice_alignment(),
                     tiles_.empty() ? std::string() : fmt::format(" tile={}", options_.tile_elems), frozen_);
}

}  // namespace ds::zero
