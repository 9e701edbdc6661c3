// SPDX-License-Identifier: Apache-2.0
#pragma once
// The offsets of the states of a rank's pieces of trained parameters in memory: one array for each state. A state that
// each of them has in fp32 has the order of the layout's shard arrays. In other arrays piece follows piece, each at a
// multiple of 32 bytes, and after it the scales of its codes, aligned likewise. A state that every rank holds whole
// (the momentum of 1-bit Adam) has the order of all slices of all segments. A pure function of the layout, the rank and
// the states of each parameter.

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
  // has[p]: the states of parameter p, including Master, and none if it is not trained; dtypes[p]: the dtypes in which
  // they are stored. The layout cuts no block of codes. whole: fp32 states that every rank holds of all parameters,
  // whichever rank owns them.
  StateLayout(const Layout& layout, int rank, std::vector<StateSet> has, std::vector<PerState<DType>> dtypes,
              StateSet whole = {});

  // The parameter must have a place here.
  bool is_trained(i64 param) const noexcept { return trained_[static_cast<size_t>(param)]; }
  bool has(State s, i64 param) const noexcept { return has_[param][s]; }
  const std::vector<StateSet>& of_params() const noexcept { return has_; }
  DType dtype(State s, i64 param) const noexcept { return dtypes_[param][s]; }
  // Whether parameters are their own masters, in the work dtype: then none has State::Master.
  bool own_masters() const noexcept { return own_masters_; }
  // Bytes of this rank's array; 0: there is none.
  i64 bytes(State s) const noexcept { return bytes_[s]; }
  bool is_whole(State s) const noexcept { return whole_[s]; }
  // The byte offset of a state in its array, for a piece that this rank holds (any piece, if the state is whole) of a
  // parameter that has the state; and of the scales of its codes.
  i64 offset(State s, const Piece& piece) const noexcept {
    if (whole_[s]) return (whole_bases_[piece.segment] + piece.segment_offset) * 4;
    if (everywhere_[s]) return piece.shard_offset * 4;
    const Held& held = held_of(piece);
    return held.offsets[s] + (piece.begin - held.begin) * dtype_bytes(dtype(s, piece.param));
  }
  i64 scales_offset(State s, const Piece& piece) const noexcept {
    const Held& held = held_of(piece);
    return held.scales[s] + (piece.begin - held.begin) / kStateBlock * 4;
  }
  // By rank of the layout: bytes of the states that not every parameter has in fp32, without alignment; empty: all
  // ranks hold the same.
  std::vector<i64> bytes_of_ranks(const Layout& layout) const;
  // Bytes of all states, including Master, of the slices that one rank owns.
  i64 owned_bytes() const noexcept { return owned_bytes_; }

 private:
  struct Held {
    i64 begin = 0;  // of the piece; a parameter in tiles has several pieces on a rank
    PerState<i64> offsets, scales;
  };
  const Held& held_of(const Piece& piece) const noexcept {
    const auto first = held_.begin() + first_held_[piece.param], last = held_.begin() + first_held_[piece.param + 1];
    return *std::prev(std::ranges::upper_bound(first, last, piece.begin, {}, &Held::begin));
  }
  std::vector<bool> trained_;  // by parameter
  std::vector<StateSet> has_;
  std::vector<PerState<DType>> dtypes_;
  StateSet everywhere_;  // in fp32
  StateSet whole_;
  std::vector<i64> whole_bases_;  // by segment, elements
  bool own_masters_ = true;
  PerState<i64> bytes_;
  std::vector<Held> held_;       // in the order of parameters
  std::vector<i64> first_held_;  // by parameter, then the end
  i64 owned_bytes_ = 0;
};

}  // namespace ds::zero
