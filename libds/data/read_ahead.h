// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens of a step that is to come, on their way from the disk while another step is taken: a thread reads them as the
// step will, into memory that it forgets, so that their pages are there. What fails is left to the step.

#include <condition_variable>
#include <mutex>
#include <optional>
#include <vector>

#include "base/thread.h"
#include "data/data.h"

namespace ds {

class ReadAhead {
 public:
  // The micro-batches of a step of `rank`; `loader` outlives it.
  ReadAhead(const BatchLoader& loader, const BatchShape& shape, i64 micro_batches, i64 rank);
  // The step that begins at `consumed` comes next; what was expected before and has not been begun no longer does.
  void expect(i64 consumed);
  // Waits until nothing is expected; for tests.
  void wait();

 private:
  void run(const std::stop_token& stop);

  const BatchLoader& loader_;
  const i64 micro_batches_, rank_;
  std::vector<i32> inputs_, targets_;  // of a micro-batch
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<i64> expected_;
  bool busy_ = false;
  std::jthread thread_;  // last: it works with all of that
};

}  // namespace ds
