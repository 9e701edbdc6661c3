// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights that a run which does not train keeps as codes (ds/kernels/codes.h), and the encoding of numbers as such
// codes.

#include <span>

#include "ds/layer.h"
#include "model/models.h"

namespace ds::model {

// Marks the matrices that are kept as codes, as Config::weights asks. Throws Errc::Config if a matrix cannot be coded
// in the form that is asked for, naming it; Errc::Unavailable at stage 3.
void store_as_codes(Model& model, const Config& config);

// A row x [K] of finite numbers as codes in the rows form, form.row_bytes(K) bytes; Int8 and Int4. Each group has the
// scale that its largest |x| needs, rounded to the dtype of scales; Int4 without offsets codes that element as -8, and
// with offsets divides the range of the group, which includes 0, into 15 parts.
void encode_row(const CodedForm& form, std::span<const float> x, u8* out) noexcept;

}  // namespace ds::model
