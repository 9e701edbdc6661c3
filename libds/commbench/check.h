// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs an operation on known data and compares the results bit for bit.

#include "commbench/endpoint.h"
#include "commbench/operation.h"

namespace ds::commbench {

class Checker {
 public:
  Checker(const Endpoint& endpoint, const Options& options) : endpoint_(endpoint), options_(options) {}

  // Fills the inputs of a task with new data, and its outputs with other bits.
  void prepare(const Operation& operation, const Task& task);
  struct Verdict {
    i64 num_wrong = 0;  // wrong elements of all ranks
    std::optional<WrongElement> first{};
  };
  // Runs it once on new data. Collective; every rank returns the same.
  Verdict check(const Operation& operation, const Task& task);

 private:
  Pattern pattern(const Operation& operation, const Task& task) const;

  const Endpoint& endpoint_;
  const Options& options_;
  u64 salt_ = 0;
};

}  // namespace ds::commbench
