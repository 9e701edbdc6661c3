// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run will need, as tools print it.

#include "common/tool.h"
#include "ds/train.h"

namespace ds::tools {

// The resolved configuration, the memory of each rank by tag and what it sends per step, as text or as one document.
// `writing`: with the memory of what is written, or null.
void print_prediction(const Config& config, const RankInfo& ranks, Output& out, const EncodedPrompts* writing);

// The memory of a run beside its prediction, by tag.
nlohmann::ordered_json memory_json(const std::vector<TagMemory>& memory);

// Where what is offloaded stays, by the tag of memory that it does not take.
inline std::string_view place_of_offloaded(const Config& config, std::string_view tag) {
  const bool served = config.zero.offload_optimizer.device == OffloadDevice::Server;
  return served && tag != "params" && tag != "activations" ? "with the server" : "in a file";
}

}  // namespace ds::tools
