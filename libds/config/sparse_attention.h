// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the keys of block-sparse attention mean together.

#include "config/reader.h"
#include "ds/config.h"

namespace ds {

// As sparse_attention.mode spells it: "bigbird".
std::string_view sparse_attention_name(SparseAttentionMode) noexcept;

// Whether the mode uses sparse_attention.`key`.
bool sparse_attention_takes(SparseAttentionMode mode, std::string_view key);

// Defaults by mode and model, and what the mode does not use as by default; reports what contradicts each other, the
// model or the length of sequences. `model_is_sound`: the model has been read without errors.
void resolve_sparse_attention(Config& c, const ConfigText& text, Reader& r);

}  // namespace ds
