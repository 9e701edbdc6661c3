// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a rank keeps the states of its pieces of parameters: one array for each state, cut as Layout says. A state
// that every parameter has in fp32 lies as the layout's shard arrays do. Of any other, piece follows piece, each at a
// multiple of 32 bytes, and so are the scales of its codes behind it. A state that every rank has whole (the momentum
// of 1-bit Adam) lies as all slices of all segments do. A pure function of the layout, the rank and what each parameter
// has.

#include <algorithm>
#include <span>
#include <vector>

#include "ds/kernels/state_codes.h"
#include "ds/state.h"
#include "zero/layout.h"

namespace ds::zero {

class StateLayout {
 public:
  StateLayout() = default;
  // has[p]: the states of parameter p, Master among them; dtypes[p]: what they are kept as. Of codes the layout cuts no
  // block. whole: those in fp32 that every rank has of all parameters, whoever owns them.
  StateLayout(const Layout& layout, int rank, std::vector<StateSet> has, std::vector<PerState<DType>> dtypes,
              StateSet whole = {});

  bool has(State s, i64 param) const noexcept { return has_[param][s]; }
  const std::vector<StateSet>& of_params() const noexcept { return has_; }
  DType dtype(State s, i64 param) const noexcept { return dtypes_[param][s]; }
  // Whether parameters are their own masters, in the work dtype: then none has State::Master.
  bool own_masters() const noexcept { return own_masters_; }
  // Of this rank's array; 0: there is none.
  i64 bytes(State s) const noexcept { return bytes_[s]; }
  bool is_whole(State s) const noexcept { return whole_[s]; }
  // Where the state of a piece, held by this rank (or by any, if it is whole), lies in it, in bytes; the parameter has
  // it.
  i64 offset(State s, const Piece& piece) const noexcept {
    if (whole_[s]) return (whole_bases_[piece.segment] + piece.segment_offset) * 4;
    if (everywhere_[s]) return piece.shard_offset * 4;
    const Held& held = held_of(piece);
    return held.offsets[s] + (piece.begin - held.begin) * dtype_bytes(dtype(s, piece.param));
  }
  // The same of the scales of codes.
  i64 scales_offset(State s, const Piece& piece) const noexcept {
    const Held& held = held_of(piece);
    return held.scales[s] + (piece.begin - held.begin) / kStateBlock * 4;
  }
  // Of each rank of the layout, the bytes of the states that not every parameter has in fp32, but for alignment; empty:
  // ranks hold the same.
  std::vector<i64> bytes_of_ranks(const Layout& layout) const;
  // Of all states, Master included, of the slices that one rank owns.
  i64 owned_bytes() const noexcept { return owned_bytes_; }

 private:
  struct Held {
    i64 begin = 0;  // of a piece that a rank holds of a parameter: there are several of one in tiles
    PerState<i64> offsets, scales;
  };
  const Held& held_of(const Piece& piece) const noexcept {
    const auto first = held_.begin() + first_held_[piece.param], last = held_.begin() + first_held_[piece.param + 1];
    return *std::prev(std::ranges::upper_bound(first, last, piece.begin, {}, &Held::begin));
  }
  std::vector<StateSet> has_;
  std::vector<PerState<DType>> dtypes_;
  StateSet everywhere_;  // in fp32
  StateSet whole_;
  std::vector<i64> whole_bases_;  // by segment, elements
  bool own_masters_ = true;
  PerState<i64> bytes_;
  std::vector<Held> held_;       // in the order of parameters
  std::vector<i64> first_held_;  // by parameter, and behind the last one
  i64 owned_bytes_ = 0;
};

}  // namespace ds::zero
