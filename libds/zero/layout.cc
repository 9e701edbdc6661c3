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

// By number of the parameter, as bytes: 1 if it is trained, else 0, or its storage and 1.
std::string trained_rows(Layout::Units units) {
  std::string trained;
  for (const auto& unit : units) {
    for (const model::ParamRow& row : unit) {
      const char storage = static_cast<char>(row.storage);
      DS_ASSERT(!row.trained || row.storage == model::Storage::Work);
      DS_ASSERT((row.storage == model::Storage::Codes) == static_cast<bool>(row.codes));
      trained.push_back(row.trained ? 1 : storage == 0 ? 0 : static_cast<char>(storage + 1));
    }
  }
  return trained;
}

// Which rows lie directly after another one than the one before them.
std::string moved_rows(Layout::Units units) {
  std::string moved;
  i64 param = 0;
  for (const auto& unit : units) {
    for (size_t r = 0; r < unit.size(); ++r, ++param) {
      if (unit[r].lies_after(unit) && std::cmp_not_equal(unit[r].after + 1, r))
        moved += fmt::format("{}:{} ", param, unit[r].after);
    }
  }
  return moved;
}

using Rows = std::span<const model::ParamRow>;

// The row that lies directly after row r of a unit; as many as there are rows: none.
size_t next_of(Rows rows, size_t r) {
  size_t next = 0;
  while (next < rows.size() && !(std::cmp_equal(rows[next].after, r) && rows[next].lies_after(rows))) ++next;
  return next;
}

// The numbers of the rows of a unit in runs, each of a row and those that lie directly after it.
std::vector<std::vector<size_t>> runs_of(Rows rows) {
  std::vector<std::vector<size_t>> runs;
  for (size_t first = 0; first < rows.size(); ++first) {
    if (rows[first].lies_after(rows)) continue;
    std::vector<size_t>& run = runs.emplace_back();
    for (size_t r = first; r < rows.size(); r = next_of(rows, r)) run.push_back(r);
  }
  return runs;
}

}  // namespace

// How a rank keeps the parameters of a row.
enum class Layout::Kept : u8 { Sharded, Codes, Persistent, Tiled, Elsewhere };

// By unit and row. Small parameters persist until their total reaches the model's threshold: in registration order, as
// DeepSpeed decides.
std::vector<std::vector<Layout::Kept>> Layout::kept_rows(Units units, const LayoutOptions& options) {
  std::vector<std::vector<Kept>> kept;
  i64 persistent_total = 0;
  for (const auto& unit : units) {
    std::vector<Kept>& of_unit = kept.emplace_back(unit.size(), Kept::Sharded);
    for (size_t r = 0; r < unit.size(); ++r) {
      if (unit[r].group != options.group) of_unit[r] = Kept::Elsewhere;
    }
    if (!kZero[options.stage].shard_params) continue;
    i64 sharded = 0;
    for (const std::vector<size_t>& run : runs_of(unit)) {
      if (of_unit[run[0]] == Kept::Elsewhere) continue;
      i64 n = 0;
      for (const size_t r : run) n += std::max(unit[r].numel(), unit[r].room);  // equal on all ranks of tp
      if (unit[run[0]].storage == model::Storage::Work && n <= options.persistence_threshold &&
          persistent_total + n <= options.model_persistence_threshold) {
        for (const size_t r : run) of_unit[r] = Kept::Persistent;
        persistent_total += n;
      } else {
        sharded += n;
        const auto codes = [&](size_t r) { return unit[r].fp8 && unit[r].storage == model::Storage::Work; };
        if (options.fp8 && std::ranges::all_of(run, codes)) {
          for (const size_t r : run) of_unit[r] = Kept::Codes;
        }
      }
    }
    if (options.tile_elems == 0 || sharded <= options.tile_elems) continue;
    for (size_t r = 0; r < unit.size(); ++r) {
      if (unit[r].tiles && of_unit[r] == Kept::Sharded) of_unit[r] = Kept::Tiled;
    }
  }
  return kept;
}

Layout Layout::make(Units units, const LayoutOptions& options) {
  DS_ASSERT(options.num_ranks >= 1 && options.stage >= 0 && options.stage <= 3);
  Layout layout;
  layout.options_ = options;
  layout.num_units_ = std::ssize(units);
  const std::string trained = trained_rows(units);
  if (trained.find_first_not_of('\1') != trained.npos)
    layout.frozen_ = fmt::format(" frozen={:08x}", static_cast<u32>(XXH3_64bits(trained.data(), trained.size())));
  if (const std::string moved = moved_rows(units); !moved.empty())
    layout.moved_ = fmt::format(" moved={:08x}", static_cast<u32>(XXH3_64bits(moved.data(), moved.size())));
  layout.rows_.resize(trained.size());
  for (size_t p = 0; p < trained.size(); ++p) layout.rows_[p].param = narrow<i64>(p);

  const std::vector<std::vector<Kept>> kept = kept_rows(units, options);
  i64 param = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    layout.units_.push_back({.first_param = param, .first_segment = narrow<i64>(layout.segments_.size())});
    if (options.here.empty() || options.here[u]) layout.add_rows(units[u], kept[u]);
    param += narrow<i64>(units[u].size());
  }
  for (const RowPlace& row : layout.rows_) {
    if (row.segment >= 0) layout.places_.push_back(row);
  }
  for (const bool of_trained : {true, false}) {
    for (MatrixTile& tile : layout.tiles_) {
      if (tile.trained == of_trained) layout.add_unit_of(tile);
    }
  }
  std::ranges::stable_sort(layout.places_, {}, &RowPlace::param);
  layout.place_shards();
  return layout;
}

// Places the rows of the last unit: segments of those that are trained come first, and in each half persistent ones.
void Layout::add_rows(std::span<const model::ParamRow> rows, std::span<const Kept> kept) {
  UnitPlace& unit = units_.back();
  for (const bool of_trained : {true, false}) {
    if (!of_trained && options_.of_gradients) break;
    for (const Kept want : {Kept::Persistent, Kept::Sharded, Kept::Codes}) add_segment(rows, kept, want, of_trained);
  }
  using model::Storage;
  for (const Storage form : {Storage::BF16, Storage::F16, Storage::Int8, Storage::Int4, Storage::Codes}) {
    if (!options_.of_gradients) add_segment(rows, kept, Kept::Sharded, false, form);
  }
  unit.num_segments = narrow<i64>(segments_.size()) - unit.first_segment;
  num_elements_ += unit.numel;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (kept[r] != Kept::Tiled || (options_.of_gradients && !rows[r].trained)) continue;
    const model::MatrixShape m = rows[r].matrices();
    const i64 all = m.count * m.rows, most = rows_of_tile(all, m.cols, options_);
    for (i64 first = 0; first < all; first += most)
      tiles_.push_back({.param = unit.first_param + narrow<i64>(r),
                        .first = first,
                        .rows = std::min(most, all - first),
                        .cols = m.cols,
                        .trained = rows[r].trained,
                        .storage = rows[r].storage});
  }
}

// Appends a segment of these rows to the last unit, if there are any.
void Layout::add_segment(std::span<const model::ParamRow> rows, std::span<const Kept> kept, Kept want, bool of_trained,
                         model::Storage storage) {
  UnitPlace& unit = units_.back();
  Segment s{.unit = std::ssize(units_) - 1,
            .persistent = want == Kept::Persistent,
            .trained = of_trained,
            .storage = storage,
            .fp8 = want == Kept::Codes,
            .offset = unit.padded};
  bool any = false;
  for (const std::vector<size_t>& run : runs_of(rows)) {
    const model::ParamRow& first = rows[run[0]];
    if (kept[run[0]] != want || first.trained != of_trained || first.storage != storage) continue;
    any = true;
    for (const size_t r : run) {
      const i64 n = options_.elems_of(rows[r]), number = unit.first_param + narrow<i64>(r);
      const bool follows = r != run[0];
      DS_ASSERT(kept[r] == want &&
                (!follows || storage == model::Storage::Codes || s.numel % options_.row_alignment() == 0));
      if (!follows || storage != model::Storage::Codes) s.numel = align_up(s.numel, options_.row_alignment());
      rows_[number] = {number, narrow<i64>(segments_.size()), s.numel, n};
      s.numel += rows[r].codes ? n : std::max(n, rows[r].room);
      unit.numel += n;
    }
  }
  if (!any) return;
  s.slice = align_up(div_ceil(s.numel, i64{num_ranks()}), options_.slice_alignment());
  unit.padded += s.slice * num_ranks();
  segments_.push_back(s);
}

void Layout::add_unit_of(MatrixTile& tile) {
  tile.unit = std::ssize(units_);
  const i64 n = tile.rows * tile.cols, slice = align_up(div_ceil(n, i64{num_ranks()}), options_.slice_alignment());
  const RowPlace at{tile.param, narrow<i64>(segments_.size()), 0, n, tile.first * tile.cols};
  if (tile.first == 0) rows_[tile.param] = at;
  places_.push_back(at);
  units_.push_back({.first_param = tile.param,
                    .first_segment = at.segment,
                    .num_segments = 1,
                    .padded = slice * num_ranks(),
                    .numel = n});
  segments_.push_back(
      {.unit = tile.unit, .trained = tile.trained, .storage = tile.storage, .numel = n, .slice = slice});
  num_elements_ += n;
}

// The shard arrays are the slices of all trained segments; offsets of the others follow.
void Layout::place_shards() {
  const i64 copies = states().shard_optimizer ? 1 : num_ranks();
  i64 end = 0;
  for (const bool of_trained : {true, false}) {
    for (Segment& s : segments_) {
      if (s.trained == of_trained) s.shard_offset = std::exchange(end, end + s.slice * copies);
    }
    if (of_trained) shard_elems_ = end;
  }
}

bool Layout::packs(i64 param, const model::ParamRow& row) const noexcept {
  const i64 number = rows_[static_cast<size_t>(param)].segment;
  if (!(row.packs || row.transposed()) || row.fp8 || number < 0) return false;
  const Segment& s = segments_[static_cast<size_t>(number)];
  const bool codes = s.storage == model::Storage::Codes;
  return (codes || (s.storage == model::Storage::Work && row.shape.size() == 2)) && !is_tile(s.unit) &&
         (!states().shard_params || s.persistent || num_ranks() == 1);
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
    std::vector<RowPlace> rows;
    for (const RowPlace& row : std::span(rows_).subspan(first, last - first)) {
      if (row.segment == &s - segments_.data()) rows.push_back(row);
    }
    std::ranges::sort(rows, {}, &RowPlace::offset);
    i64 end = 0;
    const auto up_to = [&](i64 begin) {
      if (begin > end) gaps.push_back({s.offset + end, begin - end});
    };
    for (const RowPlace& row : rows) {
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
  return fmt::format("unit-slices/v3 ranks={} stage={} align={}{}{}{}{}", options_.num_ranks, options_.stage,
                     options_.slice_alignment(),
                     tiles_.empty() ? std::string() : fmt::format(" tile={}", options_.tile_elems),
                     std::ranges::any_of(segments_, &Segment::fp8) ? " fp8" : "", frozen_, moved_);
}

}  // namespace ds::zero
