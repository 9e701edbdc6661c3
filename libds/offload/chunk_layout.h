// SPDX-License-Identifier: Apache-2.0
#pragma once
// The layout of offloaded master weights and optimizer states: chunks, each of which is transferred as one. A chunk
// contains parts of pieces with the same states, in the order of the parameters, so it contains exactly what an update
// needs:
//
//   chunk   | master of its parts | pad | exp_avg of its parts | pad | exp_avg_sq ... | pad |
//
// Each state begins at a page; codes are followed by their scales. A pure function.

#include <limits>
#include <span>
#include <vector>

#include "base/file.h"
#include "zero/state_layout.h"

namespace ds::offload {

// A part of a piece within one chunk.
struct ChunkPart {
  zero::Piece piece;
  i64 chunk = 0;
  PerState<i64> offsets = {}, scales = {};  // bytes from the start of the chunk, for the states that its parameter has
};

struct Chunk {
  i64 at = 0, bytes = 0;  // in the storage; multiples of kPage
  i64 first_part = 0, num_parts = 0;
  i64 elems = 0;
  PerState<i64> state_bytes = {};
};

class ChunkLayout {
 public:
  static constexpr i64 kPage = PageBuffer::kPage;

  // Whether fp32 parameters, which are their own masters in memory, have masters too.
  enum class Masters : u8 { AsInMemory, Always };
  // held: all pieces of the rank. most: the most elements of a chunk, a multiple of kStateBlock.
  ChunkLayout(std::span<const zero::Piece> held, const zero::StateLayout& states, i64 most,
              Masters masters = Masters::AsInMemory);
  // A layout of chunks of these sizes, multiples of kPage, without their parts.
  explicit ChunkLayout(std::span<const i64> chunk_bytes);

  std::span<const Chunk> chunks() const noexcept { return chunks_; }
  std::span<const ChunkPart> parts() const noexcept { return parts_; }
  // Calls visit(part) for each part of a piece, or of a range of one.
  void for_each_part(const zero::Piece& piece, auto&& visit) const {
    const std::span<const ChunkPart> all = parts();
    for (size_t i = first_part_of_[piece.param]; i < all.size() && all[i].piece.param == piece.param; ++i) {
      const zero::Piece& there = all[i].piece;
      const i64 begin = std::max(piece.begin, there.begin),
                end = std::min(piece.begin + piece.count, there.begin + there.count);
      if (begin >= end) continue;
      ChunkPart part = all[i];
      part.piece = there.part(begin - there.begin, end - begin);
      for (const State s : kStates) {
        part.offsets[s] += (begin - there.begin) * dtype_bytes(states_->dtype(s, piece.param));
        part.scales[s] += (begin - there.begin) / kStateBlock * 4;
      }
      visit(part);
    }
  }
  i64 bytes() const noexcept { return bytes_; }  // of all chunks
  i64 begin_of(i64 chunk) const noexcept { return chunk < std::ssize(chunks_) ? chunks_[chunk].at : bytes_; }
  i64 largest_bytes() const noexcept { return largest_bytes_; }  // of one
  // Bytes of all chunks, by state.
  const PerState<i64>& state_bytes() const noexcept { return state_bytes_; }

 private:
  static constexpr size_t kNoPart = std::numeric_limits<size_t>::max();
  const zero::StateLayout* states_ = nullptr;
  std::vector<Chunk> chunks_;
  std::vector<ChunkPart> parts_;       // chunk after chunk
  std::vector<size_t> first_part_of_;  // by parameter
  i64 bytes_ = 0, largest_bytes_ = 0;
  PerState<i64> state_bytes_;
};

}  // namespace ds::offload
