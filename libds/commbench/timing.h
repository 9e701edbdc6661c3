// SPDX-License-Identifier: Apache-2.0
#pragma once
// Times iterations in a row or one by one, and combines the times of the ranks.

#include <functional>
#include <vector>

#include "commbench/endpoint.h"
#include "commbench/operation.h"

namespace ds::commbench {

class Timer {
 public:
  Timer(const Endpoint& endpoint, const Options& options) : endpoint_(endpoint), options_(options) {}

  void warm_up(const Operation& operation, const Task& task) const;
  // Seconds of one message of one iteration, combined over ranks. In a row: all iterations are enqueued, as in
  // nccl-tests.
  double in_a_row(const Operation& operation, const Task& task) const;
  // Single: each begins at a barrier and is waited for, as in the OSU benchmarks.
  std::vector<double> one_by_one(const Operation& operation, const Task& task) const;
  // The same for any function; every rank takes part.
  std::vector<double> one_by_one(const std::function<void()>& body) const;

 private:
  void finish(Tickets& tickets) const;
  std::vector<double> time_each(const std::function<void()>& body) const;
  // num_active: the number of ranks that take part; this rank need not be one of them.
  std::vector<double> over_ranks(std::vector<double> seconds, bool active, int num_active) const;
  std::vector<double> over_ranks(const Operation& operation, std::vector<double> seconds) const;

  const Endpoint& endpoint_;
  const Options& options_;
};

}  // namespace ds::commbench
