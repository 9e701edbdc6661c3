// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sizes of messages: the list, and the rounding of a size to elements and slices.

#include <vector>

#include "ds/commbench.h"

namespace ds::commbench {

// min, min + step, ... or min, min * factor, ..., up to max. Throws Errc::Config if there are too many.
std::vector<i64> list_sizes(const Options& options);

// As in nccl-tests, sizes are rounded down to whole elements, and slices of ranks to 16 bytes.
i64 whole_count(i64 bytes, i64 element_bytes) noexcept;
i64 slice_count(i64 bytes, i64 element_bytes, int ranks) noexcept;

// The elements that rank `from` sends to rank `to` in an all_to_allv, of its `ranks` * count: a share in proportion to
// 1 + (from + to) % 3, rounded down; `first` is their place among those that it sends, one rank after the other.
struct Share {
  i64 first, count;
};
Share uneven_share(int ranks, int from, int to, i64 count) noexcept;

}  // namespace ds::commbench
