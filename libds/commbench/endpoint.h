// SPDX-License-Identifier: Apache-2.0
#pragma once
// The subject of a measurement: a communicator, the device with its buffers, and the communicator of all ranks.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "ds/commbench.h"
#include "ds/communicator.h"

namespace ds::commbench {

struct Endpoint {
  std::string backend;
  std::unique_ptr<Device> device;             // over host memory: the CPU
  Communicator* world = nullptr;              // over host memory
  std::unique_ptr<Communicator> over_device;  // null: `world` is measured
  Communicator& comm() const noexcept { return over_device ? *over_device : *world; }
};

// The communicators over host memory for endpoints, each made once.
class Worlds {
 public:
  Worlds(const RankInfo& ranks, const CommOptions& options) : ranks_(ranks), options_(options) {}
  // Collective; takes a name of backends(). On several nodes with unequal numbers of ranks "auto" is mpi. Throws
  // Errc::Config for a backend that does not work with these ranks.
  Communicator& get(const std::string& backend);
  // Tells the ranks of all communicators that this rank gives up.
  void abort(const Error& why) noexcept;

 private:
  RankInfo ranks_;
  CommOptions options_;
  std::map<std::string, std::unique_ptr<Communicator>> made_{};
};

// The backend that "auto" means for these ranks.
std::string resolve_backend(const std::string& backend, const RankInfo& ranks);
// Throws Errc::Config for unknown names, and for backends that do not work with these ranks.
void check_backend(const std::string& backend, const RankInfo& ranks);
// Throws Errc::Unavailable if a backend needs GPUs that do not exist.
void check_gpus(const std::string& backend, const RankInfo& ranks);
bool is_over_device(const std::string& backend);  // for a backend that check_backend() accepts
// Collective. Throws Errc::Unavailable if NCCL cannot be loaded, or ranks would share a GPU.
// links: messages that go from GPU to GPU, if the backend can.
Endpoint connect(const std::string& backend, const RankInfo& ranks, Worlds& worlds, const Options& options,
                 const std::vector<MessageLink>& links);

// The place of this rank, and those of all ranks. Collective.
std::vector<RankPlace> gather_places(Communicator& world, const Endpoint& endpoint);

}  // namespace ds::commbench
