// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tensors for the benchmarks of ops.

#include <initializer_list>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::bench {

// A tensor that owns its memory, filled with numbers of every sign between -1 and 1.
struct Tensor {
  std::vector<u8> bytes;
  TensorView view;
  Tensor(DType dtype, std::initializer_list<i64> shape) : view(TensorView::of(nullptr, dtype, shape)) {
    bytes.resize(view.bytes());
    view.data = bytes.data();
    for (i64 i = 0; i < view.numel(); ++i) {
      const float x = static_cast<float>(i * 7919 % 2003 - 1001) / 1001.0f;
      dtype == DType::F32 ? void(view.as<float>()[i] = x) : void(view.as<bf16>()[i] = to_bf16(x));
    }
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
};

}  // namespace ds::bench
