// SPDX-License-Identifier: Apache-2.0
#pragma once
// The kernels that a run needs on GPUs: those of its attention, one decision for all ranks (the key cuda.attention),
// and products in FP8.

#include <string_view>

#include "device/device.h"
#include "ds/communicator.h"
#include "plan/run_plan.h"

namespace ds::run {

// Whether a run should try cuDNN at all: it computes attention in 16 bits alone.
bool wants_cudnn(const Config& config) noexcept;

// The kernels of a GPU that is not there, by the major number of its compute capability: cuDNN is taken to be there.
GpuKernels kernels_of(const Config& config, int compute_capability) noexcept;
inline constexpr int kUnknownGpu = 9;  // the compute capability of a GPU of which nothing is known: Hopper

// Throws Errc::Unavailable if the configuration asks for cuDNN, and it would not compute all attention of the plan's
// passes on such a GPU.
void require_cudnn(const Config& config, const model::Model& model, const plan::RunPlan& plan,
                   const GpuKernels& kernels);

// Throws Errc::Unavailable if the configuration asks for FP8 and a GPU of this compute capability has no such products.
void require_fp8(const Config& config, int compute_capability, std::string_view gpu);

// The same choice on all ranks: cuDNN, if each of them can use it in the same version and it has plans for the run's
// passes that it supports ("auto" tries all shapes, "cudnn" eight), or the kernels of libds for all attention.
// cuda.attention "auto" warns if cuDNN would compute some of it and cannot; "cudnn" throws Errc::Unavailable, on all
// ranks, unless it computes the attention of all training and evaluation passes. Collective; nothing on CPUs. speaks:
// this rank warns.
void choose_attention(const Config& config, const model::Model& model, const plan::RunPlan& plan, Device& device,
                      Communicator& world, bool speaks = true);

// The library that computes attention, "cuDNN 9.19.0", where it supports a call; "libds": kernels of libds compute
// all.
std::string attention_of(const Device& device);

// The hardware and the kernels on which bits depend, for checkpoints: "NVIDIA H200, attention by cuDNN 9.19.0".
std::string computed_by(const Device& device);

}  // namespace ds::run
