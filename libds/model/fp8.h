// SPDX-License-Identifier: Apache-2.0
#pragma once
// The products of linear maps in FP8, in place of those of ds/building_blocks.h, whose arguments they take. Both
// operands of a product are encoded where it is computed, in PassContext::fp8: nothing is kept between calls.

#include "ds/building_blocks.h"

namespace ds::model {

void fp8_forward(const PassContext& ctx, TensorView y, TensorView x, Matrix weight, const LinearForward& o);
// gradients: the format of dy.
void fp8_backward_input(const PassContext& ctx, DType gradients, TensorView dx, TensorView dy, Matrix weight,
                        Orientation orientation, TensorView dx_residual = {});
void fp8_backward_weight(const PassContext& ctx, DType gradients, Matrix dw, TensorView db, TensorView dy, TensorView x,
                         Orientation orientation);

}  // namespace ds::model
