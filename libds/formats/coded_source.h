// SPDX-License-Identifier: Apache-2.0
#pragma once
// Published models whose matrices are stored as codes: GPTQ, AWQ and compressed-tensors, by the quantization_config of
// the config.json beside the file (config/weight_codes.h). A linear layer "x" of them has
//
//     GPTQ                qweight int32 [K / n, N], n codes of neighbouring k in a word; scales [G, N]; qzeros
//                         int32 [G, N / n], n codes of neighbouring n in a word; g_idx int32 [K], which may be missing
//     AWQ                 qweight int32 [K, N / 8], qzeros int32 [G, N / 8], the columns 0, 2, 4, 6, 1, 3, 5, 7 of
//                         eight from the low bits to the high; scales [G, N]
//     compressed-tensors  weight_packed int32 [N, K / n], weight_shape int64 [2]; or weight [N, K] of int8 or E4M3;
//                         weight_scale [N, G], [N, 1], [1] or by block; weight_zero_point; weight_g_idx
//
// for a matrix of K inputs and N outputs in G groups of columns.

#include <memory>
#include <string_view>

#include "formats/coded_matrix.h"
#include "formats/tensor_io.h"

namespace ds {

// A source in which these matrices are "x.weight" [N, K] in fp32, decoded while they are read, and their other parts
// are not listed; unchanged if no tensor has such a name, or there is no such section. Zeros of GPTQ: symmetric codes
// have one by definition, so either way to store it is accepted; other zeros are those of `checkpoint_format`, and one
// less than that without this key, as all writers before it had it. A word of zeros is one number, to which GPTQ's
// format adds one in each place: this undoes its own subtraction, borrows included.
//
// Throws Errc::Unavailable, naming file, key and value, for a form that is not supported; Errc::Mismatch, naming file
// and tensor, if a part is missing, too many, or of another type or shape. Reading throws Errc::Corrupt for a group of
// a column that does not exist and for zeros that are not symmetric, Errc::Numeric for a scale that is not finite.
std::unique_ptr<TensorSource> decode_weight_codes(std::unique_ptr<TensorSource> source);

// The same with matrices that have been found.
std::unique_ptr<TensorSource> show_matrices(std::unique_ptr<TensorSource> source, CodedMatrices matrices);

// For messages about a tensor that no model has: how it becomes a weight. Empty unless it has the name of a part.
std::string missing_section(std::string_view name);

}  // namespace ds
