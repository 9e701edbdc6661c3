// SPDX-License-Identifier: Apache-2.0
#include "data/read_ahead.h"

namespace ds {

ReadAhead::ReadAhead(const BatchLoader& loader, i64 micro_batches, i64 rank)
    : loader_(loader),
      micro_batches_(micro_batches),
      rank_(rank),
      thread_(start_thread("a thread that reads data ahead", [this](const std::stop_token& stop) { run(stop); })) {}

void ReadAhead::expect(i64 consumed) {
  const std::lock_guard lock(mutex_);
  expected_ = consumed;
  changed_.notify_all();
}

void ReadAhead::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !expected_ && !busy_; });
}

void ReadAhead::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (changed_.wait(lock, stop, [this] { return expected_.has_value(); })) {
    const i64 consumed = *expected_;
    expected_.reset();
    busy_ = true;
    lock.unlock();
    for (i64 m = 0; m < micro_batches_ && !stop.stop_requested(); ++m) loader_.will_need(consumed, m, rank_);
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace ds
