// SPDX-License-Identifier: Apache-2.0
#include "run/connect.h"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <set>

#include <algorithm>

#include "base/json.h"
#include "base/launchers.h"
#include "base/variables.h"
#include "checkpoint/together.h"
#include "comm/make_communicator.h"
#include "comm/message_tag.h"
#include "comm/shared_file.h"
#include "device/product_choices.h"
#include "ds/log.h"
#include "mesh/from_config.h"
#include "model/models.h"
#include "plan/run_plan.h"
#include "probe/host.h"
#include "run/gpu_kernels.h"

namespace ds::run {
namespace {

// Bytes of shared memory that the run would take if all its ranks were on one node. Stages differ, and so do shares of
// a vocabulary: each allocation counts as the largest of any rank.
i64 shared_bytes(Plans& plans) {
  std::vector<i64> most, most_tp, most_outer;
  const auto raise = [](std::vector<i64>& to, const std::vector<i64>& allocations) {
    to.resize(std::max(to.size(), allocations.size()));
    for (size_t i = 0; i < allocations.size(); ++i) to[i] = std::max(to[i], allocations[i]);
  };
  for (int stage = 0; stage < plans.mesh().pp; ++stage) {
    const plan::RunPlan& plan = plans.of_stage(stage).plan;
    raise(most, plan.memory.dp_shared);
    raise(most_tp, plan.memory.tp_shared);
    raise(most_outer, plan.memory.outer_shared);
  }
  return mesh_shm_bytes(plans.mesh(), most, most_tp, zeropp_splits(plans.config()),
                        plans.of_stage(0).plan.memory.zeropp_shared, most_outer);
}

// Whether /dev/shm has room for what a run shares; if not, `why` says so. All ranks get the same answer.
bool fits_shared_memory(Plans& plans, const RankInfo& ranks, SharedFile& told, std::string& why) {
  const i64 needed = shared_bytes(plans);
  const i64 free =
      shm_free_bytes(ranks.job, ranks.rank, ranks.world_size, plans.config().communication.timeout_s, told);
  why = fmt::format("{} ranks of this run share {} bytes of memory, and /dev/shm has {} bytes free", ranks.world_size,
                    needed, free);
  return needed <= free;
}

// Over host memory. told: of shm_free_bytes.
std::unique_ptr<Communicator> connect(Plans& plans, const RankInfo& ranks, bool with_gpu, SharedFile& told,
                                      Trace* trace) {
  const Config& config = plans.config();
  const CommOptions options{.timeout_s = config.communication.timeout_s,
                            .progress_thread = config.zero.overlap_comm,
                            .time_calls = config.monitors.comms_logger.enabled,
                            .trace = trace};
  CommBackend backend = config.communication.backend;
  if (with_gpu) backend = CommBackend::Auto;  // the configuration speaks of the device's memory
  const bool chosen = backend != CommBackend::Auto;
  const bool one_node = ranks.local_world_size == ranks.world_size;
  if (!chosen) backend = default_backend(ranks.world_size, ranks.local_world_size, !ranks.job.empty());
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
      if (std::string why; !with_gpu && !fits_shared_memory(plans, ranks, told, why)) {
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
    case CommBackend::Composed:
    case CommBackend::Mpi: break;
  }
  require_mpi_launcher(ranks.rank, ranks.world_size);
  DS_CHECK(backend != CommBackend::Composed || !ranks.job.empty(), Errc::Config,
           "communication.backend \"shm+mpi\" needs a job name: start with ds-launch");
  const i64 nodes = div_ceil(ranks.world_size, ranks.local_world_size);
  std::unique_ptr<Communicator> comm =
      backend == CommBackend::Composed
          ? make_composed_communicator(ranks.job, ranks.local_rank, ranks.local_world_size,
                                       with_gpu ? 0 : div_ceil(shared_bytes(plans), nodes), options, !chosen)
          : make_mpi_communicator(options);
  if (backend == CommBackend::Composed && comm->backend() == "mpi" && ranks.rank == 0 && ranks.local_world_size > 1)
    log_message(LogLevel::Warning,
                "communication.backend \"auto\" takes mpi alone, which is slower: shm+mpi wants equally many ranks on "
                "every node, and room for what they share in its /dev/shm");
  DS_CHECK(comm->size() == ranks.world_size, Errc::Config,
           "MPI has {} ranks, the environment says {}: start with ds-launch", comm->size(), ranks.world_size);
  DS_CHECK(comm->rank() == ranks.rank, Errc::Config,
           "this is rank {} of MPI, and {} as the environment says: start with ds-launch", comm->rank(), ranks.rank);
  return comm;
}

// How axes are made over the memory of GPUs: by what the GPUs are, since a rank may see its own alone, and every rank
// must come to the same answer.
Mesh::OverDevice over_gpus(const Config& config, const RankInfo& ranks, Communicator& world, Device& device) {
  const CommBackend backend = config.communication.backend;
  std::vector<u64> ids(static_cast<size_t>(ranks.world_size));
  ids[ranks.rank] = device.id();
  const AllGatherSegment all{ids.data(), sizeof(u64)};
  world.all_gather({&all, 1}, kStatsText).wait();
  const size_t gpus = std::set<u64>(ids.begin(), ids.end()).size();
  const bool own_gpu = gpus == ids.size();
  DS_CHECK(backend != CommBackend::Nccl || own_gpu, Errc::Unavailable,
           "communication.backend \"nccl\" wants a GPU for each rank: {} ranks share {} GPU{}", ranks.world_size, gpus,
           gpus == 1 ? "" : "s");
  const bool nccl = backend == CommBackend::Nccl || (backend == CommBackend::Auto && own_gpu);
  if (backend == CommBackend::Auto && !nccl && ranks.rank == 0)
    log_message(LogLevel::Warning, fmt::format("{} ranks share {} GPU{}: they talk through host memory, which is slow",
                                               ranks.world_size, gpus, gpus == 1 ? "" : "s"));
  // One rank alone has no use for NCCL, unless it was asked for.
  const bool lone_nccl = backend == CommBackend::Nccl && ranks.world_size == 1;
  return [nccl, lone_nccl](Communicator& host, const CommOptions& options) {
    if (host.size() == 1 && !lone_nccl) return make_device_self_communicator(host, options);
    return nccl ? make_nccl_communicator(host, options) : make_staged_communicator(host, options);
  };
}

}  // namespace

CommBackend default_backend(int ranks, int ranks_per_node, bool launched) noexcept {
  return ranks == 1                ? CommBackend::Self
         : !launched               ? CommBackend::Mpi
         : ranks == ranks_per_node ? CommBackend::Shm
                                   : CommBackend::Composed;
}

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
  const char* const wants = config.cuda.graphs                              ? "graphs"
                            : config.cuda.autotune                          ? "autotune"
                            : !config.cuda.autotune_file.empty()            ? "autotune_file"
                            : config.cuda.attention == CudaAttention::Cudnn ? "attention \"cudnn\""
                                                                            : "";
  DS_CHECK(cuda || *wants == '\0', Errc::Unavailable, "cuda.{} wants a GPU: {}", wants, why);
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
  // If nothing hides GPUs from a rank, it sees those of the node; else only all ranks together know (connect_gpus).
  DS_CHECK(config.communication.backend != CommBackend::Nccl || ranks.local_world_size <= gpus ||
               variables::gpus_are_chosen(),
           Errc::Unavailable,
           "communication.backend \"nccl\" wants a GPU for each rank: this node has {} ranks and {} GPU{}",
           ranks.local_world_size, gpus, gpus == 1 ? "" : "s");
  CudaOptions options{.cudnn_attention = wants_cudnn(config),
                      .autotune = config.cuda.autotune && !config.deterministic};
  if (!config.cuda.autotune_file.empty())
    options.choices = std::make_shared<ProductChoices>(config.cuda.autotune_file, config.cuda.autotune);
  std::unique_ptr<Device> device = make_cuda_device(ranks.local_rank % gpus, options);
  require_fp8(config, device->gpu_kernels().compute_capability, device->name());
  return device;
}

namespace {

// The settings that must be the same on all ranks, flat: a key, a value.
Json shared_settings(Config config) {
  config.threads = 0;  // a rank's own business, as are the places of files, which are compared by what they hold
  config.device = DeviceKind::Auto;
  config.data.train.clear();
  config.data.validation.clear();
  config.data.tokenizer = "bytes";
  config.published.path.clear();
  Json settings = Json::parse(resolved_json(config));
  if (config.model.layers > 0) settings["model"] = Json::parse(model_config_json(config.model));
  return settings.flatten();
}

// Ranks that run different configurations would train different models, or wait for each other.
void check_same_configuration(const Config& config, Communicator& world) {
  const std::vector<std::string> texts = gather_text(world, shared_settings(config).dump());
  for (size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const Json first = Json::parse(texts[0]), other = Json::parse(texts[r]);
    const auto value = [](const Json& settings, const std::string& key) {
      return settings.contains(key) ? settings.at(key).dump() : std::string("nothing");
    };
    for (const Json* side : {&first, &other}) {
      for (const auto& [pointer, ignored] : side->items()) {
        if (value(first, pointer) == value(other, pointer)) continue;
        std::string key = pointer.substr(1);
        std::replace(key.begin(), key.end(), '/', '.');
        throw Error(Errc::Config, fmt::format("{} is {} on rank 0 and {} on rank {}: all ranks of a run have one "
                                              "configuration",
                                              key, value(first, pointer), value(other, pointer), r));
      }
    }
  }
}

}  // namespace

std::unique_ptr<Mesh> make_mesh(Plans& plans, const RankInfo& ranks, Device& device, Trace* trace) {
  const Config& config = plans.config();
  SharedFile told;
  std::unique_ptr<Communicator> world = connect(plans, ranks, !device.is_host(), told, trace);
  const CommOptions options{.timeout_s = config.communication.timeout_s,
                            .progress_thread = config.zero.overlap_comm,
                            .time_calls = config.monitors.comms_logger.enabled,
                            .trace = trace,
                            .device = &device};
  Mesh::OverDevice over_device;
  try {
    i64 gpus = device.is_host() ? 0 : 1;
    world->all_reduce(&gpus, 1, DType::I64, ReduceOp::Sum, kStatsText).wait();
    told = {};  // all have read it
    DS_CHECK(gpus == 0 || gpus == ranks.world_size, Errc::Unavailable,
             "device \"auto\": {} of {} ranks found a GPU and the others none; this one: {}", gpus, ranks.world_size,
             device.name());
    check_same_configuration(config, *world);
    if (!device.is_host()) over_device = over_gpus(config, ranks, *world, device);
  } catch (const Error& e) {  // a rank that has not come to the same end yet must end with the same error
    world->abort(e);
    throw;
  }
  return std::make_unique<Mesh>(std::move(world), plans.mesh(), options, over_device,
                                mesh_splits(config, plans.of(ranks.rank)->model.splits));
}

}  // namespace ds::run
