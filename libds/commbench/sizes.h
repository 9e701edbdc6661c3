// SPDX-License-Identifier: Apache-2.0
#pragma once
// Sizes of messages: the list, and what remains of a size when it is cut into elements and slices.

#include <vector>

#include "ds/commbench.h"

namespace ds::commbench {

// min, min + step, ... or min, min * factor, ..., up to max. Throws Errc::Config for more than anybody means.
std::vector<i64> list_sizes(const Options& options);

// nccl-tests rounds down: to whole elements, and where each rank owns a slice, slices to 16 bytes.
i64 whole_count(i64 bytes, i64 element_bytes) noexcept;
i64 slice_count(i64 bytes, i64 element_bytes, int ranks) noexcept;

}  // namespace ds::commbench
