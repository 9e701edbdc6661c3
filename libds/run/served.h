// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tells a server of states (offload/server_link.h) what it needs to write an engine's states as a checkpoint.

#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace ds::run {

// `record`: the progress to which the engine's states, which are complete, belong. Collective. Requires: a server.
void publish_states(engine::Engine& engine, const offload::ServedRecord& record, const CheckpointMeta& meta,
                    const std::vector<ParamEntry>& params);

}  // namespace ds::run
