// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state of some pieces as host memory: that which the engine computes with, where the host can read it and it stays
// where it is (StateStore::in_place), or a copy of what this rank owns. A copy is taken under Tag::Host for the
// object's life.

#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::engine {

class HostState {
 public:
  enum class Memory { InPlace, Copy };
  HostState(Engine& engine, std::vector<zero::Piece> pieces, Memory memory = Memory::InPlace);
  std::span<const StatePiece> pieces() const noexcept { return pieces_; }
  void download();  // from the tier
  void upload();    // to the tier

 private:
  // Gives the pieces their places in memory; returns how much they take.
  i64 place(char* memory);
  // Calls move(host, device, bytes) for each part of each piece's state, with a lease on it.
  void for_each_part(zero::LeaseTo access, FunctionRef<void(void*, void*, i64)> move);

  Engine& engine_;
  std::vector<zero::Piece> where_;
  std::vector<StatePiece> pieces_;
  Buffer memory_;
};

}  // namespace ds::engine
