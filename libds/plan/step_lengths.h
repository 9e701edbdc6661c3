// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long the passes of training steps are, where that changes from step to step: sequences that grow
// (curriculum_learning) and layers that see some of the tokens (random_ltd).

#include <vector>

#include "ds/config.h"
#include "model/models.h"

namespace ds::plan {

using model::PassLengths;

// Step numbers begin at 1.
PassLengths lengths_of_step(const Config& config, i64 step);

struct StepLengths {
  struct Kind {
    PassLengths lengths;
    i64 steps = 0;  // that have them
  };
  std::vector<Kind> kinds;  // all different, in the order in which steps come to them
  // False: there are more than kMost kinds. These are of kMost steps at equal distances, each for all steps up to it.
  bool complete = true;

  static constexpr i64 kMost = 512;
};
// Those of steps 1 to `steps`.
StepLengths step_lengths(const Config& config, i64 steps);

// The same run, all steps of which have whole sequences in all layers.
Config of_whole_sequences(Config config);

}  // namespace ds::plan
