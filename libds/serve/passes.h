// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work of a server on the chunks of a generation: passes of updates, and copies to and from the windows of ranks.

#include <map>
#include <vector>

#include "device/device.h"
#include "serve/generation.h"
#include "zero/state_store.h"

namespace ds::serve {

class Passes {
 public:
  // Opens the segments that the generation's ranks name. Both arguments outlive it.
  Passes(Generation& generation, const std::vector<RankLayout>& ranks, Device& device);

  i64 define_tile(i64 rank, i64 set, std::vector<offload::ServedPiece> pieces);
  struct Run {
    i64 rank;
    offload::ServedRun run;
  };
  // Runs passes in the given order for each part of the states, chunk by chunk. `skip`: chunks that are already of this
  // step.
  enum class Params : u8 { Write, LeaveOut };
  void execute(std::span<const Run> runs, Params params, std::optional<u32> skip = {});

  struct Range {
    i64 set, param, begin, count;
    StateSet states;
  };
  void read(i64 rank, const Range& range);
  void write(i64 rank, const Range& range);

  // A committed step in a form that outlives the server: its record, and the passes to run with their tiles.
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
    i64 part, piece, begin, count;  // index in the set's parts, in the tile's pieces; range of elements
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

// At the start of a server: completes a step that was committed but not completed, and forgets one that was not
// committed.
void recover(Generation& generation, Device& device);

}  // namespace ds::serve
