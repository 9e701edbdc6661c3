// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prints the prediction of a run.

#include "common/tool.h"
#include "ds/tokenize.h"
#include "ds/train.h"

namespace ds::tools {

// Prints the complete configuration, the memory of each rank by tag and the bytes that it sends per step, as text or as
// one document. `session`: of inference, whose memory is included; `tokenized`: a text to show, or null;
// `documents`: those of the data, which notes have described, for the document.
void print_prediction(const Config& config, const RankInfo& ranks, Output& out,
                      const std::optional<SessionSizes>& session, const TokenizedText* tokenized,
                      const RunDocuments& documents);

// Memory by tag: predicted and counted.
nlohmann::ordered_json memory_json(const std::vector<TagMemory>& memory);

// The place of offloaded data, by the tag of memory that it saves.
inline std::string_view place_of_offloaded(const Config& config, std::string_view tag) {
  const bool served = config.zero.offload_optimizer.device == OffloadDevice::Server;
  return served && tag != "params" && tag != "activations" ? "with the server" : "in a file";
}

// The memory of inference with these sizes, on rank 0, and of a draft beside it: text, or one document.
void print_session(const Config& config, const RankInfo& ranks, Output& out, const SessionSizes& sizes,
                   const std::optional<DraftModel>& draft);

}  // namespace ds::tools
