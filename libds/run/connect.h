// SPDX-License-Identifier: Apache-2.0
#pragma once
// The device of a rank and its connections: the keys `device` and `communication`, applied to what the machine has.

#include "device/device.h"
#include "ds/train.h"
#include "mesh/mesh.h"
#include "run/plans.h"

namespace ds::run {

// Threads of this rank: the key `threads`, or its share of the machine's cores.
int thread_count(const Config& config, const RankInfo& ranks);

// The backend that "auto" selects over host memory, if /dev/shm has room. launched: by ds-launch, whose ranks have a
// job.
CommBackend default_backend(int ranks, int ranks_per_node, bool launched) noexcept;

// The device that "auto" selects: CUDA if there are the plug-in, a driver and a GPU, else the CPU. "cuda" throws
// Errc::Unavailable, with the reason, if one of them is missing.
DeviceKind resolve_device(const Config& config);

// Rank r of a node takes GPU r. Further ranks share the GPUs, which causes a warning and is meant for tests; with the
// backend "nccl" it is Errc::Unavailable.
std::unique_ptr<Device> open_device(const Config& config, const RankInfo& ranks);
// The number of ranks of the node that use the GPU of this one.
int ranks_on_gpu(const RankInfo& ranks, int gpus) noexcept;

// The world over host memory, and the axes of the plans' mesh, which has all ranks, over the device's. Throws
// Errc::Config for a backend that cannot serve these ranks. Collective. `trace` records their operations, and outlives
// them.
std::unique_ptr<Mesh> make_mesh(Plans& plans, const RankInfo& ranks, Device& device, Trace* trace = nullptr);

}  // namespace ds::run
