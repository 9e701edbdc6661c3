// SPDX-License-Identifier: Apache-2.0
#include "commbench/endpoint.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/check.h"
#include "base/launchers.h"
#include "base/variables.h"
#include "comm/make_communicator.h"
#include "ds/nearest.h"
#include "probe/host.h"

namespace ds::commbench {
namespace {

// One list of backends.
struct Backend {
  std::string_view name;
  bool over_device;
};
constexpr std::array kBackends = {Backend{"self", false},    Backend{"shm", false},     Backend{"mpi", false},
                                  Backend{"shm+mpi", false}, Backend{"openmpi", false}, Backend{"staged", true},
                                  Backend{"nccl", true}};

const Backend* find(std::string_view name) {
  const auto* const b = std::ranges::find(kBackends, name, &Backend::name);
  return b == kBackends.end() ? nullptr : b;
}

bool one_node(const RankInfo& ranks) { return ranks.local_world_size == ranks.world_size; }

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// The NUMA node that holds all cores this process may run on; -1: several, or the system does not say.
int numa_node() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return -1;
  std::set<int> nodes;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::error_code error;
    for (const auto& entry :
         std::filesystem::directory_iterator(fmt::format("/sys/devices/system/cpu/cpu{}", cpu), error)) {
      const std::string name = entry.path().filename();
      if (name.starts_with("node") && name.size() > 4 && std::isdigit(static_cast<unsigned char>(name[4])) != 0)
        nodes.insert(std::atoi(name.c_str() + 4));
    }
  }
  return nodes.size() == 1 ? *nodes.begin() : -1;
}

void check_own_gpus(Communicator& world, const Device& device) {
  std::vector<u64> ids(static_cast<size_t>(world.size()));
  ids[world.rank()] = device.id();
  const AllGatherSegment all{ids.data(), sizeof(u64)};
  world.all_gather({&all, 1}, "bench").wait();
  const size_t gpus = std::set<u64>(ids.begin(), ids.end()).size();
  DS_CHECK(gpus == ids.size(), Errc::Unavailable, "backend nccl needs a GPU for each rank: {} ranks share {} GPU{}",
           ids.size(), gpus, gpus == 1 ? "" : "s");
}

}  // namespace

std::vector<std::string> backends() {
  std::vector<std::string> names = {"auto"};
  for (const Backend& b : kBackends) names.emplace_back(b.name);
  return names;
}

std::string resolve_backend(const std::string& backend, const RankInfo& ranks) {
  if (backend != "auto") return backend;
  return ranks.world_size == 1 ? "self" : ranks.job.empty() ? "mpi" : one_node(ranks) ? "shm" : "shm+mpi";
}

void check_backend(const std::string& name, const RankInfo& ranks) {
  if (find(name) == nullptr) {
    const std::vector<std::string> names = backends();
    const std::string_view near = nearest(name, std::vector<std::string_view>(names.begin(), names.end()));
    throw Error(Errc::Config, fmt::format("there is no backend '{}'; there are {}{}", name, fmt::join(names, ", "),
                                          near.empty() ? "" : fmt::format("; did you mean '{}'?", near)));
  }
  DS_CHECK(name != "self" || ranks.world_size == 1, Errc::Config, "backend self works with one rank, not {}",
           ranks.world_size);
  DS_CHECK(name != "shm" || one_node(ranks), Errc::Config,
           "backend shm works on one node; {} of {} ranks are on this one", ranks.local_world_size, ranks.world_size);
  DS_CHECK(!name.starts_with("shm") || !ranks.job.empty(), Errc::Config,
           "backend {} needs a job name: start with ds-launch, or with --ranks", name);
}

bool is_over_device(const std::string& backend) { return find(backend)->over_device; }

void check_gpus(const std::string& backend, const RankInfo& ranks) {
  if (!is_over_device(backend)) return;
  std::string why;
  const int gpus = num_cuda_devices(why);
  DS_CHECK(gpus > 0, Errc::Unavailable, "backend {} needs GPUs: {}", backend, why);
  // If no variable hides GPUs from a rank, it sees those of the node; else only all ranks together know them.
  DS_CHECK(backend != "nccl" || ranks.local_world_size <= gpus || variables::gpus_are_chosen(), Errc::Unavailable,
           "backend nccl needs a GPU for each rank: this node has {} ranks and {} GPU{}", ranks.local_world_size, gpus,
           gpus == 1 ? "" : "s");
}

Communicator& Worlds::get(const std::string& name) {
  const std::string backend = resolve_backend(name, ranks_);
  std::unique_ptr<Communicator>& comm = made_[backend];
  if (comm) return *comm;
  const bool over_mpi = backend != "self" && backend != "shm";
  if (over_mpi) require_mpi_launcher(ranks_.rank, ranks_.world_size);
  if (backend == "self") {
    comm = make_self_communicator(options_);
  } else if (backend == "shm") {
    comm = make_shm_communicator(ranks_.job, ranks_.rank, ranks_.world_size, options_);
  } else if (backend == "openmpi") {
    comm = make_open_mpi_peer(options_);
  } else if (backend == "shm+mpi") {
    comm =
        make_composed_communicator(ranks_.job, ranks_.local_rank, ranks_.local_world_size, 0, options_, name == "auto");
  } else {
    DS_ASSERT(backend == "mpi");
    comm = make_mpi_communicator(options_);
  }
  DS_CHECK(comm->size() == ranks_.world_size, Errc::Config,
           "MPI has {} ranks, the environment says {}: start with ds-launch", comm->size(), ranks_.world_size);
  return *comm;
}

void Worlds::abort(const Error& why) noexcept {
  for (const auto& [name, comm] : made_)
    if (comm) comm->abort(why);
}

Endpoint connect(const std::string& name, const RankInfo& ranks, Worlds& worlds, const Options& options,
                 const std::vector<MessageLink>& links) {
  const std::string backend = resolve_backend(name, ranks);
  Endpoint e{.backend = backend, .device = nullptr, .world = nullptr, .over_device = nullptr};
  if (!is_over_device(backend)) {
    e.device = make_cpu_device(probe::cpu_backend(), probe::rank_threads(ranks.local_world_size));
    e.world = &worlds.get(name);
    e.backend = e.world->backend();
    return e;
  }
  std::string why;
  e.device = make_cuda_device(ranks.local_rank % num_cuda_devices(why));
  e.world = &worlds.get("auto");
  const CommOptions over{.timeout_s = options.timeout_s, .device = e.device.get(), .links = links};
  if (backend == "nccl") check_own_gpus(*e.world, *e.device);
  e.over_device = backend == "nccl" ? make_nccl_communicator(*e.world, over) : make_staged_communicator(*e.world, over);
  e.over_device->use_links();
  return e;
}

std::vector<RankPlace> gather_places(Communicator& world, const Endpoint& endpoint) {
  struct Wire {
    std::array<char, 256> host, device, cpu;
    i64 pid;
    i32 numa_node, cores;
  };
  const auto copy = [](std::array<char, 256>& to, std::string_view from) {
    to.fill(0);
    std::memcpy(to.data(), from.data(), std::min(from.size(), to.size() - 1));
  };
  std::vector<Wire> all(static_cast<size_t>(world.size()));
  Wire& own = all[world.rank()];
  copy(own.host, host_name());
  copy(own.device, endpoint.device->name());
  copy(own.cpu, cpu_model());
  own.pid = ::getpid();
  own.numa_node = numa_node();
  own.cores = probe::num_cores();
  const AllGatherSegment segment{all.data(), sizeof(Wire)};
  world.all_gather({&segment, 1}, "bench").wait();
  std::vector<RankPlace> places;
  for (const Wire& w : all)
    places.push_back({.host = w.host.data(),
                      .device = w.device.data(),
                      .cpu = w.cpu.data(),
                      .pid = w.pid,
                      .numa_node = w.numa_node,
                      .cores = w.cores});
  return places;
}

}  // namespace ds::commbench
