// SPDX-License-Identifier: Apache-2.0
#pragma once
// diloco: workers, and an optimizer around the optimizer.

#include "config/reader.h"
#include "ds/config.h"

namespace ds {

// Only what trains has workers; `ranks`: of the world's those that see other samples (resolve_parallel). Where they
// cannot be cut so, there is one.
void resolve_diloco(Config& config, i64 ranks, i64 world, Reader& r);
// After all that it goes by is known.
void check_diloco(const Config& config, Reader& r);

}  // namespace ds
