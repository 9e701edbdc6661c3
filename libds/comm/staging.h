// SPDX-License-Identifier: Apache-2.0
#pragma once
// Operations on device memory that are carried out in host memory by another communicator: inputs come down, the other
// one works, results go up; all is enqueued or done when run() returns. Large operations go in chunks. Elements are
// independent, so chunks change no sum.

#include <deque>

#include "comm/async_communicator.h"

namespace ds {

class Staging {
 public:
  Staging(Communicator& world, Device& device) : world_(world), device_(device) {}
  ~Staging();

  // After all that is enqueued on Compute. Done, except for a Send: its memory may be reused, its peer has yet to come.
  Ticket run(const Operation&);
  i64 bytes() const noexcept { return narrow<i64>(memory_.size()); }

 private:
  static constexpr i64 kChunk = i64{32} << 20;  // host memory of one round
  struct Letter {
    std::vector<std::byte> data;
    Ticket sent;
  };

  std::byte* room(i64 bytes);
  void download(void* to, const void* from, i64 bytes);
  void upload(void* to, const void* from, i64 bytes);
  void reduce_scatter(const Operation&);
  void all_gather(const Operation&);
  void all_reduce(const Operation&);
  void broadcast(const Operation&);
  void all_to_all(const Operation&);
  void recv(const Operation&);
  Ticket send(const Operation&);

  Communicator& world_;
  Device& device_;
  std::vector<std::byte> memory_;
  std::vector<ReduceScatterSegment> scattered_;
  std::vector<AllGatherSegment> gathered_;
  std::deque<Letter> letters_;
};

}  // namespace ds
