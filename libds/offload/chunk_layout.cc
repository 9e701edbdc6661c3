// SPDX-License-Identifier: Apache-2.0
#include "offload/chunk_layout.h"

#include <algorithm>

#include "base/check.h"

namespace ds::offload {
namespace {

constexpr i64 kVector = 64;  // bytes: where a state of a part begins

struct Kind {
  StateSet has;
  PerState<DType> dtypes;
  bool operator==(const Kind&) const = default;
};

}  // namespace

ChunkLayout::ChunkLayout(std::span<const i64> chunk_bytes) {
  for (const i64 bytes : chunk_bytes) {
    chunks_.push_back({.at = bytes_, .bytes = bytes});
    bytes_ += bytes;
    largest_bytes_ = std::max(largest_bytes_, bytes);
  }
}

ChunkLayout::ChunkLayout(std::span<const zero::Piece> held, const zero::StateLayout& states, i64 most, Masters masters)
    : states_(&states), first_part_of_(states.of_params().size(), kNoPart) {
  DS_ASSERT(most > 0 && most % kStateBlock == 0);
  const auto stored = [&](State s, i64 param) {
    if (s == State::Master && masters == Masters::Always) return true;
    return s != State::Param && states.bytes(s) > 0 && states.has(s, param);
  };
  // Parameters of one kind follow each other, each kind in the order of the parameters.
  std::vector<Kind> kinds;
  std::vector<std::vector<zero::Piece>> of_kind;
  for (const zero::Piece& piece : held) {
    Kind kind;
    for (const State s : kStates) {
      kind.has[s] = stored(s, piece.param);
      if (kind.has[s]) kind.dtypes[s] = s == State::Master ? DType::F32 : states.dtype(s, piece.param);
    }
    const size_t k = static_cast<size_t>(std::ranges::find(kinds, kind) - kinds.begin());
    if (k == kinds.size()) {
      kinds.push_back(kind);
      of_kind.emplace_back();
    }
    of_kind[k].push_back(piece);
  }

  for (size_t k = 0; k < kinds.size(); ++k) {
    Chunk chunk;
    const auto close = [&] {
      if (chunk.num_parts == 0) return;
      chunk.at = bytes_;
      for (const State s : kStates) {
        if (!kinds[k].has[s]) continue;
        const i64 begin = chunk.bytes;
        for (i64 i = chunk.first_part; i < chunk.first_part + chunk.num_parts; ++i) {
          ChunkPart& part = parts_[static_cast<size_t>(i)];
          const i64 n = part.piece.count;
          part.offsets[s] = chunk.bytes;
          chunk.bytes += align_up(n * dtype_bytes(kinds[k].dtypes[s]), kVector);
          part.scales[s] = chunk.bytes;
          if (is_coded(kinds[k].dtypes[s])) chunk.bytes += align_up(state_blocks(n) * 4, kVector);
        }
        chunk.bytes = align_up(chunk.bytes, kPage);
        chunk.state_bytes[s] = chunk.bytes - begin;
        state_bytes_[s] += chunk.state_bytes[s];
      }
      bytes_ += chunk.bytes;
      largest_bytes_ = std::max(largest_bytes_, chunk.bytes);
      chunks_.push_back(chunk);
    };
    chunk = {.first_part = std::ssize(parts_)};
    for (const zero::Piece& piece : of_kind[k]) {
      for (i64 first = 0; first < piece.count;) {
        // A piece that does not fit begins a new chunk, unless it is larger than a chunk: then it fills this one.
        const i64 room = (most - chunk.elems) / kStateBlock * kStateBlock, left = piece.count - first;
        if (room == 0) {
          close();
          chunk = {.first_part = std::ssize(parts_)};
          continue;
        }
        const i64 n = std::min(left, room);
        // A rank has several consecutive pieces of a tiled parameter.
        size_t& first_part = first_part_of_[piece.param];
        first_part = std::min(first_part, parts_.size());
        parts_.push_back({.piece = piece.part(first, n), .chunk = std::ssize(chunks_)});
        ++chunk.num_parts;
        chunk.elems += n;
        first += n;
      }
    }
    close();
  }
}

}  // namespace ds::offload
