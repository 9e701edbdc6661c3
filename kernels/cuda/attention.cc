// SPDX-License-Identifier: Apache-2.0
// Selects the attention implementation: cuDNN, if the context uses it and it supports the call, or our own kernels.

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "cuda/ops.h"

namespace ds::cuda {

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  CudnnAttention* const cudnn = context(stream).cudnn_attention();
  if (cudnn != nullptr && cudnn->run(cudnn::forward_call(o, lse, q, k, v, p))) return;
  own_attention_fwd(o, lse, q, k, v, p, stream);
}

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  CudnnAttention* const cudnn = context(stream).cudnn_attention();
  if (cudnn != nullptr && cudnn->run(cudnn::backward_call(dq, dk, dv, dout, q, k, v, o, lse, p))) return;
  own_attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, p, stream);
}

}  // namespace ds::cuda
