// SPDX-License-Identifier: Apache-2.0
#include "zero/state_layout.h"

#include <gtest/gtest.h>

#include <map>

#include "model/models.h"
#include "zero/ownership.h"

namespace ds::zero {
namespace state_layout_test {

ModelConfig tiny() {
  ModelConfig c;
  c.vocab_size = 67;
  c.hidden = 36;
  c.layers = 2;
  c.heads = c.kv_heads = 3;
  c.head_dim = 12;
  c.intermediate = 51;
  c.max_positions = 9;
  return c;
}

struct Case {
  int ranks, stage;
};

std::vector<PerState<DType>> fp32_of(const Layout& layout) {
  return std::vector<PerState<DType>>(layout.rows().size());
}

// A state that every parameter has is laid out like the master.
TEST(StateLayout, OfAllParametersIsTheLayouts) {
  const model::Model model = model::make_model(tiny(), 8);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage});
    const StateSet both = state_set({State::Master, State::ExpAvg});
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, std::vector<StateSet>(layout.rows().size(), both), fp32_of(layout));
      EXPECT_EQ(states.bytes(State::ExpAvg), layout.shard_elems() * 4);
      EXPECT_EQ(states.bytes(State::ExpAvgSq), 0);
      for (const Piece& p : layout.held_pieces(r)) EXPECT_EQ(states.offset(State::ExpAvg, p), p.shard_offset * 4);
      i64 slices = 0;
      for (const Segment& s : layout.segments()) slices += s.slice;
      EXPECT_EQ(states.owned_bytes(), 2 * slices * 4);
    }
  }
}

// A frozen parameter has no place: a state of all others has the order of the layout's shard arrays.
TEST(StateLayout, HasNoPlaceForWhatIsNotTrained) {
  model::Model model = model::make_model(tiny(), 8);
  for (auto& row : model.shared) row.trained = false;
  for (const auto& layer : model.layers) layer->freeze(0);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage});
    std::vector<StateSet> has;
    i64 trained = 0, all = 0;
    for (const model::ParamRow* row : model.params())
      has.push_back(row->trained ? state_set({State::Master, State::ExpAvg}) : StateSet{});
    for (const Segment& s : layout.segments()) {
      all += s.slice;
      trained += s.trained ? s.slice : 0;
    }
    EXPECT_LT(trained, all);
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, has, fp32_of(layout));
      for (const State s : {State::Master, State::ExpAvg}) {
        EXPECT_EQ(states.bytes(s), trained * (c.stage == 0 ? c.ranks : 1) * 4);
        for (const Piece& p : layout.held_pieces(r)) {
          EXPECT_EQ(states.is_trained(p.param), layout.is_trained(p));
          if (!layout.is_trained(p)) continue;
          EXPECT_EQ(states.offset(s, p), p.shard_offset * 4);
          EXPECT_LE(states.offset(s, p) + p.count * 4, states.bytes(s));
        }
      }
      EXPECT_EQ(states.owned_bytes(), 2 * trained * 4);
      // Whole on every rank.
      const StateLayout whole(layout, r, has, fp32_of(layout), state_set({State::ExpAvg}));
      EXPECT_EQ(whole.bytes(State::ExpAvg), trained * c.ranks * 4);
      for (const Piece& p : layout.whole_pieces()) {
        if (layout.is_trained(p)) {
          EXPECT_LE(whole.offset(State::ExpAvg, p) + p.count * 4, whole.bytes(State::ExpAvg));
        }
      }
    }
  }
}

// A state that only some parameters have: each of their elements has a place of its own, and others have none.
TEST(StateLayout, OfSomeParametersHasTheirElementsAndNoOthers) {
  const model::Model model = model::make_model(tiny(), 8);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage});
    std::vector<StateSet> has(layout.rows().size());
    for (size_t p = 0; p < has.size(); ++p) has[p][p % 3 == 0 ? State::MomentumBuffer : State::ExpAvg] = true;
    i64 owned = 0, of_all = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, has, fp32_of(layout));
      for (const State s : {State::MomentumBuffer, State::ExpAvg}) {
        std::map<i64, i64> places;  // begin -> end
        i64 elems = 0;
        for (const Piece& p : layout.held_pieces(r)) {
          EXPECT_EQ(states.has(s, p.param), has[p.param][s]);
          if (!states.has(s, p.param)) continue;
          const i64 at = states.offset(s, p) / 4;
          EXPECT_EQ(states.offset(s, p) % 32, 0);
          EXPECT_TRUE(places.emplace(at, at + p.count).second);
          elems += align_up(p.count, 8);
        }
        EXPECT_EQ(states.bytes(s), elems * 4);
        i64 end = 0;
        for (const auto& [begin, stop] : places) {
          EXPECT_GE(begin, end);
          end = stop;
        }
        EXPECT_LE(end * 4, states.bytes(s));
        // The part that a rank owns of a state that it holds whole lies inside the array.
        for (const Piece& p : layout.owned_pieces(r)) {
          if (!states.has(s, p.param)) continue;
          EXPECT_LE(states.offset(s, p) + p.count * 4, states.bytes(s));
        }
      }
      owned += states.owned_bytes() / 4;
    }
    for (size_t p = 0; p < has.size(); ++p) of_all += layout.rows()[p].numel;
    EXPECT_GE(owned, of_all);
    EXPECT_LT(owned, of_all + 8 * c.ranks * std::ssize(has));  // the alignment of pieces
  }
}

// Codes, followed by their scales, beside bf16 and fp32: nothing overlaps, no block is cut, and the part that a rank
// owns of a state that it holds whole is inside that state.
TEST(StateLayout, OfCodesHasTheirScalesToo) {
  const model::Model model = model::make_model(tiny(), 8);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage, .block = kStateBlock});
    const size_t params = layout.rows().size();
    const std::vector<StateSet> has(params, state_set({State::Master, State::ExpAvg, State::ExpAvgSq}));
    std::vector<PerState<DType>> dtypes(params);
    constexpr DType kFirst[] = {DType::I8, DType::BF16, DType::F32};
    for (size_t p = 0; p < params; ++p) {
      dtypes[p][State::ExpAvg] = kFirst[p % 3];
      dtypes[p][State::ExpAvgSq] = p % 3 == 0 ? DType::U8 : kFirst[p % 3];
    }
    i64 owned = 0, least = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, has, dtypes);
      EXPECT_EQ(states.bytes(State::Master), layout.shard_elems() * 4);
      for (const State s : {State::ExpAvg, State::ExpAvgSq}) {
        std::map<i64, i64> places;
        for (const Piece& p : layout.held_pieces(r)) {
          const DType t = states.dtype(s, p.param);
          EXPECT_EQ(t, dtypes[p.param][s]);
          EXPECT_EQ(p.begin % kStateBlock, 0);
          EXPECT_TRUE(places.emplace(states.offset(s, p), states.offset(s, p) + p.count * dtype_bytes(t)).second);
          if (!is_coded(t)) continue;
          const i64 scales = states.scales_offset(s, p);
          EXPECT_EQ(scales % 32, 0);
          EXPECT_TRUE(places.emplace(scales, scales + state_blocks(p.count) * 4).second);
        }
        i64 end = 0;
        for (const auto& [begin, stop] : places) {
          EXPECT_GE(begin, end);
          end = stop;
        }
        EXPECT_LE(end, states.bytes(s));
        EXPECT_GT(end, states.bytes(s) - 32);
        for (const Piece& p : layout.owned_pieces(r)) {
          EXPECT_EQ(p.begin % kStateBlock, 0);
          if (!is_coded(states.dtype(s, p.param))) continue;
          Piece whole = p;
          for (const Piece& held : layout.held_pieces(r)) whole = held.param == p.param ? held : whole;
          EXPECT_EQ(states.offset(s, p) - states.offset(s, whole), p.begin - whole.begin);
          EXPECT_EQ(states.scales_offset(s, p) - states.scales_offset(s, whole), (p.begin - whole.begin) / 256 * 4);
        }
      }
      owned += states.owned_bytes() - [&] {
        i64 slices = 0;
        for (const Segment& s : layout.segments()) slices += s.slice;
        return slices * 4;
      }();
    }
    for (size_t p = 0; p < params; ++p) {
      const i64 n = layout.rows()[p].numel;
      least += p % 3 == 0 ? 2 * n + 2 * 4 * state_blocks(n) : p % 3 == 1 ? 4 * n : 8 * n;
    }
    EXPECT_GE(owned, least);
    EXPECT_LT(owned, least + 4 * 32 * c.ranks * static_cast<i64>(params));
  }
}

}  // namespace state_layout_test
}  // namespace ds::zero
