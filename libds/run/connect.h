// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a rank computes and with whom it talks: the configuration's `device` and `communication` met with what is
// there.

#include "device/device.h"
#include "ds/train.h"
#include "mesh/mesh.h"
#include "run/plans.h"

namespace ds::run {

// Threads of this rank: the key `threads`, or its share of the machine's cores.
int thread_count(const Config& config, const RankInfo& ranks);

// What the backend "auto" is over host memory, if /dev/shm has room; launched: by ds-launch, whose ranks have a job.
CommBackend default_backend(int ranks, int ranks_per_node, bool launched) noexcept;

// What "auto" is here: CUDA where the plug-in, a driver and a GPU are, else the CPU. "cuda" throws Errc::Unavailable
// with the reason where they are not.
DeviceKind resolve_device(const Config& config);

// Rank r of a node takes GPU r; ranks beyond the GPUs share them, which is for tests and a warning, and not for the
// backend "nccl" (Errc::Unavailable).
std::unique_ptr<Device> open_device(const Config& config, const RankInfo& ranks);
// How many ranks of the node take this one's GPU.
int ranks_on_gpu(const RankInfo& ranks, int gpus) noexcept;

// The world over host memory, and the axes of the plans' mesh, which has all ranks, over the device's. Throws
// Errc::Config for a backend that cannot serve these ranks. Collective. `trace` gets what they do, and outlives them.
std::unique_ptr<Mesh> make_mesh(Plans& plans, const RankInfo& ranks, Device& device, Trace* trace = nullptr);

}  // namespace ds::run
