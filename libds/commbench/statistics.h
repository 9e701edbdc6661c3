// SPDX-License-Identifier: Apache-2.0
#pragma once
// Statistics of times.

#include <span>

#include "ds/commbench.h"

namespace ds::commbench {

// Percentiles are by nearest rank, and the deviation is that of the population, as in nccl-tests. `times` must not be
// empty.
Statistics statistics_of(std::vector<double> times);
double median(std::vector<double> values);

// Minimises sum ((alpha + beta * bytes - seconds) / seconds)^2 with alpha and beta not negative. bytes and seconds have
// the same length, at least two, and bytes are not all equal.
struct LineFit {
  double alpha = 0, beta = 0;
  double error = 0;  // root mean square of the relative error
};
LineFit fit_line(std::span<const double> bytes, std::span<const double> seconds);

}  // namespace ds::commbench
