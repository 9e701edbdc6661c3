// SPDX-License-Identifier: Apache-2.0
#pragma once
// The clock: iterations in a row or one by one, and what the ranks' times are together.

#include <functional>
#include <vector>

#include "commbench/endpoint.h"
#include "commbench/operation.h"

namespace ds::commbench {

class Timer {
 public:
  Timer(const Endpoint& endpoint, const Options& options) : endpoint_(endpoint), options_(options) {}

  void warm_up(const Operation& operation, const Task& task) const;
  // Seconds of one message of one iteration, of the ranks together.
  // In a row: as many iterations are under way as there are, as in nccl-tests.
  double in_a_row(const Operation& operation, const Task& task) const;
  // Each begins at a barrier and is waited for: OSU's method.
  std::vector<double> one_by_one(const Operation& operation, const Task& task) const;
  // The same of anything; every rank takes part.
  std::vector<double> one_by_one(const std::function<void()>& body) const;

 private:
  void finish(Tickets& tickets) const;
  std::vector<double> time_each(const std::function<void()>& body) const;
  // num_active: of ranks that take part, of which this rank is one or not.
  std::vector<double> over_ranks(std::vector<double> seconds, bool active, int num_active) const;
  std::vector<double> over_ranks(const Operation& operation, std::vector<double> seconds) const;

  const Endpoint& endpoint_;
  const Options& options_;
};

}  // namespace ds::commbench
