// SPDX-License-Identifier: Apache-2.0
#pragma once
// The ops of the CUDA backend, one .cu file each or per family. Contracts: ds/kernels/ops.h.

#include "ds/kernels/ops.h"

namespace ds::cuda {

#include "op_functions.inc"

// Attention by our own kernels, regardless of cuDNN.
void own_attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams&,
                       Stream&) noexcept;
void own_attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                       TensorView v, TensorView o, TensorView lse, const AttentionParams&, Stream&) noexcept;

}  // namespace ds::cuda
