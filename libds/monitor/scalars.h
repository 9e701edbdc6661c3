// SPDX-License-Identifier: Apache-2.0
#pragma once
// A step as a list of numbers, for monitors that draw curves.

#include <string>
#include <vector>

#include "ds/step_record.h"

namespace ds::monitor {

struct Scalar {
  std::string tag;
  double value = 0;
  i64 at = 0;  // step or number of samples
};

inline constexpr const char* kTrainLossTag = "Train/Samples/train_loss";
// The prefixes of all tags of the two functions below.
inline constexpr const char* kTagFamilies[] = {"Train/Samples/", "train/", "compression/", "experts/",
                                               "memory/",        "comm/",  "validation/"};

// First DeepSpeed's, under its names and over samples; then the curves of step_fields(), over steps.
std::vector<Scalar> scalars_of(const StepRecord& record, bool has_loss_scale);
Scalar validation_scalar(i64 step, double loss);

}  // namespace ds::monitor
