// SPDX-License-Identifier: Apache-2.0
#pragma once
// What all ranks do together or not at all.

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace ds {

// Runs `work` on every rank, then tells the outcome: if it threw anywhere, every rank throws the error of the lowest
// failing rank, with that rank. `work` itself must not communicate. Collective.
void together(Communicator& comm, const std::function<void()>& work);

// Every rank's text, in rank order, on every rank. Collective.
std::vector<std::string> gather_text(Communicator& comm, const std::string& text);

}  // namespace ds
