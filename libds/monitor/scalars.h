// SPDX-License-Identifier: Apache-2.0
#pragma once
// A step as a list of named numbers, for monitors that draw curves.

#include <string>
#include <vector>

#include "ds/step_record.h"

namespace ds::monitor {

struct Scalar {
  std::string tag;
  double value = 0;
  i64 at = 0;  // the place on the curve
};

inline constexpr const char* kTrainLossTag = "Train/Samples/train_loss";
// How every tag of the two functions below begins.
inline constexpr const char* kTagFamilies[] = {"Train/Samples/", "train/", "compression/",
                                               "memory/",        "comm/",  "validation/"};

// First those that DeepSpeed writes, under its names and over samples; behind them ours, over steps.
std::vector<Scalar> scalars_of(const StepRecord& record, bool has_loss_scale);
Scalar validation_scalar(i64 step, double loss);

}  // namespace ds::monitor
