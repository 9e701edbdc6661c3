// SPDX-License-Identifier: Apache-2.0
#pragma once
// The tensors of a GGUF model as its Hugging Face directory would have them.

#include <memory>
#include <string>

#include "formats/tensor_io.h"

namespace ds {

// Names, shapes and the order of elements are those of the published model: rows of queries and keys, transposed
// matrices, experts each with matrices of their own. F32, F16 and BF16 stay what they are; Q8_0, Q4_0, Q4_1, Q5_0,
// Q5_1, Q4_K, Q5_K and Q6_K are decoded to fp32 while they are read, a few blocks at once; tensors of other types are
// foreign. rope_freqs.weight, which becomes a part of config.json (config/gguf_model.h), is not listed. Throws as Gguf
// and gguf_family() do.
std::unique_ptr<TensorSource> open_gguf(const std::string& path);

}  // namespace ds
