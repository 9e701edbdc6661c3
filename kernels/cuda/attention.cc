// SPDX-License-Identifier: Apache-2.0
// Selects the attention implementation: cuDNN, if the context uses it and it supports the call, or our own kernels.

#include "cuda/attention_cudnn.h"
#include "cuda/context.h"
#include "cuda/ops.h"

namespace ds::cuda {

void attention_fwd(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, const AttentionParams& p,
                   Stream& stream) noexcept {
  if (CudnnAttention* const cudnn = context(stream).cudnn_attention(); cudnn != nullptr) {
    const cudnn::AttentionCall call = {
        .o = o, .lse = lse, .q = q, .k = k, .v = v, .dq = {}, .dk = {}, .dv = {}, .dout = {}, .params = p};
    if (cudnn->run(call)) return;
  }
  own_attention_fwd(o, lse, q, k, v, p, stream);
}

void attention_bwd(TensorView dq, TensorView dk, TensorView dv, TensorView dout, TensorView q, TensorView k,
                   TensorView v, TensorView o, TensorView lse, const AttentionParams& p, Stream& stream) noexcept {
  if (CudnnAttention* const cudnn = context(stream).cudnn_attention(); cudnn != nullptr) {
    const cudnn::AttentionCall call = {.backward = true,
                                       .o = o,
                                       .lse = lse,
                                       .q = q,
                                       .k = k,
                                       .v = v,
                                       .dq = dq,
                                       .dk = dk,
                                       .dv = dv,
                                       .dout = dout,
                                       .params = p};
    if (cudnn->run(call)) return;
  }
  own_attention_bwd(dq, dk, dv, dout, q, k, v, o, lse, p, stream);
}

}  // namespace ds::cuda
