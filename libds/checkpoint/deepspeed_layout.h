// SPDX-License-Identifier: Apache-2.0
#pragma once
// The places of the elements of a parameter in DeepSpeed's ZeRO: pure functions of shapes, in elements. (ZeRO:
// Rajbhandari et al., 2020, section 5; the layouts are those of DeepSpeed's stage_1_and_2.py and stage3.py.)
//
//   stages 1, 2   a group's parameters follow each other in a flat tensor [p0 p1 p2 ... 0], which is cut into
//                 one partition per rank; ranks at the end may store less than their partition, without the padding
//   stage 3       rank r of P holds elements [r·c, (r+1)·c), c = ceil(n/P), of every parameter, the last chunks padded;
//                 its chunks follow each other in flat tensors, one per sub-group

#include <span>
#include <vector>

#include "base/check.h"

namespace ds {

// Elements [begin, begin + count) of a flattened parameter are at element `offset` of flat tensor `flat` of `rank`.
struct FlatPiece {
  i64 begin, count;
  i64 rank, flat, offset;
  bool operator==(const FlatPiece&) const = default;
};

// Stages 1 and 2: `num_elems` elements from `offset` on in the concatenation of the ranks' partitions of one group.
// Requires: they end before the partitions do.
std::vector<FlatPiece> partitioned_pieces(i64 offset, i64 num_elems, i64 group, std::span<const i64> partition_elems);

// Stage 3: a parameter of `num_elems` elements whose chunks begin at `offset` in the concatenation of each rank's flat
// tensors, which are equally long on all ranks. Requires: offset + ceil(num_elems/num_ranks) is not after their end.
std::vector<FlatPiece> chunked_pieces(i64 offset, i64 num_elems, i64 num_ranks, std::span<const i64> flat_elems);

// The pieces of a part of the parameter, elements [first, first + count), as those of a parameter of its own.
std::vector<FlatPiece> pieces_within(std::span<const FlatPiece> pieces, i64 first, i64 count);

}  // namespace ds
