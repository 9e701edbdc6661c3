// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of some pieces in host memory: either the memory that the engine computes with, if the host can read it and
// states are stored there (StateStore::in_place); or a copy, under Tag::Host for the object's life; or, for callers
// that work part by part, one part at a time (StatePiece::open), which is a copy of that part if the device is a GPU.

#include <optional>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::engine {

class HostState {
 public:
  // InPlace, InParts: the engine's own memory, if possible; else a copy, or one part at a time.
  enum class Memory { InPlace, InParts, Copy };
  HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory = Memory::InPlace);
  std::span<const StatePiece> pieces() const noexcept { return pieces_; }
  // Engine::rank_local() in the host's memory, as of the last download.
  const std::vector<RankLocal>& rank_local() const noexcept { return rank_local_; }
  void download();  // from the tier
  void upload();    // to the tier; parts are complete when this returns

 private:
  // Copies between host and device memory.
  using Move = FunctionRef<void(void* host, void* device, i64 bytes)>;
  void download_rank_local();
  void open_in_parts(StatePiece& p, const zero::Piece& piece);
  void close_part();
  // Assigns memory to pieces; returns how many bytes they need. memory: null to count only.
  i64 place(std::span<StatePiece> pieces, char* memory) const;
  // Moves elements [first, first + count) of a piece between host memory and a lease of its state on the device.
  void move_part(const StatePiece& host, i64 first, i64 count, const zero::StateLease& device, Move move) const;
  // Moves all pieces, part by part.
  void move_all(zero::LeaseTo access, Move move);
  void download(void* host, void* device, i64 bytes) { engine_.device().download(host, device, bytes); }
  void upload(void* host, void* device, i64 bytes) { engine_.device().upload(device, host, bytes); }

  Engine& engine_;
  std::vector<zero::Piece> where_;
  std::vector<StatePiece> pieces_;
  std::vector<RankLocal> rank_local_;
  Buffer memory_;                         // of the copy, or of a part; arrays of rank_local_ are at the end of a copy
  i64 pieces_bytes_ = 0;                  // bytes of pieces in a copy
  std::optional<zero::StateLease> part_;  // the open part
  StatePiece copy_;                       // host copy of the open part, if the device is a GPU
  bool fills_ = false;                    // the open part is uploaded when it is closed
  bool in_parts_ = false;
};

}  // namespace ds::engine
