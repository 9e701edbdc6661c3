// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of matrices that GPTQ and AWQ store (coded_source.h).

#include "config/weight_codes.h"
#include "formats/coded_matrix.h"

namespace ds {

inline constexpr std::string_view kPackedWeight = ".qweight";

void find_gptq_matrices(const TensorSource& source, const WeightCodes& codes, CodedMatrices& all);

}  // namespace ds
