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
};

}  // namespace ds
