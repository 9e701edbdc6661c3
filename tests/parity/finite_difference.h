// SPDX-License-Identifier: Apache-2.0
#pragma once
// Gradients against central differences in fp64. The oracle takes fp64 tensors, so nothing but the difference itself
// errs.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ds/kernels/ops.h"

namespace ds::testing {

// A row-major fp64 tensor.
struct Doubles {
  std::vector<double> value;
  TensorView view;

  explicit Doubles(std::initializer_list<i64> shape) : view(TensorView::of(nullptr, DType::F64, shape)) {
    value.assign(static_cast<size_t>(view.numel()), 0.0);
    view.data = value.data();
  }
  Doubles(const Doubles&) = delete;
  Doubles& operator=(const Doubles&) = delete;

  // Uniform in (-1, 1) * scale.
  Doubles& randomize(u32 seed, double scale = 1) {
    const RngKey key{seed, 11, 0};
    for (size_t i = 0; i < value.size(); ++i) value[i] = scale * (2.0 * RngKey::uniform(key.bits(i)) - 1);
    return *this;
  }
  double dot(const Doubles& o) const {
    double sum = 0;
    for (size_t i = 0; i < value.size(); ++i) sum += value[i] * o.value[i];
    return sum;
  }
};

// `loss()` reads x; `gradient` is its gradient from the backward pass.
template <class Loss>
void expect_gradient(Doubles& x, const Doubles& gradient, Loss loss, const std::string& what) {
  ASSERT_EQ(x.value.size(), gradient.value.size()) << what;
  for (size_t i = 0; i < x.value.size(); ++i) {
    const double at = x.value[i], h = 1e-5 * std::max(1.0, std::abs(at));
    x.value[i] = at + h;
    const double up = loss();
    x.value[i] = at - h;
    const double down = loss();
    x.value[i] = at;
    const double want = (up - down) / (2 * h), got = gradient.value[i];
    ASSERT_LE(std::abs(got - want), 1e-7 * std::max(1.0, std::abs(want)))
        << what << ", element " << i << ": " << got << " vs finite difference " << want;
  }
}

}  // namespace ds::testing
