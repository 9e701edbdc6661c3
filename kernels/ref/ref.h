// SPDX-License-Identifier: Apache-2.0
#pragma once
// The oracle: naive loops, fp64 accumulation, every dtype. Contracts: ds/kernels/ops.h.

#include "ds/kernels/ops.h"

namespace ds::ref {

#include "op_functions.inc"

}  // namespace ds::ref
