// SPDX-License-Identifier: Apache-2.0
#pragma once
// Work that succeeds on all ranks or fails on all.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ds/communicator.h"

namespace ds {

// The exception of `work` as an Error; nothing if it succeeds.
std::optional<Error> attempt(const std::function<void()>& work) noexcept;

// Each rank passes the result of its own part; all get the error of the lowest failing rank, which names that rank.
// Throws only what the communicator throws. Collective.
std::optional<Error> agree_on_outcome(Communicator& comm, const std::optional<Error>& mine);

// Runs `work` on every rank and exchanges the results: if it threw on any rank, every rank throws the error of the
// lowest failing rank, which names that rank. `work` must not communicate. Collective.
void together(Communicator& comm, const std::function<void()>& work);

// Returns the texts of all ranks, in rank order, on every rank. Collective.
std::vector<std::string> gather_text(Communicator& comm, const std::string& text);

}  // namespace ds
