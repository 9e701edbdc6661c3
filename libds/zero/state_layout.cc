// SPDX-License-Identifier: Apache-2.0
#include "zero/state_layout.h"

#include "base/check.h"

namespace ds::zero {
namespace {

constexpr i64 kAlignment = 8;  // elements: 16 bytes in 16 bit, as of rows

}  // namespace

StateLayout::StateLayout(const Layout& layout, int rank, std::vector<StateSet> has)
    : has_(std::move(has)), held_(has_.size()) {
  StateSet somewhere;
  for (const State s : kStates) everywhere_[s] = true;
  for (size_t p = 0; p < has_.size(); ++p) {
    if (layout.rows()[p].segment < 0) continue;
    for (const State s : kStates) {
      everywhere_[s] &= has_[p][s];
      somewhere[s] |= has_[p][s];
    }
  }
  i64 slices = 0;
  for (const Segment& s : layout.segments()) slices += s.slice;
  for (const State s : kStates) {
    if (s == State::Param || !somewhere[s]) continue;
    if (everywhere_[s]) {
      elems_[s] = layout.shard_elems();
      owned_elems_ += slices;
      continue;
    }
    const auto place = [&](const std::vector<Piece>& pieces, auto&& visit) {
      i64 at = 0;
      for (const Piece& piece : pieces) {
        if (!has_[static_cast<size_t>(piece.param)][s]) continue;
        visit(piece, at);
        at += align_up(piece.count, kAlignment);
      }
      return at;
    };
    elems_[s] = place(layout.held_pieces(rank), [&](const Piece& piece, i64 at) {
      Held& held = held_[static_cast<size_t>(piece.param)];
      held.begin = piece.begin;
      held.offsets[s] = at;
    });
    owned_elems_ += place(layout.owned_pieces(rank), [](const Piece&, i64) {});
  }
}

}  // namespace ds::zero
