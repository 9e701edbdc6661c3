// SPDX-License-Identifier: Apache-2.0
#pragma once
// A save in the background: StepSave's work runs in a thread of its own, and its meetings in the caller's thread when
// all ranks have done their part. Finding that out costs nothing if ranks already reduce a number in every step: they
// add busy() to it, and when no rank is busy all call proceed().

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "checkpoint/step_save.h"

namespace ds {

// A thread that runs one job after the other. Jobs must not throw.
class Worker {
 public:
  Worker();
  ~Worker();  // waits for all jobs
  void post(std::function<void()> job);
  void wait();  // waits until all jobs are done
  bool idle() const;
  double cpu_seconds() const;  // processor time of all jobs so far

 private:
  void run();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;  // the first one is running
  bool stopping_ = false;
  double cpu_seconds_ = 0;
  std::jthread thread_;
};

class AsyncSave {
 public:
  ~AsyncSave();  // abandons a pending save

  // Waits for the first part of `save`, which is small, and leaves the rest to the thread. Requires that none is
  // pending. Collective.
  void start(std::unique_ptr<StepSave> save);

  bool pending() const noexcept { return save_ != nullptr; }  // the same on all ranks
  bool busy() const { return pending() && !worker_.idle(); }
  // Collective, while a save is pending: waits until this rank has done its part, meets the others, and starts the next
  // part. Returns the save when it has ended.
  std::unique_ptr<StepSave> proceed();

  // Runs other work on files after earlier jobs.
  Worker& worker() noexcept { return worker_; }

 private:
  std::unique_ptr<StepSave> save_;
  Worker worker_;
};

}  // namespace ds
