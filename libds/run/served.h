// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an engine tells a server that has its states (offload/server_link.h), so that it can write them as a checkpoint.

#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::run {

// The engine's states, which are whole, are those of `record`. Collective. Requires: a server.
void publish_states(engine::Engine& engine, const offload::ServedRecord& record, const CheckpointMeta& meta,
                    const std::vector<ParamEntry>& params);

}  // namespace ds::run
