// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is measured: a communicator, the device whose memory it is over, and the world behind it.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "ds/commbench.h"

namespace ds::commbench {

struct Endpoint {
  std::string backend;
  std::unique_ptr<Device> device;             // over host memory: the CPU
  Communicator* world = nullptr;              // over host memory
  std::unique_ptr<Communicator> over_device;  // null: what is measured is `world`
  Communicator& comm() const noexcept { return over_device ? *over_device : *world; }
};

// The communicators over host memory that endpoints need, each made once.
class Worlds {
 public:
  Worlds(const RankInfo& ranks, const CommOptions& options) : ranks_(ranks), options_(options) {}
  // Collective; a name of backends(). On several nodes "auto" is mpi where these have unequal numbers of ranks. Throws
  // Errc::Config for a backend that does not serve these ranks.
  Communicator& get(const std::string& backend);
  // All that were made: tells their ranks that this one gives up.
  void abort(const Error& why) noexcept;

 private:
  RankInfo ranks_;
  CommOptions options_;
  std::map<std::string, std::unique_ptr<Communicator>> made_{};
};

// The name that stands for "auto" with these ranks.
std::string resolve_backend(const std::string& backend, const RankInfo& ranks);
// Throws Errc::Config for names that are none and for ranks that a backend does not serve.
void check_backend(const std::string& backend, const RankInfo& ranks);
// Throws Errc::Unavailable where a backend wants GPUs that are not there.
void check_gpus(const std::string& backend, const RankInfo& ranks);
bool is_over_device(const std::string& backend);  // one that check_backend() takes
// Collective. Throws Errc::Unavailable where NCCL cannot be loaded, or ranks would share a GPU.
Endpoint connect(const std::string& backend, const RankInfo& ranks, Worlds& worlds, const Options& options);

// This rank's place, and those of all ranks. Collective.
std::vector<RankPlace> gather_places(Communicator& world, const Endpoint& endpoint);

}  // namespace ds::commbench
