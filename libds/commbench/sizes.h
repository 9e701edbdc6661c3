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

}  // namespace ds::commbench
