// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "memreport/machine.h"
#include "memreport/step_time.h"

namespace ds::memreport {

struct Hardware::State {
  Machine machine;
  std::optional<Links> links;
};

}  // namespace ds::memreport
