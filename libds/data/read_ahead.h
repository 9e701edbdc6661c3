// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tokens of a step that is to come, on their way from the disk while another step is taken: a thread asks the system
// for all their pages at once, since a disk that is asked for many together answers sooner than one that is asked for
// each in turn. It is a thread because asking waits where the disk's queue is full. What fails is left to the step.

#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/thread.h"
#include "data/data.h"

namespace ds {

class ReadAhead {
 public:
  // The micro-batches of a step of `rank`; `loader` outlives it.
  ReadAhead(const BatchLoader& loader, i64 micro_batches, i64 rank);
  // The step that begins at `consumed` comes next; what was expected before and has not been begun no longer does.
  void expect(i64 consumed);
  // Waits until the system was asked for all that is expected; for tests.
  void wait();

 private:
  void run(const std::stop_token& stop);

  const BatchLoader& loader_;
  const i64 micro_batches_, rank_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<i64> expected_;
  bool busy_ = false;
  std::jthread thread_;  // last: it works with all of that
};

}  // namespace ds
