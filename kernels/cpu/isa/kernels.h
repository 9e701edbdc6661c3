// SPDX-License-Identifier: Apache-2.0
#pragma once
// The SIMD kernels of one instruction set. Contracts: ds/kernels/ops.h.

#include "cpu/epilogue.h"
#include "cpu/simd.h"

namespace ds::cpu::DS_ISA_NAMESPACE {

#include "op_functions.inc"

// The parts of matmul and linear_cross_entropy that an engine with its own products shares.
FinishFn finish_for(DType c, DType work) noexcept;
void linear_cross_entropy_by(MatmulFn product, TensorView losses, TensorView dh, TensorView dweight, TensorView dbias,
                             TensorView h, TensorView weight, TensorView bias, TensorView targets, TensorView logits,
                             const CrossEntropyParams&, Stream&) noexcept;

const OpTable& table() noexcept;

}  // namespace ds::cpu::DS_ISA_NAMESPACE
