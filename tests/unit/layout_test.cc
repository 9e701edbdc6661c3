// SPDX-License-Identifier: Apache-2.0
#include "zero/layout.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace ds::zero {
namespace layout_test {

using Rows = std::vector<model::ParamRow>;

Rows rows(std::initializer_list<i64> sizes) {
  Rows r;
  for (i64 n : sizes) r.push_back({.name = "p", .shape = {n}});
  return r;
}

Layout make(const std::vector<Rows>& units, LayoutOptions options) {
  std::vector<std::span<const model::ParamRow>> spans(units.begin(), units.end());
  return Layout::make(spans, options);
}

TEST(Layout, EveryElementHasOneOwner) {
  const std::vector<Rows> units = {rows({10, 700, 1}), rows({3}), rows({128, 4096, 77, 5})};
  for (int stage = 0; stage <= 3; ++stage) {
    for (int P = 1; P <= 9; ++P) {
      const Layout layout = make(units, {P, stage, 100, 150});
      std::vector<std::vector<int>> owners;
      for (const RowPlace& r : layout.rows()) owners.emplace_back(r.numel, 0);
      for (int rank = 0; rank < P; ++rank) {
        for (const Piece& p : layout.owned_pieces(rank)) {
          for (i64 i = 0; i < p.count; ++i) ++owners[p.param][p.begin + i];
          EXPECT_GE(p.shard_offset, 0);
          EXPECT_LE(p.shard_offset + p.count, layout.shard_elems());
        }
      }
      for (const auto& row : owners)
        EXPECT_EQ(std::accumulate(row.begin(), row.end(), 0), static_cast<int>(row.size()));
    }
  }
}

TEST(Layout, OwnershipDoesNotDependOnTheStageBelowThree) {
  const std::vector<Rows> units = {rows({1000, 24}), rows({333})};
  const Layout one = make(units, {3, 1, 0, 0}), two = make(units, {3, 2, 0, 0}), zero = make(units, {3, 0, 0, 0});
  for (int rank = 0; rank < 3; ++rank) {
    const auto a = one.owned_pieces(rank), b = two.owned_pieces(rank), c = zero.owned_pieces(rank);
    ASSERT_EQ(a.size(), b.size());
    ASSERT_EQ(a.size(), c.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].param, c[i].param);
      EXPECT_EQ(a[i].begin, c[i].begin);
      EXPECT_EQ(a[i].count, c[i].count);
      EXPECT_EQ(a[i].shard_offset, b[i].shard_offset);
    }
  }
}

TEST(Layout, PadsEveryUnitToWholeSlices) {
  const Layout layout = make({rows({10, 7, 20})}, {4, 2, 0, 0});
  EXPECT_EQ(layout.segments()[0].slice, 128);
  EXPECT_EQ(layout.units()[0].padded, 512);
  EXPECT_EQ(layout.shard_elems(), 128);
  EXPECT_EQ(layout.owned_pieces(0).size(), 3u);  // all of it fits rank 0
  EXPECT_TRUE(layout.owned_pieces(3).empty());   // more ranks than slices
}

TEST(Layout, StageThreeKeepsSmallRowsWholeUntilTheModelThreshold) {
  const Layout layout = make({rows({50, 5000, 60, 45}), rows({40})}, {2, 3, 60, 150});
  ASSERT_EQ(layout.segments_of(0).size(), 2u);
  EXPECT_TRUE(layout.segments_of(0)[0].persistent);
  EXPECT_EQ(layout.segments_of(0)[0].numel, 56 + 60);  // 45 more would exceed 150
  EXPECT_EQ(layout.segments_of(0)[1].numel, 5000 + 45);
  EXPECT_EQ(layout.segments_of(1)[0].numel, 40);
  EXPECT_TRUE(layout.segments_of(1)[0].persistent);
}

// The picture of layout.h, drawn row by row and element by element: sizes and thresholds that meet, units that are
// empty or on other ranks, rows with room for a larger slice.
TEST(Layout, IsThePicture) {
  std::mt19937 random(1);
  const auto below = [&](u32 n) { return static_cast<i64>(random() % n); };
  for (int round = 0; round < 600; ++round) {
    const int P = 1 + static_cast<int>(below(4)), stage = static_cast<int>(below(4));
    LayoutOptions options{P, stage, 64 * below(4), 64 * below(8), {}};
    std::vector<Rows> units(static_cast<size_t>(1 + below(4)));
    for (Rows& unit : units) {
      for (i64 n = below(4); n > 0; --n) {
        unit.push_back({.name = "p", .shape = {below(3) == 0 ? 1 + below(700) : 64 * (1 + below(4))}});
        if (below(4) == 0) unit.back().room = unit.back().numel() + 64 * below(2);
        unit.back().trained = round % 2 == 0 || below(3) > 0;
      }
    }
    if (below(2) == 0) {
      for (size_t u = 0; u < units.size(); ++u) options.here.push_back(below(3) > 0);
    }
    const Layout layout = make(units, options);
    SCOPED_TRACE(fmt::format("round {}: {} ranks, stage {}", round, P, stage));
    const std::string id = fmt::format("unit-slices/v3 ranks={} stage={} align=128", P, stage);
    const bool trains_all = std::ranges::all_of(
        units, [](const Rows& unit) { return std::ranges::all_of(unit, &model::ParamRow::trained); });
    EXPECT_EQ(layout.id().substr(0, id.size()), id);
    EXPECT_EQ(layout.id().substr(id.size()).substr(0, 8), trains_all ? "" : " frozen=");

    i64 param = 0, elements = 0, persistent_elems = 0;
    std::vector<std::map<i64, i64>> owned(static_cast<size_t>(P));  // by rank: element of the model -> of its shards
    size_t segment = 0;
    ASSERT_EQ(layout.units().size(), units.size());
    for (size_t u = 0; u < units.size(); ++u) {
      const bool here = options.here.empty() || options.here[u];
      const UnitPlace& place = layout.units()[u];
      EXPECT_EQ(place.first_param, param);
      EXPECT_EQ(place.first_segment, static_cast<i64>(segment));
      std::vector<size_t> parts[4];  // persistent trained rows, other trained ones, and the same of those that are not
      for (size_t r = 0; r < units[u].size(); ++r) {
        const i64 n = std::max(units[u][r].numel(), units[u][r].room);
        const bool stays = stage == 3 && n <= options.persistence_threshold &&
                           persistent_elems + n <= options.model_persistence_threshold;
        persistent_elems += stays ? n : 0;
        parts[(stays ? 0 : 1) + (units[u][r].trained ? 0 : 2)].push_back(r);
      }
      i64 padded = 0, numel = 0;
      for (const std::vector<size_t>& rows : parts) {
        const auto which = &rows - parts;
        if (!here || rows.empty()) continue;
        ASSERT_LT(segment, layout.segments().size());
        const Segment& s = layout.segments()[segment];
        EXPECT_EQ(s.unit, static_cast<i64>(u));
        EXPECT_EQ(s.persistent, which % 2 == 0);
        EXPECT_EQ(s.trained, which < 2);
        EXPECT_EQ(s.offset, padded);
        i64 at = 0;
        for (const size_t r : rows) {
          const RowPlace& row = layout.rows()[static_cast<size_t>(param) + r];
          EXPECT_EQ(row.segment, static_cast<i64>(segment));
          at = (at + 7) / 8 * 8;
          EXPECT_EQ(row.offset, at);
          EXPECT_EQ(row.numel, units[u][r].numel());
          for (i64 i = 0; i < row.numel; ++i) {
            const i64 owner = (at + i) / s.slice, local = stage == 0 ? at + i : (at + i) % s.slice;
            owned[owner][1000 * row.param + i] = s.shard_offset + local;
          }
          at += std::max(row.numel, units[u][r].room);
          numel += row.numel;
        }
        EXPECT_EQ(s.numel, at);
        EXPECT_EQ(s.slice, (at + P * 128 - 1) / (P * 128) * 128);
        padded += s.slice * P;
        ++segment;
      }
      for (size_t r = 0; r < units[u].size(); ++r) {
        const RowPlace& row = layout.rows()[static_cast<size_t>(param) + r];
        EXPECT_EQ(row.param, param + static_cast<i64>(r));
        EXPECT_EQ(row.segment < 0, !here);
      }
      EXPECT_EQ(place.num_segments, static_cast<i64>(segment) - place.first_segment);
      EXPECT_EQ(place.padded, padded);
      EXPECT_EQ(place.numel, numel);
      param += std::ssize(units[u]);
      elements += numel;
    }
    EXPECT_EQ(layout.segments().size(), segment);
    EXPECT_EQ(std::ssize(layout.rows()), param);
    EXPECT_EQ(layout.num_params(), elements);
    i64 shard_elems = 0;  // trained segments, then, after the end of the arrays, the others
    for (const bool trained : {true, false}) {
      for (const Segment& s : layout.segments()) {
        if (s.trained != trained) continue;
        EXPECT_EQ(s.shard_offset, shard_elems);
        shard_elems += s.slice * (stage == 0 ? P : 1);
      }
      if (trained) {
        EXPECT_EQ(layout.shard_elems(), shard_elems);
      }
    }

    // Gradients have the trained segments, where parameters have them.
    LayoutOptions of_gradients = options;
    of_gradients.of_gradients = true;
    const Layout grads = make(units, of_gradients);
    EXPECT_EQ(grads.shard_elems(), layout.shard_elems());
    for (size_t u = 0; u < units.size(); ++u) {
      const auto all = layout.segments_of(static_cast<i64>(u)), some = grads.segments_of(static_cast<i64>(u));
      ASSERT_EQ(std::ssize(some), std::ranges::count(all, true, &Segment::trained));
      for (size_t s = 0; s < some.size(); ++s) {
        EXPECT_EQ(some[s].offset, all[s].offset);
        EXPECT_EQ(some[s].slice, all[s].slice);
        EXPECT_EQ(some[s].shard_offset, all[s].shard_offset);
      }
    }
    for (const RowPlace& row : grads.rows()) {
      const RowPlace& of_param = layout.rows()[row.param];
      const bool trained = of_param.segment >= 0 && layout.segments()[of_param.segment].trained;
      EXPECT_EQ(row.segment >= 0, trained);
      if (trained) {
        EXPECT_EQ(row.offset, of_param.offset);
      }
    }

    // Rows, gaps and the padding of segments fill a unit's buffer.
    for (size_t u = 0; u < units.size(); ++u) {
      std::vector<int> times(static_cast<size_t>(layout.units()[u].padded), 0);
      const auto mark = [&](i64 first, i64 count) {
        EXPECT_GT(count, 0);
        for (i64 i = 0; i < count; ++i) ++times.at(static_cast<size_t>(first + i));
      };
      for (const auto& [first, count] : layout.gaps_of(static_cast<i64>(u))) mark(first, count);
      for (const Segment& s : layout.segments_of(static_cast<i64>(u))) {
        if (s.slice * P > s.numel) mark(s.offset + s.numel, s.slice * P - s.numel);
        for (const RowPlace& row : layout.rows()) {
          if (row.segment == &s - layout.segments().data()) mark(s.offset + row.offset, row.numel);
        }
      }
      EXPECT_EQ(std::ranges::count(times, 1), std::ssize(times)) << "unit " << u;
    }

    std::map<i64, i64> all;
    for (const auto& of_rank : owned) all.insert(of_rank.begin(), of_rank.end());
    for (int rank = 0; rank < P; ++rank) {
      const auto expect = [&](const std::vector<Piece>& pieces, const std::map<i64, i64>& want) {
        std::map<i64, i64> got;
        for (const Piece& p : pieces) {
          EXPECT_GT(p.count, 0);
          const RowPlace& row = layout.rows()[p.param];
          EXPECT_EQ(p.segment, row.segment);
          EXPECT_EQ(p.segment_offset, row.offset + p.begin);
          for (i64 i = 0; i < p.count; ++i) {
            EXPECT_TRUE(got.try_emplace(1000 * p.param + p.begin + i, p.shard_offset + i).second);
          }
        }
        EXPECT_EQ(got, want) << "rank " << rank;
      };
      expect(layout.owned_pieces(rank), owned[rank]);
      expect(layout.held_pieces(rank), stage == 0 ? all : owned[rank]);
    }
    if (HasFailure()) return;
  }
}

// With states in blocks every piece begins at a multiple of a block of its row, and only the end of a row ends a short
// block. Such a layout has an id of its own; others keep theirs.
TEST(Layout, CutsNoBlock) {
  for (const i64 stage : {0, 1, 3}) {
    for (const int P : {1, 2, 3, 5}) {
      const std::vector<Rows> units = {rows({1000, 3, 257}), rows({5003})};
      LayoutOptions options{P, static_cast<int>(stage), 300, 1000};
      const Layout plain = make(units, options);
      options.block = 256;
      const Layout layout = make(units, options);
      EXPECT_EQ(layout.id(), fmt::format("unit-slices/v3 ranks={} stage={} align=256", P, stage));
      EXPECT_EQ(plain.id(), fmt::format("unit-slices/v3 ranks={} stage={} align=128", P, stage));
      std::vector<i64> covered(layout.rows().size(), 0);
      for (int rank = 0; rank < P; ++rank) {
        for (const Piece& p : layout.owned_pieces(rank)) {
          const i64 numel = layout.rows()[p.param].numel;
          EXPECT_EQ(p.begin % 256, 0);
          EXPECT_TRUE(p.count % 256 == 0 || p.begin + p.count == numel);
          covered[p.param] += p.count;
        }
      }
      for (const RowPlace& row : layout.rows()) EXPECT_EQ(covered[row.param], row.numel);
    }
  }
}

// Matrices of FP8 products that are cut have segments without other rows, with the same numbers among gradients; the
// layout has an id of its own only if there are such.
TEST(Layout, MatricesThatTravelAsCodesHaveSegmentsOfTheirOwn) {
  Rows unit = rows({40, 0, 300, 0, 0, 0});
  for (const size_t r : {1u, 3u, 4u, 5u}) unit[r].shape = {256, 128}, unit[r].fp8 = true;
  unit[3].trained = unit[4].trained = false;
  unit[4].storage = model::Storage::Int8;
  for (const int P : {2, 3}) {
    LayoutOptions options{P, 3, 50, 1000};
    const Layout plain = make({unit}, options);
    options.fp8 = true;
    const Layout layout = make({unit}, options);
    options.of_gradients = true;
    const Layout grads = make({unit}, options);
    const std::span<const Segment> segments = layout.segments();
    ASSERT_EQ(segments.size(), 5u);
    const auto is = [&](size_t s, bool trained, bool persistent, bool fp8, model::Storage storage) {
      return segments[s].trained == trained && segments[s].persistent == persistent && segments[s].fp8 == fp8 &&
             segments[s].storage == storage;
    };
    using enum model::Storage;
    EXPECT_TRUE(is(0, true, true, false, Work) && is(1, true, false, false, Work) && is(2, true, false, true, Work));
    EXPECT_TRUE(is(3, false, false, true, Work) && is(4, false, false, false, Int8));
    for (const auto& [row, segment] : {std::pair{0, 0}, {1, 2}, {2, 1}, {3, 3}, {4, 4}, {5, 2}})
      EXPECT_EQ(layout.rows()[row].segment, segment) << row;
    EXPECT_EQ(layout.rows()[5].offset, 256 * 128);
    ASSERT_EQ(grads.segments().size(), 3u);
    for (size_t s = 0; s < 3; ++s) EXPECT_EQ(grads.segments()[s].slice, segments[s].slice);
    EXPECT_EQ(layout.num_params(), plain.num_params());
    const std::string id = fmt::format("unit-slices/v3 ranks={} stage=3 align=128 fp8", P);
    EXPECT_EQ(layout.id().substr(0, id.size()), id);
    for (Segment s : plain.segments()) EXPECT_FALSE(s.fp8);
    options.of_gradients = false;
    options.persistence_threshold = options.model_persistence_threshold = 1'000'000;
    unit[4].storage = Work;
    EXPECT_EQ(make({unit}, options).id().find("fp8"), std::string::npos);
    unit[4].storage = Int8;
  }
}

// Tiles that are not trained come after all others, so that those of gradients have the same numbers.
TEST(Layout, TilesThatAreNotTrainedComeLast) {
  Rows matrices;
  for (int i = 0; i < 4; ++i)
    matrices.push_back({.name = "m", .shape = {40, 10}, .trained = i % 2 == 1, .tiles = true});
  LayoutOptions options{2, 3, 0, 0};
  options.tile_elems = 100;
  const Layout layout = make({matrices}, options);
  options.of_gradients = true;
  const Layout grads = make({matrices}, options);
  ASSERT_EQ(layout.tiles().size(), 2 * grads.tiles().size());
  for (const i64 param : {0, 1, 2, 3}) {
    EXPECT_EQ(grads.tiles_of(param).size(), param % 2 == 1 ? layout.tiles_of(param).size() : 0u);
    for (size_t t = 0; t < grads.tiles_of(param).size(); ++t) {
      EXPECT_EQ(grads.tiles_of(param)[t].unit, layout.tiles_of(param)[t].unit);
      EXPECT_EQ(grads.tiles_of(param)[t].first, layout.tiles_of(param)[t].first);
    }
    for (const MatrixTile& tile : layout.tiles_of(param)) {
      EXPECT_EQ(layout.units()[tile.unit].first_param, param);
      EXPECT_EQ(layout.segments_of(tile.unit).front().trained, param % 2 == 1);
      EXPECT_EQ(tile.unit <= std::ssize(grads.tiles()), param % 2 == 1);
    }
  }
}

// In a layer of more than a tile, every matrix that may be in tiles is: each element is in one tile and owned once, a
// tile is whole rows, has a unit of its own and is cut for all ranks; the rest of the layer stays one unit.
TEST(Layout, MatricesAreInTiles) {
  for (const int P : {1, 2, 3}) {
    for (const i64 block : {1, 256}) {
      for (const i64 tile : {1, 1000, 4096, 1'000'000}) {
        std::vector<Rows> units = {rows({333}), rows({40, 0, 0, 9000})};
        units[1][1].shape = {100, 40}, units[1][1].tiles = true;
        units[1][2].shape = {24, 96}, units[1][2].tiles = true;
        LayoutOptions options{P, 3, 50, 1000};
        options.block = block;
        const Layout plain = make(units, options);
        options.tile_elems = tile;
        const Layout layout = make(units, options);
        SCOPED_TRACE(fmt::format("{} ranks, block {}, tile {}", P, block, tile));
        if (tile == 1'000'000) {
          EXPECT_TRUE(layout.tiles().empty());
          EXPECT_EQ(layout.id(), plain.id());
          continue;
        }
        EXPECT_EQ(layout.id(), plain.id() + fmt::format(" tile={}", tile));
        EXPECT_EQ(layout.num_params(), plain.num_params());
        EXPECT_EQ(layout.units()[1].numel, 40 + 9000);
        EXPECT_FALSE(layout.is_tile(1));
        i64 unit = std::ssize(units);
        for (const i64 param : {2, 3}) {
          const i64 cols = param == 2 ? 40 : 96, num_rows = param == 2 ? 100 : 24;
          i64 next = 0;
          for (const MatrixTile& t : layout.tiles_of(param)) {
            EXPECT_EQ(t.unit, unit++);
            EXPECT_TRUE(layout.is_tile(t.unit));
            EXPECT_EQ(t.first, next);
            EXPECT_EQ(t.cols, cols);
            EXPECT_EQ(t.first % 8, 0);
            EXPECT_EQ(t.first * cols % block, 0);
            EXPECT_TRUE(block > 1 || t.rows * cols <= std::max(tile, 8 * cols));
            EXPECT_EQ(layout.units()[t.unit].numel, t.rows * cols);
            ASSERT_EQ(layout.segments_of(t.unit).size(), 1);
            EXPECT_EQ(layout.segments_of(t.unit)[0].slice * P, layout.units()[t.unit].padded);
            EXPECT_TRUE(layout.gaps_of(t.unit).empty());
            next += t.rows;
          }
          EXPECT_EQ(next, num_rows);
        }
        EXPECT_EQ(unit, std::ssize(layout.units()));
        std::vector<std::vector<int>> owners = {std::vector<int>(333), std::vector<int>(40), std::vector<int>(4000),
                                                std::vector<int>(24 * 96), std::vector<int>(9000)};
        std::vector<std::set<i64>> places(static_cast<size_t>(P));
        for (int rank = 0; rank < P; ++rank) {
          i64 last = -1;
          for (const Piece& p : layout.owned_pieces(rank)) {
            EXPECT_GE(p.param, last);
            last = p.param;
            EXPECT_EQ(p.begin % block, 0);
            for (i64 i = 0; i < p.count; ++i) {
              ++owners[p.param][p.begin + i];
              EXPECT_TRUE(places[rank].insert(p.shard_offset + i).second);
              EXPECT_LT(p.shard_offset + i, layout.shard_elems());
            }
          }
        }
        for (const auto& row : owners) EXPECT_TRUE(std::ranges::all_of(row, [](int n) { return n == 1; }));
      }
    }
  }
}

// The shares of a vocabulary differ by a row; the layouts of other units must not.
TEST(Layout, IsAlikeOnAllRanksOfATensorParallelGroup) {
  for (i64 threshold = 4000; threshold < 4300; threshold += 10) {
    const auto of = [&](i64 numel) {
      Rows unit = rows({512, numel, 32});
      unit[1].room = 4160;
      return make({unit, rows({4150, 7})}, {2, 3, threshold, 8400});
    };
    const Layout most = of(4160), fewer = of(4128);
    ASSERT_EQ(most.segments().size(), fewer.segments().size()) << threshold;
    for (size_t s = 0; s < most.segments().size(); ++s) {
      EXPECT_EQ(most.segments()[s].slice, fewer.segments()[s].slice) << threshold;
      EXPECT_EQ(most.segments()[s].persistent, fewer.segments()[s].persistent) << threshold;
    }
    for (size_t r = 0; r < most.rows().size(); ++r)
      EXPECT_EQ(most.rows()[r].offset, fewer.rows()[r].offset) << threshold;
  }
}

// Two matrices and their biases, as two linear maps declare them, between other rows.
Rows two_maps() {
  Rows r = rows({40});
  const auto add = [&](std::vector<i64> shape, i64 after) {
    r.push_back({.name = "p", .shape = shape, .after = after});
  };
  add({32, 16}, -1);
  add({256}, -1);
  add({16, 16}, 1);
  add({16}, 2);
  r.push_back({.name = "p", .shape = {24}});
  return r;
}

TEST(Layout, RowsLieDirectlyAfterOthersWhereverTheyAreKeptAlike) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (int P = 1; P <= 4; ++P) {
      for (const i64 block : {i64{1}, model::kRowBlock}) {
        for (const i64 threshold : {0, 100, 256, 300, 1000}) {  // 256: the second matrix by itself
          for (const bool of_gradients : {false, true}) {
            for (const std::vector<size_t>& frozen : {std::vector<size_t>{}, {3}, {1, 3}, {1, 2, 3, 4}}) {
              Rows unit = two_maps();
              for (const size_t r : frozen) unit[r].trained = false;
              const Layout layout = make({rows({100}), unit}, {.num_ranks = P,
                                                               .stage = stage,
                                                               .persistence_threshold = threshold,
                                                               .model_persistence_threshold = 10'000,
                                                               .block = block,
                                                               .of_gradients = of_gradients});
              const auto place = [&](size_t r) { return layout.rows()[r + 1]; };
              for (const auto& [row, after] : {std::pair<size_t, size_t>{3, 1}, {4, 2}}) {
                if (unit[row].trained != unit[after].trained || place(row).segment < 0) continue;
                EXPECT_TRUE(unit[row].lies_after(unit));
                EXPECT_EQ(place(row).segment, place(after).segment);
                EXPECT_EQ(place(row).offset, place(after).offset + place(after).numel);
              }
              i64 gaps = 0;
              for (const Layout::Range& gap : layout.gaps_of(1)) {
                EXPECT_GT(gap.count, 0);
                gaps += gap.count;
              }
              i64 numel = 0;
              for (const Segment& s : layout.segments_of(1)) numel += s.numel;
              EXPECT_EQ(gaps + layout.units()[1].numel, numel);
              std::map<std::pair<i64, i64>, i64> taken;  // by segment and offset: ends
              for (const RowPlace& row : layout.places()) {
                taken[{row.segment, row.offset}] = row.offset + row.numel;
                EXPECT_EQ(row.offset % layout.options().row_alignment(), 0);
              }
              EXPECT_EQ(taken.size(), layout.places().size());
              for (auto next = std::next(taken.begin()), row = taken.begin(); next != taken.end(); ++row, ++next) {
                if (row->first.first == next->first.first) {
                  EXPECT_LE(row->second, next->first.second);
                }
              }
            }
          }
        }
      }
    }
  }
}

// Arrays of one rank that are saved in the order of a layout must not return in another order.
TEST(Layout, IsNamedAnotherIfRowsLieInAnotherOrder) {
  const LayoutOptions options{.num_ranks = 2, .stage = 1};
  Rows plain = two_maps();
  for (model::ParamRow& row : plain) row.after = -1;
  EXPECT_EQ(make({plain}, options).id().find("moved"), std::string::npos);
  EXPECT_NE(make({two_maps()}, options).id(), make({plain}, options).id());
  Rows in_order = rows({256, 256});
  const std::string id = make({in_order}, options).id();
  in_order[1].after = 0;
  EXPECT_EQ(make({in_order}, options).id(), id);
}

// At stage 3 what lies side by side is small as a whole, or not.
TEST(Layout, RowsThatLieAfterOthersPersistTogether) {
  const auto persistent = [](i64 threshold) {
    const Layout layout =
        make({two_maps()},
             {.num_ranks = 2, .stage = 3, .persistence_threshold = threshold, .model_persistence_threshold = 10'000});
    std::vector<bool> of_rows;
    for (const RowPlace& row : layout.rows()) of_rows.push_back(layout.segments()[row.segment].persistent);
    return of_rows;
  };
  EXPECT_EQ(persistent(256), (std::vector{true, false, false, false, false, true}));
  EXPECT_EQ(persistent(272), (std::vector{true, false, true, false, true, true}));
  EXPECT_EQ(persistent(767), (std::vector{true, false, true, false, true, true}));
  EXPECT_EQ(persistent(768), (std::vector{true, true, true, true, true, true}));
}

}  // namespace layout_test
}  // namespace ds::zero
