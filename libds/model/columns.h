// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "ds/kernels/tensor.h"

namespace ds::model {

// Columns [first, first + n) of a matrix.
inline TensorView columns_of(TensorView rows, i64 first, i64 n) {
  rows.data = static_cast<char*>(rows.data) + first * dtype_bytes(rows.dtype);
  rows.shape[1] = n;
  return rows;
}

}  // namespace ds::model
