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

// A state that every parameter has lies as the master does.
TEST(StateLayout, OfAllParametersIsTheLayouts) {
  const model::Model model = model::make_model(tiny(), 8);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage});
    const StateSet both = state_set({State::Master, State::ExpAvg});
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, std::vector<StateSet>(layout.rows().size(), both));
      EXPECT_EQ(states.elems(State::ExpAvg), layout.shard_elems());
      EXPECT_EQ(states.elems(State::ExpAvgSq), 0);
      for (const Piece& p : layout.held_pieces(r)) EXPECT_EQ(states.offset(State::ExpAvg, p), p.shard_offset);
      i64 slices = 0;
      for (const Segment& s : layout.segments()) slices += s.slice;
      EXPECT_EQ(states.owned_elems(), 2 * slices);
    }
  }
}

// One that only some have: every element of theirs has a place of its own, and others have none.
TEST(StateLayout, OfSomeParametersHasTheirElementsAndNoOthers) {
  const model::Model model = model::make_model(tiny(), 8);
  const Units units = units_of(model);
  for (const Case c : {Case{1, 0}, {3, 0}, {3, 1}, {4, 3}}) {
    const Layout layout = Layout::make(units, {.num_ranks = c.ranks, .stage = c.stage});
    std::vector<StateSet> has(layout.rows().size());
    for (size_t p = 0; p < has.size(); ++p) has[p][p % 3 == 0 ? State::MomentumBuffer : State::ExpAvg] = true;
    i64 owned = 0, of_all = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const StateLayout states(layout, r, has);
      for (const State s : {State::MomentumBuffer, State::ExpAvg}) {
        std::map<i64, i64> places;  // begin -> end
        i64 elems = 0;
        for (const Piece& p : layout.held_pieces(r)) {
          EXPECT_EQ(states.has(s, p.param), has[static_cast<size_t>(p.param)][s]);
          if (!states.has(s, p.param)) continue;
          const i64 at = states.offset(s, p);
          EXPECT_EQ(at % 8, 0);
          EXPECT_TRUE(places.emplace(at, at + p.count).second);
          elems += align_up(p.count, 8);
        }
        EXPECT_EQ(states.elems(s), elems);
        i64 end = 0;
        for (const auto& [begin, stop] : places) {
          EXPECT_GE(begin, end);
          end = stop;
        }
        EXPECT_LE(end, states.elems(s));
        // What a rank owns of what it holds whole lies inside it.
        for (const Piece& p : layout.owned_pieces(r)) {
          if (!states.has(s, p.param)) continue;
          EXPECT_LE(states.offset(s, p) + p.count, states.elems(s));
        }
      }
      owned += states.owned_elems();
    }
    for (size_t p = 0; p < has.size(); ++p) of_all += layout.rows()[p].numel;
    EXPECT_GE(owned, of_all);
    EXPECT_LT(owned, of_all + 8 * c.ranks * std::ssize(has));  // the alignment of pieces
  }
}

}  // namespace state_layout_test
}  // namespace ds::zero
