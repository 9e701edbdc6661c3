// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures connected endpoints: the part of run() after connecting. Tests call it over threads.

#include <span>

#include "commbench/endpoint.h"

namespace ds::commbench {

// Collective over all endpoints, which must have the same ranks. Every rank returns the same.
Result measure(const Options& options, std::span<Endpoint> endpoints, const Hooks& hooks);

}  // namespace ds::commbench
