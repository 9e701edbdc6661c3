// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a rank keeps the states of its pieces of parameters: one array for each state, cut as Layout says. A state
// that every parameter has lies as the layout's shard arrays do. Of one that only some have, piece follows piece, each
// at a multiple of 8 elements. A pure function of the layout, the rank and what each parameter has.

#include <span>
#include <vector>

#include "ds/state.h"
#include "zero/layout.h"

namespace ds::zero {

class StateLayout {
 public:
  StateLayout() = default;
  // has[p]: the states of parameter p, Master among them.
  StateLayout(const Layout& layout, int rank, std::vector<StateSet> has);

  bool has(State s, i64 param) const noexcept { return has_[static_cast<size_t>(param)][s]; }
  const std::vector<StateSet>& of_params() const noexcept { return has_; }
  // Elements of this rank's array; 0: there is none.
  i64 elems(State s) const noexcept { return elems_[s]; }
  // Where the state of a piece, held by this rank, lies in it; the parameter has it.
  i64 offset(State s, const Piece& piece) const noexcept {
    if (everywhere_[s]) return piece.shard_offset;
    const Held& held = held_[static_cast<size_t>(piece.param)];
    return held.offsets[s] + piece.begin - held.begin;
  }
  // Elements of all states, Master included, of the slices that one rank owns.
  i64 owned_elems() const noexcept { return owned_elems_; }

 private:
  struct Held {
    i64 begin = 0;  // of the only piece that a rank holds of a parameter
    PerState<i64> offsets;
  };
  std::vector<StateSet> has_;
  StateSet everywhere_;
  PerState<i64> elems_;
  std::vector<Held> held_;  // by parameter
  i64 owned_elems_ = 0;
};

}  // namespace ds::zero
