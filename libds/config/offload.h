// SPDX-License-Identifier: Apache-2.0
#pragma once
// Resolves and checks the keys of offloading together.

#include "config/reader.h"
#include "ds/config.h"

namespace ds {

// Whether inference streams its parameters (zero/param_store.h): no buffer has any of them between their uses.
bool streams_params(const Config& c) noexcept;

// Resolves old forms of the keys, and reports what contradicts each other or asks for nothing.
void resolve_offload(Config& c, Reader& r);

}  // namespace ds
