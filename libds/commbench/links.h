// SPDX-License-Identifier: Apache-2.0
#pragma once
// Links between two ranks, measured one pair at a time, and models of operations.

#include <functional>
#include <span>
#include <string_view>

#include "commbench/endpoint.h"
#include "commbench/operation.h"

namespace ds::commbench {

// The class of a pair; see Pair::link.
std::string_view link_between(const RankPlace& a, const RankPlace& b, bool over_device);

// Measures every pair, or a few of each class, one after the other, while the other ranks wait. Messages of `bytes` go
// from `source` to `target`. Collective; every rank returns the same.
std::vector<Pair> measure_pairs(const Endpoint& endpoint, const std::vector<RankPlace>& places, const Options& options,
                                std::byte* source, std::byte* target, i64 bytes,
                                const std::function<void(std::string_view)>& progress);
std::vector<Link> summarize(std::span<const Pair> pairs);

// Returns a model for each operation that moves data, backend and form (in place, if there is one) measured at two
// sizes or more.
std::vector<AlphaBeta> fit_models(std::span<const Row> rows, int ranks);

}  // namespace ds::commbench
