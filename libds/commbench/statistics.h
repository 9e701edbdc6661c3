// SPDX-License-Identifier: Apache-2.0
#pragma once
// Of times.

#include <span>

#include "ds/commbench.h"

namespace ds::commbench {

// Percentiles are by nearest rank, the deviation is that of the whole, as in nccl-tests. `times` is not empty.
Statistics statistics_of(std::vector<double> times);
double median(std::vector<double> values);

// The least of sum ((alpha + beta * bytes - seconds) / seconds)^2 with neither below zero; bytes and seconds have the
// same length, at least two, not all bytes equal.
struct LineFit {
  double alpha = 0, beta = 0;
  double error = 0;  // root mean square of the relative error
};
LineFit fit_line(std::span<const double> bytes, std::span<const double> seconds);

}  // namespace ds::commbench
