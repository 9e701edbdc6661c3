// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of some pieces as host memory: that which the engine computes with, where the host can read it and it stays
// where it is (StateStore::in_place); a copy, taken under Tag::Host for the object's life; or, for who can take it part
// by part, no more than a part at a time (StatePiece::open).

#include <optional>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::engine {

class HostState {
 public:
  // InPlace, InParts: where states are in place of the host, that; else a copy, or parts where the device is the host.
  enum class Memory { InPlace, InParts, Copy };
  HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory = Memory::InPlace);
  std::span<const StatePiece> pieces() const noexcept { return pieces_; }
  void download();  // from the tier
  void upload();    // to the tier; in parts, it is there already when this returns

 private:
  void open_in_parts(StatePiece& p, const zero::Piece& piece);
  // Gives the pieces their places in memory; returns how much they take.
  i64 place(char* memory);
  // Calls move(host, device, bytes) for each part of each piece's state, with a lease on it.
  void for_each_part(zero::LeaseTo access, FunctionRef<void(void*, void*, i64)> move);

  Engine& engine_;
  std::vector<zero::Piece> where_;
  std::vector<StatePiece> pieces_;
  Buffer memory_;
  std::optional<zero::StateLease> part_;  // that is open
};

}  // namespace ds::engine
