// SPDX-License-Identifier: Apache-2.0
#include "engine/connect.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <set>

#include <algorithm>

#include "ds/log.h"
#include "model/models.h"
#include "probe/host.h"
#include "report/run_plan.h"

namespace ds::engine {
namespace {

// Whether /dev/shm has room for what a run shares; if not, `why` says so. All ranks get the same answer.
bool fits_shared_memory(const Config& config, const RankInfo& ranks, std::string& why) {
  const model::Model model = model::make_model(config.model, config.data.seq_length);
  const i64 needed = shm_needed_bytes(ranks.world_size, report::make_run_plan(config, model, ranks.world_size).shared);
  const i64 free = shm_free_bytes(ranks.job, ranks.rank, ranks.world_size, config.communication.timeout_s);
  why = fmt::format("{} ranks of this run share {} bytes of memory, and /dev/shm has {} bytes free", ranks.world_size,
                    needed, free);
  return needed <= free;
}

// Over host memory.
std::unique_ptr<Communicator> connect(const Config& config, const RankInfo& ranks, bool with_gpu) {
  const CommOptions options{.timeout_s = config.communication.timeout_s, .progress_thread = config.zero.overlap_comm};
  CommBackend backend = config.communication.backend;
  if (with_gpu) backend = CommBackend::Auto;  // the configuration speaks of the device's memory
  const bool chosen = backend != CommBackend::Auto;
  const bool one_node = ranks.local_world_size == ranks.world_size;
  if (!chosen) {
    backend = ranks.world_size == 1            ? CommBackend::Self
              : one_node && !ranks.job.empty() ? CommBackend::Shm
                                               : CommBackend::Mpi;
  }
  switch (backend) {
    case CommBackend::Self:
      DS_CHECK(ranks.world_size == 1, Errc::Config, "communication.backend \"self\" serves one rank, not {}",
               ranks.world_size);
      return make_self_communicator(options);
    case CommBackend::Shm:
      DS_CHECK(one_node, Errc::Config, "communication.backend \"shm\" serves one node; {} of {} ranks are on this one",
               ranks.local_world_size, ranks.world_size);
      DS_CHECK(!ranks.job.empty(), Errc::Config,
               "communication.backend \"shm\" needs a job name: start with ds-launch");
      if (std::string why; !with_gpu && !fits_shared_memory(config, ranks, why)) {
        DS_CHECK(!chosen, Errc::OutOfMemory, "communication.backend \"shm\": {}; enlarge it, or take \"mpi\"", why);
        if (ranks.rank == 0)
          log_message(LogLevel::Warning,
                      fmt::format("communication.backend \"auto\" takes mpi, which is slower: {}", why));
        break;
      }
      return make_shm_communicator(ranks.job, ranks.rank, ranks.world_size, options);
    case CommBackend::Nccl:
      throw Error(Errc::Unavailable, "communication.backend \"nccl\" talks between GPUs, and this run is on the CPU");
    case CommBackend::Auto:
    case CommBackend::Mpi: break;
  }
  std::unique_ptr<Communicator> comm = make_mpi_communicator(options);
  DS_CHECK(comm->size() == ranks.world_size, Errc::Config,
           "MPI has {} ranks, the environment says {}: start with ds-launch", comm->size(), ranks.world_size);
  return comm;
}

// Over the memory of a GPU.
std::unique_ptr<Communicator> connect_gpus(const Config& config, const RankInfo& ranks, Communicator& world,
                                           Device& device) {
  const CommBackend backend = config.communication.backend;
  const CommOptions options{
      .timeout_s = config.communication.timeout_s, .progress_thread = config.zero.overlap_comm, .device = &device};
  if (ranks.world_size == 1 && backend != CommBackend::Nccl) return make_device_self_communicator(options);
  // By what the GPUs are: a rank may see its own alone, and every rank must come to the same answer.
  std::vector<u64> ids(static_cast<size_t>(ranks.world_size));
  ids[static_cast<size_t>(ranks.rank)] = device.id();
  const AllGatherSegment all{ids.data(), sizeof(u64)};
  world.all_gather({&all, 1}, "dp.stats").wait();
  const size_t gpus = std::set<u64>(ids.begin(), ids.end()).size();
  const bool own_gpu = gpus == ids.size();
  if (backend == CommBackend::Nccl || (backend == CommBackend::Auto && own_gpu)) {
    DS_CHECK(own_gpu, Errc::Unavailable,
             "communication.backend \"nccl\" wants a GPU for each rank: {} ranks share {} GPU{}", ranks.world_size,
             gpus, gpus == 1 ? "" : "s");
    return make_nccl_communicator(world, options);
  }
  if (backend == CommBackend::Auto && ranks.rank == 0)
    log_message(LogLevel::Warning, fmt::format("{} ranks share {} GPU{}: they talk through host memory, which is slow",
                                               ranks.world_size, gpus, gpus == 1 ? "" : "s"));
  return make_staged_communicator(world, options);
}

}  // namespace

int thread_count(const Config& config, const RankInfo& ranks) {
  return config.threads > 0 ? narrow<int>(config.threads) : probe::rank_threads(ranks.local_world_size);
}

DeviceKind resolve_device(const Config& config) {
  if (config.device == DeviceKind::Cpu) return DeviceKind::Cpu;
  std::string why;
  const bool cuda = num_cuda_devices(why) > 0;
  DS_CHECK(cuda || config.device == DeviceKind::Auto, Errc::Unavailable, "device \"cuda\": {}", why);
  DS_CHECK(cuda || config.communication.backend != CommBackend::Nccl, Errc::Unavailable,
           "communication.backend \"nccl\" talks between GPUs: {}", why);
  static std::atomic<bool> said = false;  // this is asked more than once in a run
  if (!cuda && cuda_is_broken() && !said.exchange(true))
    log_message(LogLevel::Warning, fmt::format("device \"auto\" takes the CPU: {}", why));
  DS_CHECK(cuda || (!config.cuda.graphs && !config.cuda.autotune), Errc::Unavailable, "cuda.{} wants a GPU: {}",
           config.cuda.graphs ? "graphs" : "autotune", why);
  return cuda ? DeviceKind::Cuda : DeviceKind::Cpu;
}

int ranks_on_gpu(const RankInfo& ranks, int gpus) noexcept {
  const int gpu = ranks.local_rank % gpus;
  return std::max(1, (ranks.local_world_size - gpu + gpus - 1) / gpus);
}

std::unique_ptr<Device> open_device(const Config& config, const RankInfo& ranks) {
  if (resolve_device(config) == DeviceKind::Cpu)
    return make_cpu_device(probe::cpu_backend(), thread_count(config, ranks));
  std::string why;
  const int gpus = num_cuda_devices(why);
  // Where nothing hides GPUs from a rank, what it sees is the node's; else only all ranks together know (connect_gpus).
  DS_CHECK(config.communication.backend != CommBackend::Nccl || ranks.local_world_size <= gpus ||
               std::getenv("CUDA_VISIBLE_DEVICES") != nullptr,
           Errc::Unavailable,
           "communication.backend \"nccl\" wants a GPU for each rank: this node has {} ranks and {} GPU{}",
           ranks.local_world_size, gpus, gpus == 1 ? "" : "s");
  return make_cuda_device(ranks.local_rank % gpus, {.autotune = config.cuda.autotune});
}

std::unique_ptr<Mesh> make_mesh(const Config& config, const RankInfo& ranks, Device& device) {
  std::unique_ptr<Communicator> world = connect(config, ranks, !device.is_host());
  try {
    i64 gpus = device.is_host() ? 0 : 1;
    world->all_reduce(&gpus, 1, DType::I64, ReduceOp::Sum, "dp.stats").wait();
    DS_CHECK(gpus == 0 || gpus == ranks.world_size, Errc::Unavailable,
             "device \"auto\": {} of {} ranks found a GPU and the others none; this one: {}", gpus, ranks.world_size,
             device.name());
    std::unique_ptr<Communicator> dp;
    if (!device.is_host()) dp = connect_gpus(config, ranks, *world, device);
    return std::make_unique<Mesh>(std::move(world), std::move(dp));
  } catch (const Error& e) {  // a rank that has not come to the same end yet must end with the same error
    world->abort(e);
    throw;
  }
}

}  // namespace ds::engine
