// SPDX-License-Identifier: Apache-2.0
#pragma once
// Weights that a run which does not train keeps as codes (ds/kernels/codes.h), and the encoding of numbers as such
// codes.

#include <map>
#include <span>
#include <string>

#include "ds/layer.h"
#include "model/models.h"

namespace ds::model {

// Marks the matrices of products and look-ups that are kept as codes, as Config::weights asks. Throws Errc::Config if
// one cannot be coded in that form, naming it; Errc::Unavailable at stage 3, unless that streams.
void store_as_codes(Model& model, const Config& config);

// The number of matrices of products in each form: "int4, groups of 32, sums of integers", "bf16".
std::map<std::string, i64> forms_of_matrices(const Model& model, DType work);

// A row x [K] of finite numbers as codes in the rows form, form.row_bytes(K) bytes; Int8 and Int4. Each group has the
// scale that its largest |x| needs, rounded to the dtype of scales; Int4 without offsets codes that element as -8, and
// with offsets divides the range of the group, which includes 0, into 15 parts.
void encode_row(const CodedForm& form, std::span<const float> x, u8* out) noexcept;

}  // namespace ds::model
