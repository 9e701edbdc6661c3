// SPDX-License-Identifier: Apache-2.0
#pragma once
// The attention of AlphaFold's Evoformer, forward and backward, for programs that bring their own tensors: row-wise
// attention of an MSA with the bias of pairs, and attention around the starting or the ending node of a triangle (the
// ending node with dims of the pair representation exchanged, which strides can say). DeepSpeed4Science calls it
// DS4Sci_EvoformerAttention. tests/examples/evoformer.cc is a program that uses it.

#include <memory>

#include "ds/error.h"
#include "ds/kernels/ops.h"

namespace ds {

// Runs on the device that it was made for, one call at a time. Views, shapes, dtypes and strides are those of
// OpTable::evoformer_attention_fwd and _bwd (ds/kernels/ops.h): the dims [B,N,...] that are published as two are one,
// B*N, with N in EvoformerParams. Throws Errc::Config for arguments that do not fit each other, naming the first one.
class DS_API EvoformerAttention {
 public:
  // On the CPU, by the best instruction set that it has; the bits do not depend on the number of threads.
  static EvoformerAttention on_cpu(int num_threads);
  // On GPU `index`, for views of its memory: calls return when they are enqueued, in order. Throws Errc::Unavailable.
  static EvoformerAttention on_cuda(int index);

  ~EvoformerAttention();
  EvoformerAttention(EvoformerAttention&&) noexcept;
  EvoformerAttention& operator=(EvoformerAttention&&) noexcept;

  // bias1 and bias2 may be empty views, and so may dbias1 and dbias2, for what is not there or not wanted.
  void forward(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
               TensorView bias2, const EvoformerParams& params);
  void backward(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2, TensorView dout,
                TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse, TensorView bias1,
                TensorView bias2, const EvoformerParams& params);

  // Waits until all calls are done, and throws what failed of them. On the CPU they are.
  void synchronize();
  // What calls hold for themselves, which grows once and stays. On the CPU without a call: 0.
  i64 scratch_bytes() const noexcept;

 private:
  struct State;
  explicit EvoformerAttention(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

}  // namespace ds
