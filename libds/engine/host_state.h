// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of some pieces as host memory: that which the engine computes with, where the host can read it and it stays
// where it is (StateStore::in_place); a copy, taken under Tag::Host for the object's life; or, for who can take it part
// by part, no more than a part at a time (StatePiece::open), which beside a GPU is a copy of that part.

#include <optional>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::engine {

class HostState {
 public:
  // InPlace, InParts: where states are in place of the host, that; else a copy, or parts.
  enum class Memory { InPlace, InParts, Copy };
  HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory = Memory::InPlace);
  std::span<const StatePiece> pieces() const noexcept { return pieces_; }
  // Engine::rank_local() in the host's memory, as of the last download.
  const std::vector<RankLocal>& rank_local() const noexcept { return rank_local_; }
  void download();  // from the tier
  void upload();    // to the tier; in parts, it is there already when this returns

 private:
  // Of the host's memory and the device's.
  using Move = FunctionRef<void(void* host, void* device, i64 bytes)>;
  void download_rank_local();
  void open_in_parts(StatePiece& p, const zero::Piece& piece);
  void close_part();
  // Gives pieces their places in memory; returns how much they take.
  i64 place(std::span<StatePiece> pieces, char* memory) const;
  // Elements [first, first + count) of a piece in the host's memory, whose state on the device is in the lease.
  void move_part(const StatePiece& host, i64 first, i64 count, const zero::StateLease& device, Move move) const;
  // For each part of each piece.
  void move_all(zero::LeaseTo access, Move move);
  void download(void* host, void* device, i64 bytes) { engine_.device().download(host, device, bytes); }
  void upload(void* host, void* device, i64 bytes) { engine_.device().upload(device, host, bytes); }

  Engine& engine_;
  std::vector<zero::Piece> where_;
  std::vector<StatePiece> pieces_;
  std::vector<RankLocal> rank_local_;
  Buffer memory_;                         // of the copy, or of a part's; at its end what is rank-local
  i64 pieces_bytes_ = 0;                  // of the former
  std::optional<zero::StateLease> part_;  // that is open
  StatePiece copy_;                       // of that part, beside a GPU
  bool fills_ = false;                    // the part, which then goes to the GPU when it is closed
  bool in_parts_ = false;
};

}  // namespace ds::engine
