// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that a GPU's ops take for themselves, and the kernels of its attention, determined without a GPU.

#include <vector>

#include "ds/kernels/ops.h"

namespace ds {

// Everything that a plan of cuDNN's attention depends on. The scale is not included, since graphs take it as an
// argument.
struct AttentionShape {
  struct Strides {
    i64 batch = 0, token = 0, head = 0;
    bool operator==(const Strides&) const = default;
  };
  bool backward = false, causal = false;
  DType dtype = DType::BF16;
  i64 B = 0, T = 0, S = 0, H = 0, G = 0, D = 0;
  Strides q, k, v, o;
  Strides dq, dk, dv, dout;

  bool operator==(const AttentionShape&) const = default;
};

// The parts of a GPU and its libraries on which this memory depends.
struct GpuKernels {
  int compute_capability = 0;  // its major number; 0: no GPU
  bool cudnn = false;          // cuDNN computes the attention that it supports (cuda.attention)
  i64 products_bytes = 0;      // the workspace of matrix products, allocated by the first one
};
// The GPUs that multiply matrices in FP8 with scales by block, as cuBLASLt does: Hopper.
inline constexpr int kFp8Capability = 9;
// Those of a GPU with this compute capability. cudnn: whether a usable library is there; before 8 and after 9 none is
// used.
GpuKernels gpu_kernels(int compute_capability, bool cudnn) noexcept;

// The target of Stream::native in calls of gpu_scratch_ops().
struct GpuMeter {
  GpuKernels kernels;  // set by the caller

  i64 most = 0;                       // bytes that one call takes at most
  bool multiplies = false;            // there was a matrix product
  bool own_attention = false;         // kernels of libds computed attention
  const char* refusal = nullptr;      // why, at the first such call: as cuda::cudnn::refusal() states it
  std::vector<AttentionShape> cudnn;  // of the calls that cuDNN computes, each once

  // Device::scratch_bytes() of a GPU that has computed these calls.
  i64 scratch_bytes() const noexcept { return most + (multiplies ? kernels.products_bytes : 0); }
};

// Like scratch_ops(), for the CUDA backend. Exact if cuBLASLt supports every product whole, with its bias and
// activation.
const OpTable& gpu_scratch_ops() noexcept;

}  // namespace ds
