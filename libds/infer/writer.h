// SPDX-License-Identifier: Apache-2.0
#pragma once
// Text that a model writes: a pass over each prompt, then passes over the next token of all sequences that are under
// way, with keys and values of earlier positions in caches. A sequence has the bits that it has alone: products of
// several rows give each row those of one (MatmulParams::rowwise), and attention is called sequence by sequence.

#include <functional>
#include <span>
#include <vector>

#include "infer/sampler.h"
#include "stage/stage.h"

namespace ds::infer {

struct WriteOptions {
  i64 max_tokens = 100;  // of each sequence
  Sampling sampling{};
  i64 at_once = 1;  // sequences under way at most; those that wait take the places of those that have ended
};

// Continues each prompt; calls token(prompt, id) as each token is known, and ends a sequence after one for which it
// returns false. Collective: all ranks give the same arguments and answers. Prompts have a token, and the
// model the positions (tokens_of). Throws Errc::Numeric where logits are not finite, Errc::OutOfMemory.
void write(stage::Stage& stage, std::span<const std::vector<i32>> prompts, const WriteOptions& options,
           const std::function<bool(size_t prompt, i32 id)>& token);

}  // namespace ds::infer
