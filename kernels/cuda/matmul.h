// SPDX-License-Identifier: Apache-2.0
#pragma once
// Matrix products of the CUDA backend.

#include "cuda/context.h"

namespace ds::cuda {

class MatmulEngine {
 public:
  explicit MatmulEngine(Context& context) : context_(context) {}

 private:
  Context& context_;
};

}  // namespace ds::cuda
