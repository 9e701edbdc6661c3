// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures how much of an operation's time computation hides.

#include "commbench/timing.h"

namespace ds::commbench {

// Products of small matrices on the endpoint's device: work that shares only the machine with an operation.
class Computation {
 public:
  explicit Computation(Device& device);
  void run(i64 products) const;  // enqueued
  double seconds_of_one() const;

 private:
  Device& device_;
  MemoryLedger ledger_;
  Buffer memory_;
};

// Times an operation and about as much computation: each alone, and both at once. Collective.
Overlap measure_overlap(const Endpoint& endpoint, const Timer& timer, const Computation& computation,
                        const Operation& operation, const Task& task);

// The hidden fraction of the shorter of the two, in percent: 0 if both at once took at least as long as one after the
// other, at most 100.
double overlap_percent(double comm_s, double compute_s, double both_s) noexcept;

}  // namespace ds::commbench
