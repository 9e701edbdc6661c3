// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads files of prompts.

#include <string>
#include <vector>

#include "ds/error.h"

namespace ds {

struct Prompt {
  std::string text;  // raw bytes
  // For JSON Lines: the members of the prompt's object as they are in the file, without "schema", "text" and "tokens",
  // which the output sets itself.
  std::string fields = {};
  std::string place = {};  // "FILE:LINE" of a prompt from a file
};
// Reads one prompt per line; if the file begins with a JSON object, each line is an object with the member "prompt".
// "-" is standard input. Throws Errc::Config, which names file and line.
DS_API std::vector<Prompt> read_prompts(const std::string& path);

}  // namespace ds
