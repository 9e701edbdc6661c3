// SPDX-License-Identifier: Apache-2.0
#include "commbench/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace ds::commbench {

Statistics statistics_of(std::vector<double> times) {
  DS_ASSERT(!times.empty());
  std::vector<double> sorted = times;
  std::sort(sorted.begin(), sorted.end());
  const double n = static_cast<double>(sorted.size());
  const auto percentile = [&](double p) { return sorted[static_cast<size_t>(std::max(0.0, std::ceil(p * n) - 1))]; };
  Statistics s{.min = sorted.front(),
               .avg = std::accumulate(sorted.begin(), sorted.end(), 0.0) / n,
               .max = sorted.back(),
               .p50 = percentile(0.50),
               .p95 = percentile(0.95),
               .p99 = percentile(0.99)};
  double squares = 0;
  for (const double t : sorted) squares += (t - s.avg) * (t - s.avg);
  s.stdev = std::sqrt(squares / n);
  s.times = std::move(times);
  return s;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

LineFit fit_line(std::span<const double> bytes, std::span<const double> seconds) {
  DS_ASSERT(bytes.size() == seconds.size() && bytes.size() >= 2);
  // With x = 1/t and y = w/t the relative error is alpha x + beta y - 1.
  double xx = 0, xy = 0, yy = 0, x1 = 0, y1 = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const double x = 1 / seconds[i], y = bytes[i] / seconds[i];
    xx += x * x, xy += x * y, yy += y * y, x1 += x, y1 += y;
  }
  const auto error_of = [&](double alpha, double beta) {
    double squares = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      const double e = (alpha + beta * bytes[i]) / seconds[i] - 1;
      squares += e * e;
    }
    return std::sqrt(squares / static_cast<double>(bytes.size()));
  };
  LineFit fit;
  const double determinant = xx * yy - xy * xy;
  if (determinant > 0) {
    fit.alpha = (x1 * yy - y1 * xy) / determinant;
    fit.beta = (y1 * xx - x1 * xy) / determinant;
  }
  if (determinant <= 0 || fit.alpha < 0 || fit.beta < 0) {  // then one of them is zero
    const LineFit flat{.alpha = x1 / xx, .beta = 0}, steep{.alpha = 0, .beta = yy > 0 ? y1 / yy : 0};
    fit = error_of(flat.alpha, flat.beta) <= error_of(steep.alpha, steep.beta) ? flat : steep;
  }
  fit.error = error_of(fit.alpha, fit.beta);
  return fit;
}

}  // namespace ds::commbench
