// SPDX-License-Identifier: Apache-2.0
#pragma once
// Links: what lies between two ranks, measured two at a time, and the model of an operation on top.

#include <functional>
#include <span>
#include <string_view>

#include "commbench/endpoint.h"
#include "commbench/operation.h"

namespace ds::commbench {

// The class of a pair; see Pair::link.
std::string_view link_between(const RankPlace& a, const RankPlace& b, bool over_device);

// Every pair, or a few of each class, one after the other, while the other ranks wait. Collective; every rank returns
// the same. Messages of `bytes` from `source` to `target`.
std::vector<Pair> measure_pairs(const Endpoint& endpoint, const std::vector<RankPlace>& places, const Options& options,
                                std::byte* source, std::byte* target, i64 bytes,
                                const std::function<void(std::string_view)>& progress);
std::vector<Link> summarize(std::span<const Pair> pairs);

// One for each operation, backend and form (in place, where there is one) that was measured at two sizes or more, and
// moves anything.
std::vector<AlphaBeta> fit_models(std::span<const Row> rows, int ranks);

}  // namespace ds::commbench
