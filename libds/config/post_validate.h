// SPDX-License-Identifier: Apache-2.0
#pragma once
// pipeline.post_validate: which runs can undo a step.

#include "ds/config.h"

namespace ds {

class Reader;

// Reports what the configuration asks for beside pipeline.post_validate that cannot be undone.
void check_post_validate(const Config& config, Reader& reader);

}  // namespace ds
