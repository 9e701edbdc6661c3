// SPDX-License-Identifier: Apache-2.0
#pragma once
// The section diloco: workers, and an outer optimizer.

#include "config/reader.h"
#include "ds/config.h"

namespace ds {

// Only runs that train have workers. `ranks`: the data-parallel ranks (resolve_parallel). If these cannot be divided
// into workers there is one.
void resolve_diloco(Config& config, i64 ranks, i64 world, Reader& r);
// Checks the section against the rest of the configuration, which is resolved.
void check_diloco(const Config& config, Reader& r);

}  // namespace ds
