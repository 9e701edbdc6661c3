// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of matrices that compressed-tensors stores (coded_source.h).

#include "config/weight_codes.h"
#include "formats/coded_matrix.h"

namespace ds {

inline constexpr std::string_view kWeightPacked = ".weight_packed";
inline constexpr std::string_view kWeightScale = ".weight_scale";

void find_compressed_matrices(const TensorSource& source, const WeightCodes& codes, CodedMatrices& all);

}  // namespace ds
