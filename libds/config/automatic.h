// SPDX-License-Identifier: Apache-2.0
#pragma once
// Values that affect results although the user has not chosen them.

#include "ds/config.h"

namespace ds {

class ConfigText;
class Reader;

// Reports all such values of a resolved configuration in one warning: those of keys that are "auto", and the learning
// rate with its schedule if none is given. Leaves out keys that affect only speed or memory, and keys whose values
// follow from given ones.
void tell_automatic(const Config& config, const ConfigText& text, Reader& reader);

}  // namespace ds
