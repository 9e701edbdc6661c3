// SPDX-License-Identifier: Apache-2.0
#pragma once
// Files of prompts.

#include <string>
#include <vector>

#include "ds/error.h"

namespace ds {

struct Prompt {
  std::string text;  // bytes
  // Of JSON Lines: the members of the object that it came in, as they stood there but for "schema", "text" and
  // "tokens", which the result has.
  std::string fields = {};
  std::string place = {};  // "FILE:LINE" of a file's
};
// A prompt in each line, or in each line an object with the text "prompt" where the file begins with one; "-" is
// standard input. Throws Errc::Config, naming file and line.
DS_API std::vector<Prompt> read_prompts(const std::string& path);

}  // namespace ds
