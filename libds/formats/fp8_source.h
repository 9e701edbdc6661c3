// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights that are stored in 8 bits, as DeepSeek-V3 publishes them: a matrix "x.weight" [R, C] of E4M3 codes, and
// "x.weight_scale_inv" [ceil(R / 128), ceil(C / 128)], by which the codes of each block of 128 x 128 are multiplied.

#include <memory>
#include <string>
#include <string_view>

#include "formats/tensor_io.h"

namespace ds {

inline constexpr std::string_view kScaleInv = "_scale_inv";  // end of the name of a matrix's scales

// A source in which such matrices are fp32, and their scales are not listed; unchanged if it has none. A source with
// codes but no scales keeps them as they are. Throws Errc::Mismatch, naming the tensors, if the shapes do not agree,
// scales belong to no matrix of codes, or some matrices have scales and one of E4M3 codes has none; Errc::Unavailable
// if scales are of a type that DType does not have, as E8M0.
std::unique_ptr<TensorSource> decode_fp8(std::unique_ptr<TensorSource> source);

// For messages that state the dtype of a tensor: how to make codes that were not decoded a weight. Empty unless the
// dtype is E4M3.
std::string missing_scales(std::string_view name, DType dtype);

}  // namespace ds
