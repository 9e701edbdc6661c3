// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sizes of an all_to_allv: each rank states those that it sends and those that it expects, and they are compared.

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/base_communicator.h"

namespace ds {

// A number whose sum over all ranks, mod 2^64, is 0 if every rank sends what its receiver expects, and otherwise 0 only
// by chance, once in 2^64. So ranks compare P^2 sizes by one number of each. 0 for other operations.
u64 size_imbalance(const Operation& op, int rank) noexcept;

// sizes [P][2][P]: what each rank sends to each, then what it expects from each. Fills the row of `rank`, and returns
// it.
i64* put_sizes(const Operation& op, int rank, std::span<i64> sizes) noexcept;
// Errc::Comm with the first two ranks whose sizes differ, by their world ranks; empty: there are none. of_group: empty,
// or " of group \"tp\"".
std::optional<Error> size_mismatch(std::span<const i64> sizes, const Communicator& ranks, std::string_view tag,
                                   std::string_view of_group = "");
// Collective over `world`: gathers all sizes in `sizes`, and if some do not match aborts `world` and throws the
// mismatch.
void compare_sizes(Communicator& world, const Operation& op, std::vector<i64>& sizes);

}  // namespace ds
