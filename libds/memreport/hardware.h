// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "memreport/machine.h"
#include "memreport/step_time.h"

namespace ds::memreport {

struct Hardware::State {
  Machine machine;
  std::optional<Links> links;
  std::string disk = {};  // where it was measured
};

}  // namespace ds::memreport
