// SPDX-License-Identifier: Apache-2.0
#pragma once
// Requests the tokens of the next step from the disk during a step: a thread asks the system for all their pages at
// once, since a disk serves many requests together faster than one after another. It is a thread because a request
// waits if the disk's queue is full. Errors are ignored; the step will meet them.

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
  // The step that begins at `consumed` comes next. This replaces an earlier expectation that was not begun.
  void expect(i64 consumed);
  // Waits until all expected pages have been requested; for tests.
  void wait();

 private:
  void run(const std::stop_token& stop);

  const BatchLoader& loader_;
  const i64 micro_batches_, rank_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::optional<i64> expected_;
  bool busy_ = false;
  std::jthread thread_;  // last: it uses the other members
};

}  // namespace ds
