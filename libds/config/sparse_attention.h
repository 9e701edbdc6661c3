// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resolves the keys of block-sparse attention.

#include "config/reader.h"
#include "ds/config.h"

namespace ds {

// As sparse_attention.mode spells it: "bigbird".
std::string_view sparse_attention_name(SparseAttentionMode) noexcept;

// Whether the mode uses sparse_attention.`key`.
bool sparse_attention_takes(SparseAttentionMode mode, std::string_view key);

// Fills in defaults by mode and model, and resets keys that the mode does not use. Reports keys that contradict each
// other, the model or the length of sequences.
void resolve_sparse_attention(Config& c, const ConfigText& text, Reader& r);

}  // namespace ds
