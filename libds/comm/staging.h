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

  // After all that is enqueued on Compute. Done, except for a Send, whose memory may be reused while its peer has yet
  // to come, and a Recv, which is taken up when somebody waits for it or for an operation behind it.
  Ticket run(const Operation&);
  i64 bytes() const noexcept;

 private:
  static constexpr i64 kChunk = i64{32} << 20;  // host memory of one round
  struct Letter {
    std::vector<std::byte> data;
    Ticket sent;
  };
  // Done once it is in the device's memory, behind all that arrived before.
  struct Arrival final : Ticket::State {
    explicit Arrival(Device& d) : device(d) {}
    void wait() override;
    bool done() const override { return landed; }
    Device& device;
    std::vector<std::byte> data;
    i64 bytes = 0;
    void* target = nullptr;
    Ticket received;
    std::shared_ptr<Arrival> before;
    bool landed = true;
  };

  std::byte* room(i64 bytes);
  void download(void* to, const void* from, i64 bytes);
  void upload(void* to, const void* from, i64 bytes);
  void reduce_scatter(const Operation&);
  void all_gather(const Operation&);
  void all_reduce(const Operation&);
  void reduce(const Operation&);
  void broadcast(const Operation&);
  void all_to_all(const Operation&);
  void gather(const Operation&);
  void scatter(const Operation&);
  Ticket recv(const Operation&);
  Ticket send(const Operation&);
  void settle();

  Communicator& world_;
  Device& device_;
  std::vector<std::byte> memory_;
  std::vector<ReduceScatterSegment> scattered_;
  std::vector<AllGatherSegment> gathered_;
  std::deque<Letter> letters_;                      // used again when they have arrived
  std::vector<std::shared_ptr<Arrival>> arrivals_;  // used again when nobody asks for them any more
  std::shared_ptr<Arrival> last_arrival_;           // null: all have landed
};

}  // namespace ds
