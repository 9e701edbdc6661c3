// SPDX-License-Identifier: Apache-2.0
#pragma once
// A save beside training: StepSave's work on a thread of its own, its meetings on the caller's thread whenever all
// ranks have done their part. Learning that costs nothing where ranks already agree on a number in every step: they add
// busy() to it, and when nobody is busy all of them call proceed().

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "checkpoint/step_save.h"

namespace ds {

// A thread that does one job after the other. Jobs throw nothing.
class Worker {
 public:
  Worker();
  ~Worker();  // after all jobs
  void post(std::function<void()> job);
  void wait();  // until all jobs are done
  bool idle() const;
  double cpu_seconds() const;  // of all jobs so far

 private:
  void run();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;  // the first one is being done
  bool stopping_ = false;
  double cpu_seconds_ = 0;
  std::jthread thread_;
};

class AsyncSave {
 public:
  ~AsyncSave();  // gives a pending save up

  // Waits for `save`'s first part, which is small, and leaves the rest to the thread. None is pending. Collective.
  void start(std::unique_ptr<StepSave> save);

  bool pending() const noexcept { return save_ != nullptr; }  // the same on all ranks
  bool busy() const { return pending() && !worker_.idle(); }
  // Collective, while one is pending: waits until this rank has done its part, meets the others, and goes on. Returns
  // the save when it has ended.
  std::unique_ptr<StepSave> proceed();

  // Other work on files, in its turn.
  Worker& worker() noexcept { return worker_; }

 private:
  std::unique_ptr<StepSave> save_;
  Worker worker_;
};

}  // namespace ds
