// SPDX-License-Identifier: Apache-2.0
#pragma once
// Generation: a pass over each prompt, then passes over the next token of all sequences in progress, with keys and
// values of earlier positions in caches. A sequence's results do not depend on the others: products of several rows
// give each row the bits that it has alone (MatmulParams::rowwise), and attention is called sequence by sequence.

#include <functional>
#include <span>
#include <vector>

#include "infer/sampler.h"
#include "stage/stage.h"

namespace ds::infer {

struct WriteOptions {
  i64 max_tokens = 100;  // per sequence
  Sampling sampling{};
  i64 at_once = 1;  // maximum number of sequences in progress; waiting ones take the places of those that have ended
};

// Continues each prompt. Calls token(prompt, id) for each new token, and ends the sequence if that returns false.
// Collective: all ranks pass the same arguments and return the same values. Prompts must not be empty, and must fit the
// model's positions (tokens_of). Throws Errc::Numeric if logits are not finite, Errc::OutOfMemory.
void write(stage::Stage& stage, std::span<const std::vector<i32>> prompts, const WriteOptions& options,
           const std::function<bool(size_t prompt, i32 id)>& token);

}  // namespace ds::infer
