// SPDX-License-Identifier: Apache-2.0
#pragma once
// The place of this process in its job, from the environment set by ds-launch or another launcher.

#include <string>
#include <vector>

#include "ds/ranks.h"

namespace ds::tools {

// "NAME=value" strings.
std::vector<std::string> own_environment();

// RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, DS_JOB; without them a job of one rank. Throws Errc::Config for impossible
// values, and if a launcher started several copies that would each be such a job.
RankInfo ranks_of_environment();

}  // namespace ds::tools
