// SPDX-License-Identifier: Apache-2.0
#include "zero/state_layout.h"

#include <algorithm>

#include "base/check.h"

namespace ds::zero {
namespace {

constexpr i64 kAlignment = 32;  // bytes: of vectors, and of kRowAlignment elements in fp32

}  // namespace

StateLayout::StateLayout(const Layout& layout, int rank, std::vector<StateSet> has, std::vector<PerState<DType>> dtypes,
                         StateSet whole)
    : trained_(has.size(), false), has_(std::move(has)), dtypes_(std::move(dtypes)), whole_(whole) {
  StateSet somewhere;
  for (const State s : kStates) everywhere_[s] = true;
  for (size_t p = 0; p < has_.size(); ++p) {
    const RowPlace& row = layout.rows()[p];
    trained_[p] = row.segment >= 0 && layout.segments()[row.segment].trained;
    DS_ASSERT(trained_[p] || row.segment < 0 || has_[p] == StateSet{});
    if (!trained_[p]) continue;
    for (const State s : kStates) {
      everywhere_[s] &= has_[p][s] && dtypes_[p][s] == DType::F32;
      somewhere[s] |= has_[p][s];
      DS_ASSERT(!has_[p][s] || !is_coded(dtypes_[p][s]) || layout.options().block % kStateBlock == 0);
    }
  }
  own_masters_ = !somewhere[State::Master];
  const std::vector<Piece> held = layout.held_pieces(rank), owned = layout.owned_pieces(rank);
  for (const Piece& piece : held) {
    first_held_.resize(static_cast<size_t>(piece.param) + 1, std::ssize(held_));
    held_.push_back({.begin = piece.begin, .offsets = {}, .scales = {}});
  }
  first_held_.resize(has_.size() + 1, std::ssize(held_));
  i64 slices = 0;
  for (const Segment& s : layout.segments()) {
    whole_bases_.push_back(slices * layout.num_ranks());
    slices += s.trained ? s.slice : 0;
  }
  for (const State s : kStates) {
    if (s == State::Param || !somewhere[s]) continue;
    if (whole_[s]) {
      bytes_[s] = slices * layout.num_ranks() * 4;
      owned_bytes_ += slices * 4;
      continue;
    }
    if (everywhere_[s]) {
      bytes_[s] = layout.shard_elems() * 4;
      owned_bytes_ += slices * 4;
      continue;
    }
    const auto place = [&](const std::vector<Piece>& pieces, auto&& visit) {
      i64 at = 0;
      for (const Piece& piece : pieces) {
        if (!has_[piece.param][s]) continue;
        const DType t = dtype(s, piece.param);
        const i64 scales = at + align_up(piece.count * dtype_bytes(t), kAlignment);
        visit(&piece - pieces.data(), at, scales);
        at = scales + (is_coded(t) ? align_up(state_blocks(piece.count) * 4, kAlignment) : 0);
      }
      return at;
    };
    bytes_[s] = place(held, [&](i64 piece, i64 at, i64 scales) {
      held_[piece].offsets[s] = at;
      held_[piece].scales[s] = scales;
    });
    owned_bytes_ += place(owned, [](i64, i64, i64) {});
  }
}

std::vector<i64> StateLayout::bytes_of_ranks(const Layout& layout) const {
  std::vector<i64> bytes;
  if (!layout.states().shard_optimizer) return bytes;
  for (const RowPlace& row : layout.places()) {
    i64 width = 0;
    for (const State s : kStates) {
      if (bytes_[s] > 0 && !everywhere_[s] && !whole_[s] && has(s, row.param))
        width += dtype_bytes(dtype(s, row.param));
    }
    if (width == 0) continue;
    bytes.resize(layout.num_ranks());
    const i64 slice = layout.segments()[row.segment].slice, end = row.offset + row.numel;
    for (i64 at = row.offset; at < end;) {
      const i64 rank = at / slice, next = std::min((rank + 1) * slice, end);
      bytes[rank] += (next - at) * width;
      at = next;
    }
  }
  return bytes;
}

}  // namespace ds::zero
