// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the masters and states that a rank keeps away from its device lie there: in chunks, each of which comes and goes
// as one. A chunk has parts of pieces, one after the other in the order of the parameters, that have the same states,
// so that an update finds in it what it needs and nothing else:
//
//   chunk   | master of its parts | pad | exp_avg of its parts | pad | exp_avg_sq ... | pad |
//
// Each state begins at a page; codes have their scales behind them. A pure function.

#include <limits>
#include <span>
#include <vector>

#include "base/file.h"
#include "zero/state_layout.h"

namespace ds::offload {

// A part of a piece, all of it in one chunk.
struct ChunkPart {
  zero::Piece piece;
  i64 chunk = 0;
  PerState<i64> offsets = {}, scales = {};  // bytes from the chunk's begin, of the states that its parameter has
};

struct Chunk {
  i64 at = 0, bytes = 0;  // of the storage; multiples of kPage
  i64 first_part = 0, num_parts = 0;
  i64 elems = 0;
  PerState<i64> state_bytes = {};
};

class ChunkLayout {
 public:
  static constexpr i64 kPage = PageBuffer::kPage;

  // Whether there are masters of fp32 parameters, too, which are their own masters in memory.
  enum class Masters : u8 { AsInMemory, Always };
  // held: all pieces of the rank. most: elements of a chunk, a multiple of kStateBlock.
  ChunkLayout(std::span<const zero::Piece> held, const zero::StateLayout& states, i64 most,
              Masters masters = Masters::AsInMemory);
  // Of chunks of these sizes, multiples of kPage, of which nobody asks here what is in them.
  explicit ChunkLayout(std::span<const i64> chunk_bytes);

  std::span<const Chunk> chunks() const noexcept { return chunks_; }
  std::span<const ChunkPart> parts() const noexcept { return parts_; }
  // Calls visit(part) for what the chunks have of a piece, or of a part of one.
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
  // Of all chunks, by state.
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
