// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/async_save.h"

#include <ctime>

#include "base/thread.h"

namespace ds {
namespace {

double thread_cpu_seconds() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

}  // namespace

Worker::Worker() : thread_(start_thread("the thread that saves", [this] { run(); })) {}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    lock.unlock();
    jobs_.front()();  // others only append, which moves no element of a deque
    lock.lock();
    jobs_.pop_front();
    cpu_seconds_ = thread_cpu_seconds();
    changed_.notify_all();
  }
}

void Worker::post(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  changed_.notify_all();
}

void Worker::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return jobs_.empty(); });
}

bool Worker::idle() const {
  const std::lock_guard lock(mutex_);
  return jobs_.empty();
}

double Worker::cpu_seconds() const {
  const std::lock_guard lock(mutex_);
  return cpu_seconds_;
}

AsyncSave::~AsyncSave() {
  if (save_) save_->cancel();
  worker_.wait();
}

void AsyncSave::start(std::unique_ptr<StepSave> save) {
  DS_ASSERT(!pending());
  save_ = std::move(save);
  worker_.post([this] { save_->work(); });
}

std::unique_ptr<StepSave> AsyncSave::proceed() {
  DS_ASSERT(pending());
  worker_.wait();
  if (!save_->meet()) return std::move(save_);
  worker_.post([this] { save_->work(); });
  return nullptr;
}

}  // namespace ds
