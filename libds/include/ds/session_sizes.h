// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sizes that decide the memory of inference.

#include "ds/integers.h"

namespace ds {

// No result depends on them.
struct SessionSizes {
  i64 at_once = 1;  // sequences in progress
  i64 context = 1;  // positions of a sequence, from the first token of the prompt to the last new one
  i64 chunk = 512;  // tokens of a pass: one of each sequence in progress, and the next ones of prompts
  // Positions in the caches of all sequences together; at least a context. 0: each of at_once has a context.
  i64 cached = 0;
};

}  // namespace ds
