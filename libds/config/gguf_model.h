// SPDX-License-Identifier: Apache-2.0
#pragma once
// The model in a GGUF file as its config.json would describe it.

#include <string>

#include "base/gguf.h"
#include "config/family.h"

namespace ds {

// The family of a file's architecture; a mixture of experts if the file states experts. Throws Errc::Unavailable,
// naming the architecture and those that are known; Errc::Corrupt if the file states none.
const FamilySpec& gguf_family(const Gguf& file);

// The text of a config.json. Throws Errc::Corrupt (a value is missing or contradicts another) and Errc::Unavailable (a
// value asks for something that the family does not have, or is not known), naming the key.
std::string gguf_config(const Gguf& file);

}  // namespace ds
