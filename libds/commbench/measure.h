// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures endpoints that are connected: what run() does once it has them. Tests call it over threads.

#include <span>

#include "commbench/endpoint.h"

namespace ds::commbench {

// Collective over all endpoints, which have the same ranks. Every rank returns the same.
Result measure(const Options& options, std::span<Endpoint> endpoints, const Hooks& hooks);

}  // namespace ds::commbench
