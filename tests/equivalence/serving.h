// SPDX-License-Identifier: Apache-2.0
#pragma once
// A server of states for tests: the one that ds-offload runs, in a thread of its own.

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/file.h"
#include "ds/config.h"
#include "ds/kernels/state_codes.h"
#include "ds/offload.h"

namespace ds::testing {

// Serves while it exists; leaves no files.
class Serving {
 public:
  explicit Serving(std::string path = {}, bool checksum = false) {
    options_ = {.name = "test-" + random_hex64(), .path = std::move(path), .checksum = checksum};
    start();
  }
  ~Serving() {
    stop();
    try {
      offload::remove_server(options_.name);
    } catch (const Error&) {  // nothing is left
    }
  }
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  void start() {
    stop_ = false;
    is_there_ = false;
    thread_ = std::thread([this] {
      try {
        offload::serve(
            options_, [&](const std::string&) { is_there_ = true; }, [this] { return stop_.load(); });
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
        is_there_ = true;
      }
    });
    while (!is_there_) std::this_thread::yield();
  }
  const std::string& name() const noexcept { return options_.name; }

 private:
  offload::ServeOptions options_;
  std::atomic<bool> stop_ = false, is_there_ = false;
  std::thread thread_;
};

inline Config served(Config c, const Serving& server) {
  c.zero.offload_optimizer = {.device = OffloadDevice::Server, .name = server.name()};
  c.zero.sub_group_size = 2 * kStateBlock;
  return c;
}

}  // namespace ds::testing
