// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mesh: named axes whose sizes multiply to the world size, and one communicator per axis. Today it has one axis,
// dp.

#include <memory>

#include "comm/communicator.h"

namespace ds {

class Mesh {
 public:
  // Takes the communicator of the whole world; dp is the whole world.
  explicit Mesh(std::unique_ptr<Communicator> world) : world_(std::move(world)) {}

  int rank() const noexcept { return world_->rank(); }
  int world_size() const noexcept { return world_->size(); }
  Communicator& world() const noexcept { return *world_; }
  Communicator& dp() const noexcept { return *world_; }

 private:
  std::unique_ptr<Communicator> world_;
};

}  // namespace ds
