// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys `data.*` about documents: where they begin, and how they are kept apart or packed.

#include "config/reader.h"

namespace ds {

// Resolves them, and reports those that miss another key or have no effect beside the others. Needs the model and the
// other keys of data.
void resolve_documents(Config& config, Reader& r);

}  // namespace ds
