// SPDX-License-Identifier: Apache-2.0
#pragma once
// The operations on the fp32 sums of a matrix product before they are stored, and the entry points through which an
// engine that computes the sums elsewhere (cpu/onednn.cc) reuses the SIMD kernels of an instruction set.

#include "ds/kernels/ops.h"

namespace ds::cpu {

// c = activation(sums + bias) + residual, or c += sums. The full operands of OpTable::matmul.
struct Epilogue {
  TensorView c, bias, preact, residual;
  Activation activation = Activation::None;
  bool accumulate = false;
};

// Finishes rows x columns of c, from (row, column) on; the rows of sums [rows, columns] are `stride` apart.
using FinishFn = void (*)(const Epilogue&, const float* sums, i64 stride, i64 row, i64 column, i64 rows, i64 columns);

using MatmulFn = decltype(OpTable::matmul);

}  // namespace ds::cpu
