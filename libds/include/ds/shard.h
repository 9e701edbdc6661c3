// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of a model that one rank computes: its share of the matrices (tensor parallelism: Shoeybi et al.,
// "Megatron-LM", 2019) and of the tokens between them (Korthikanti et al., "Reducing Activation Recomputation in Large
// Transformer Models", 2022), and its part of each sequence (Jacobs et al., "DeepSpeed Ulysses", 2023; Liu et al.,
// "Ring Attention", 2023).

#include <array>
#include <compare>
#include <utility>
#include <vector>

#include "ds/axis.h"
#include "ds/error.h"
#include "ds/integers.h"
#include "ds/kernels/tensor.h"

namespace ds {

class Communicator;  // ds/communicator.h

}  // namespace ds

namespace ds::model {

// The part of a parameter that a rank has: the index ranges [begin, end) of `dim`, with all indices of every other dim.
// No ranges: the whole parameter. model/slice.h numbers its elements.
struct ParamSlice {
  int dim = 0;
  std::vector<std::pair<i64, i64>> ranges = {};  // ascending, disjoint and nonempty

  bool whole() const noexcept { return ranges.empty(); }
  auto operator<=>(const ParamSlice&) const = default;
};

// How ranks with parts of a sequence attend to all of it.
enum class SequenceMode : u8 {
  Ulysses,  // exchange heads for tokens: each rank attends to all tokens for some heads
  Ring,     // keys and values travel from rank to rank
};

// Tokens [begin, begin + count) of a sequence.
struct TokenRange {
  i64 begin = 0, count = 0;
};
struct TokenRanges {
  std::array<TokenRange, 2> ranges{};
  size_t num = 1;
  const TokenRange* begin() const noexcept { return ranges.data(); }
  const TokenRange* end() const noexcept { return ranges.data() + num; }
};

struct Shard {
  int tp = 1, tp_rank = 0;
  bool sequence = false;  // between the matrices, each rank of tp has R/tp of the rows
  int sp = 1, sp_rank = 0;
  SequenceMode mode = SequenceMode::Ulysses;
  int ep = 1, ep_rank = 0;  // ranks of dp with different experts
  // The ranks of dp with the same experts, and whether these are neighbours, rather than those with different ones.
  int expert_copies = 1;
  bool copies_first = false;
  double expert_room = 2;     // ExpertParallelConfig::room
  bool expert_rounds = true;  // and further_rounds
  // The ranks of dp and sp together, over which layers add up counts of tokens (BalanceOver::GlobalBatch), and this
  // rank's number among them; 1 if none does.
  int counting = 1, counting_rank = 0;

  int size(Axis axis) const noexcept;  // the number of ranks along one of kLayerAxes
  int rank(Axis axis) const noexcept;  // and this rank's number among them
  bool alone() const noexcept;         // its layers communicate with no other rank

  // Rows of the residual stream on this rank.
  i64 stream_rows(i64 R) const noexcept { return sequence ? R / tp : R; }
  // Rows of memory for a tensor that is cut into tp slices of whole rows.
  i64 padded_rows(i64 R) const noexcept { return align_up(R, tp); }

  // This rank's part of a sequence of T tokens, in order. Ring: chunks r and 2 sp - 1 - r of 2 sp, which balances the
  // work under a causal mask (Brandon et al., "Striped Attention", 2023; zigzag).
  TokenRanges tokens(i64 T) const noexcept {
    const i64 part = T / sp, half = part / 2;
    if (mode == SequenceMode::Ulysses || sp == 1) return {{{{sp_rank * part, part}}}, 1};
    return {{{{sp_rank * half, half}, {(2 * sp - 1 - sp_rank) * half, half}}}, 2};
  }
};

// The axes over which layers communicate. This is their only list: Stage, the dry run and PassContext follow it.
struct LayerAxis {
  Axis axis;
  int Shard::*size;
  int Shard::*rank;
};
inline constexpr LayerAxis kLayerAxes[] = {{Axis::Tp, &Shard::tp, &Shard::tp_rank},
                                           {Axis::Sp, &Shard::sp, &Shard::sp_rank},
                                           {Axis::Ep, &Shard::ep, &Shard::ep_rank},
                                           {Axis::Dp, &Shard::counting, &Shard::counting_rank}};

inline int Shard::size(Axis axis) const noexcept {
  for (const LayerAxis& a : kLayerAxes) {
    if (a.axis == axis) return this->*a.size;
  }
  return 1;
}
inline int Shard::rank(Axis axis) const noexcept {
  for (const LayerAxis& a : kLayerAxes) {
    if (a.axis == axis) return this->*a.rank;
  }
  return 0;
}
inline bool Shard::alone() const noexcept {
  for (const LayerAxis& a : kLayerAxes) {
    if (this->*a.size > 1) return false;
  }
  return true;
}

// Communicators by axis; null where none is known.
using AxisComms = ByAxis<Communicator*>;

// The communicators of a pass, and memory for their messages.
struct Groups {
  Shard shard{};
  AxisComms comms{};        // of kLayerAxes; an axis of one rank may have none
  TensorView partial{};     // [padded R, C] work dtype: this rank's part of a sum over tp
  TensorView sum{};         // [padded R / tp, C] fp32: this rank's rows of the sum
  TensorView gathered{};    // [padded R, C] work dtype: all rows of a cut stream (Shard::sequence)
  TensorView stats{};       // [3, chunk] fp32: for the softmax over a cut vocabulary
  i64 sequence_length = 0;  // of whole sequences: T * sp
  i64 most_rows = 0;        // the largest R for which there is memory

  // There must be one.
  DS_API Communicator& operator[](Axis axis) const;
  // The same groups in a pass over R rows, at most `most_rows`.
  DS_API Groups over(i64 R) const;
};

}  // namespace ds::model
