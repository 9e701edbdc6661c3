// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a server does with the chunks of a generation for the ranks of a run: passes of updates, and copies to and from
// the windows of ranks.

#include <map>
#include <vector>

#include "device/device.h"
#include "serve/generation.h"
#include "zero/state_store.h"

namespace ds::serve {

class Passes {
 public:
  // The generation's ranks have paths of segments, which are opened. Both outlive it.
  Passes(Generation& generation, const std::vector<RankLayout>& ranks, Device& device);

  i64 define_tile(i64 rank, i64 set, std::vector<offload::ServedPiece> pieces);
  struct Run {
    i64 rank;
    offload::ServedRun run;
  };
  // In the order given, for each part of the states; chunk by chunk. `skip`: what is of this step already.
  enum class Params : u8 { Write, LeaveOut };
  void execute(std::span<const Run> runs, Params params, std::optional<u32> skip = {});

  struct Range {
    i64 set, param, begin, count;
    StateSet states;
  };
  void read(i64 rank, const Range& range);
  void write(i64 rank, const Range& range);

  // A step that is decided, as it outlives the server: its record and what is to be run, with the tiles.
  std::string pending_text(const offload::ServedRecord& record, std::span<const Run> runs) const;

 private:
  struct Set {
    const offload::ServedSet* cut;
    offload::Segment window, gradients;
    std::map<i64, size_t> first_part;  // by parameter
    float* gradient(const offload::ServedPart& p, i64 at) const noexcept {
      char* const base = gradients.data() != nullptr ? gradients.data() : window.data();
      return reinterpret_cast<float*>(base + p.gradient) + at;
    }
  };
  struct Item {
    i64 part, piece, begin, count;  // of the set's parts, of the tile's pieces; elements
  };
  struct Tile {
    i64 set;
    std::vector<offload::ServedPiece> pieces;
    std::vector<Item> items;  // by chunk
  };
  template <class Visit>
  void for_each_part(const Set& set, i64 param, i64 begin, i64 count, Visit&& visit) const;
  void run_items(const Set& set, const Tile& tile, std::span<const Item> items, const offload::ServedRun& run,
                 char* chunk, Params params);
  enum class Way : u8 { ToWindow, ToChunks };
  void move(i64 rank, const Range& range, Way way);
  Set& set_of(i64 rank, i64 set);
  const Tile& tile_of(i64 rank, i64 tile) const;

  Generation& generation_;
  Device& device_;
  std::vector<std::vector<Set>> sets_;    // by rank
  std::vector<std::vector<Tile>> tiles_;  // by rank
  bool backward_ = false;
  std::vector<zero::TilePiece> scratch_;
  std::vector<UpdateTensor> tensors_;
};

// Ends a step that was decided, and whose server ended before it was done; forgets one that was not. At a start.
void recover(Generation& generation, Device& device);

}  // namespace ds::serve
