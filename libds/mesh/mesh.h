// SPDX-License-Identifier: Apache-2.0
#pragma once
// The mesh: named axes whose sizes multiply to the world size, and one communicator per axis. Today it has one axis,
// dp. The world talks about host memory (counters, files, who does what); an axis about the memory of its device. On
// the CPU they are one.

#include <memory>

#include "comm/communicator.h"

namespace ds {

class Mesh {
 public:
  // `world`: of the whole world. `dp`: the same ranks on device memory; null: the world itself.
  explicit Mesh(std::unique_ptr<Communicator> world, std::unique_ptr<Communicator> dp = nullptr)
      : world_(std::move(world)), dp_(std::move(dp)) {}

  int rank() const noexcept { return world_->rank(); }
  int world_size() const noexcept { return world_->size(); }
  Communicator& world() const noexcept { return *world_; }
  Communicator& dp() const noexcept { return dp_ ? *dp_ : *world_; }

 private:
  std::unique_ptr<Communicator> world_, dp_;  // dp_ may use world_, and goes first
};

}  // namespace ds
