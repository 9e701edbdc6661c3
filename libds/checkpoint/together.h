// SPDX-License-Identifier: Apache-2.0
#pragma once
// What all ranks do together or not at all.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace ds {

// What `work` throws, as an Error; nothing if it succeeds.
std::optional<Error> attempt(const std::function<void()>& work) noexcept;

// Each rank says how its own part ended; all learn the error of the lowest failing rank, worded with that rank. Throws
// only what the communicator throws. Collective.
std::optional<Error> agree_on_outcome(Communicator& comm, const std::optional<Error>& mine);

// Runs `work` on every rank, then tells the outcome: if it threw anywhere, every rank throws the error of the lowest
// failing rank, with that rank. `work` itself must not communicate. Collective.
void together(Communicator& comm, const std::function<void()>& work);

// Every rank's text, in rank order, on every rank. Collective.
std::vector<std::string> gather_text(Communicator& comm, const std::string& text);

}  // namespace ds
