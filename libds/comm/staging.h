// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs operations on device memory in host memory, by another communicator: downloads the inputs, runs the operation,
// uploads the results. Everything is enqueued or done when run() returns. Large operations are split into chunks;
// elements are independent, so this changes no sum.

#include <deque>

#include "comm/async_communicator.h"

namespace ds {

class Staging {
 public:
  Staging(Communicator& world, Device& device) : world_(world), device_(device) {}
  ~Staging();

  // Runs after all work enqueued on Compute. The operation is then done, except for a Send, whose memory may be reused
  // although its peer has not arrived, and a Recv, which runs when it or a later operation is waited for.
  Ticket run(const Operation&);
  i64 bytes() const noexcept;

 private:
  static constexpr i64 kChunk = i64{32} << 20;  // host memory of one chunk
  struct Letter {
    std::vector<std::byte> data;
    Ticket sent;
  };
  // Done when the data is in device memory, after all earlier arrivals.
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
  void all_to_allv(const Operation&);
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
  std::vector<i64> sizes_;  // of an all_to_allv, of all ranks
  std::vector<AllToAllSlice> slices_out_, slices_in_;
  std::deque<Letter> letters_;                      // reused when they have arrived
  std::vector<std::shared_ptr<Arrival>> arrivals_;  // reused when nothing refers to them any more
  std::shared_ptr<Arrival> last_arrival_;           // null: all have arrived
};

}  // namespace ds
