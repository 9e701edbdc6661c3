// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/deepspeed_layout.h"

#include <algorithm>

namespace ds {
namespace {

// Calls body(i, offset in tensor i, count, elements before) for the tensors that hold [offset, offset + num_elems) of
// their concatenation.
template <class F>
void for_each_part(i64 offset, i64 num_elems, std::span<const i64> elems, F&& body) {
  i64 start = 0, done = 0;
  for (size_t i = 0; i < elems.size() && done < num_elems; start += elems[i], ++i) {
    const i64 from = offset + done;
    if (from >= start + elems[i]) continue;
    const i64 n = std::min(num_elems - done, start + elems[i] - from);
    body(static_cast<i64>(i), from - start, n, done);
    done += n;
  }
  DS_ASSERT(done == num_elems);
}

}  // namespace

std::vector<FlatPiece> partitioned_pieces(i64 offset, i64 num_elems, i64 group, std::span<const i64> partition_elems) {
  std::vector<FlatPiece> pieces;
  for_each_part(offset, num_elems, partition_elems, [&](i64 rank, i64 at, i64 n, i64 begin) {
    pieces.push_back({begin, n, rank, group, at});
  });
  return pieces;
}

std::vector<FlatPiece> chunked_pieces(i64 offset, i64 num_elems, i64 num_ranks, std::span<const i64> flat_elems) {
  const i64 chunk = div_ceil(num_elems, num_ranks);
  std::vector<FlatPiece> pieces;
  for (i64 rank = 0; rank < num_ranks && rank * chunk < num_elems; ++rank) {
    const i64 first = rank * chunk, count = std::min(chunk, num_elems - first);
    for_each_part(offset, count, flat_elems, [&](i64 flat, i64 at, i64 n, i64 done) {
      pieces.push_back({first + done, n, rank, flat, at});
    });
  }
  return pieces;
}

std::vector<FlatPiece> pieces_within(std::span<const FlatPiece> pieces, i64 first, i64 count) {
  std::vector<FlatPiece> part;
  for (const FlatPiece& p : pieces) {
    const i64 begin = std::max(p.begin, first), end = std::min(p.begin + p.count, first + count);
    if (begin < end) part.push_back({begin - first, end - begin, p.rank, p.flat, p.offset + begin - p.begin});
  }
  return part;
}

}  // namespace ds
