// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sizes that decide the memory of inference.

#include "ds/integers.h"

namespace ds {

// No result depends on them, but for `codes_cache`.
struct SessionSizes {
  i64 at_once = 1;  // sequences in progress
  i64 context = 1;  // positions of a sequence, from the first token of the prompt to the last new one
  i64 chunk = 512;  // tokens of a pass: one of each sequence in progress, and the next ones of prompts
  // Positions in the caches of all sequences together; at least a context. 0: each of at_once has a context.
  i64 cached = 0;
  bool codes_cache = false;  // caches have 8-bit codes, with a scale for each token and head
  // At most so many tokens that a draft model proposes are verified for a sequence in a pass, which then has as many
  // more tokens for each of at_once; 0: there is no draft.
  i64 draft_tokens = 0;
};

inline constexpr i64 kMostAtOnce = 65536;  // texts in progress, for ds-infer
// For `cached`, where nothing else is asked for: most texts are much shorter than the context.
constexpr i64 default_cached(const SessionSizes& s) noexcept {
  constexpr i64 kShare = 4;
  const i64 all = s.context * s.at_once / kShare;
  return all > s.context ? all : s.context;
}
// For `context`: as many positions as the model has, but no more than this.
inline constexpr i64 kMostDefaultContext = 4096;

}  // namespace ds
