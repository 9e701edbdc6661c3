// SPDX-License-Identifier: Apache-2.0
#pragma once
// Values that results depend on and that nobody has chosen.

#include <functional>
#include <string_view>

#include "ds/config.h"

namespace ds {

class ConfigText;
class Reader;

// One warning that states all such values of a resolved configuration: those of keys that are "auto", and the learning
// rate with its schedule where none is given. Keys of which only speed or memory depends are left out, and so are those
// whose value follows from what is given. `applies`: whether a key has a meaning beside the others.
void tell_automatic(const Config& config, const ConfigText& text,
                    const std::function<bool(std::string_view path)>& applies, Reader& reader);

}  // namespace ds
