// SPDX-License-Identifier: Apache-2.0
#pragma once
// How much of an operation's time disappears behind computation.

#include "commbench/timing.h"

namespace ds::commbench {

// Products of small matrices on the endpoint's device: work that shares nothing with an operation but the machine.
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

// An operation and about as much computation: each alone, and both at once. Collective.
Overlap measure_overlap(const Endpoint& endpoint, const Timer& timer, const Computation& computation,
                        const Operation& operation, const Task& task);

// Of the shorter of the two, the part that both at once did not add, in percent: 0 where they took as long as one after
// the other or longer, at most 100.
double overlap_percent(double comm_s, double compute_s, double both_s) noexcept;

}  // namespace ds::commbench
