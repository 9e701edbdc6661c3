// SPDX-License-Identifier: Apache-2.0
#pragma once
// The samples of a run.

#include <memory>

#include "data/data.h"
#include "ds/communicator.h"
#include "ds/train.h"
#include "run/request.h"

namespace ds::run {

struct RunData {
  std::unique_ptr<BatchLoader> train, validation;  // null: there are none

  std::string identity_json() const;  // CheckpointMeta::data_json. Requires: train
};

// Opens the files that the configuration names, or takes the samples of the program, for so many data-parallel ranks;
// none if there are neither. Rank 0 reports what is remarkable about them. Throws as open_dataset() and BatchLoader().
RunData open_data(const Request& request, i64 num_ranks);

// Reports and returns the documents of the data, if they matter, and how full samples are. Reads all tokens.
RunDocuments survey_documents(const RunData& data);

// Throws Errc::Config if ranks read different files. Collective.
void check_same_files(const RunData& data, Communicator& world);

}  // namespace ds::run
