// SPDX-License-Identifier: Apache-2.0
#pragma once
// The attention of AlphaFold's Evoformer, forward and backward, for programs that bring their own tensors. Supports
// row-wise attention of an MSA with pair bias, and attention around the starting or ending node of a triangle; for the
// ending node, pass views of the pair representation with exchanged strides. DeepSpeed4Science calls it
// DS4Sci_EvoformerAttention. tests/examples/evoformer.cc is an example.

#include <memory>

#include "ds/error.h"
#include "ds/kernels/ops.h"

namespace ds {

// Runs on the device that it was made for, one call at a time. Views, shapes, dtypes and strides are those of
// OpTable::evoformer_attention_fwd and _bwd (ds/kernels/ops.h); the published dims [B,N,...] are merged into one, B*N,
// with N in EvoformerParams. Throws Errc::Config if arguments do not fit each other, naming the first that does not.
class DS_API EvoformerAttention {
 public:
  // Runs on the CPU with its best instruction set; results do not depend on the number of threads.
  static EvoformerAttention on_cpu(int num_threads);
  // Runs on GPU `index`; views refer to its memory. Calls are enqueued in order and return at once. Throws
  // Errc::Unavailable.
  static EvoformerAttention on_cuda(int index);

  ~EvoformerAttention();
  EvoformerAttention(EvoformerAttention&&) noexcept;
  EvoformerAttention& operator=(EvoformerAttention&&) noexcept;

  // bias1 and bias2 may be empty views if there is no such bias, dbias1 and dbias2 if the gradient is not wanted.
  void forward(TensorView o, TensorView lse, TensorView q, TensorView k, TensorView v, TensorView bias1,
               TensorView bias2, const EvoformerParams& params);
  void backward(TensorView dq, TensorView dk, TensorView dv, TensorView dbias1, TensorView dbias2, TensorView dout,
                TensorView q, TensorView k, TensorView v, TensorView o, TensorView lse, TensorView bias1,
                TensorView bias2, const EvoformerParams& params);

  // Waits until all calls are done, and throws their errors. On the CPU calls are done when they return.
  void synchronize();
  // Bytes that the object holds for its calls. They grow to the largest need and stay allocated. 0 on the CPU before
  // any call.
  i64 scratch_bytes() const noexcept;

 private:
  struct State;
  explicit EvoformerAttention(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

}  // namespace ds
