// SPDX-License-Identifier: Apache-2.0
#pragma once
// A transport of known slowness: another communicator whose operations also take the time that a link of this latency
// and bandwidth would, one after the other. Waiting for a link costs no processor time, so computation continues beside
// it even if every core is busy: overlap shows in the time of a step.

#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include "device/device.h"
#include "ds/communicator.h"

namespace ds::bench {

// The link of one rank; its communicators share it.
class Link {
 public:
  using Clock = std::chrono::steady_clock;
  Link(double latency_s, double bytes_per_s) : latency_s_(latency_s), bytes_per_s_(bytes_per_s) {}

  // When a message of so many bytes that is sent now will have passed.
  Clock::time_point pass(i64 bytes) {
    const auto time = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(latency_s_ + static_cast<double>(bytes) / bytes_per_s_));
    const std::lock_guard lock(mutex_);
    busy_ += time;
    free_ = std::max(free_, Clock::now()) + time;
    return free_;
  }
  // Seconds that messages have taken so far.
  double busy() const {
    const std::lock_guard lock(mutex_);
    return std::chrono::duration<double>(busy_).count();
  }

 private:
  const double latency_s_, bytes_per_s_;
  mutable std::mutex mutex_;
  Clock::time_point free_{};
  Clock::duration busy_{};
};

class DelayedCommunicator final : public Communicator {
 public:
  // at_once: operations end inside the call (overlap_comm off).
  DelayedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<Link> link, bool at_once)
      : inner_(std::move(inner)), link_(std::move(link)), at_once_(at_once) {}

  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::string_view backend() const noexcept override { return inner_->backend(); }
  int world_rank(int rank) const noexcept override { return inner_->world_rank(rank); }
  std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name,
                                      const CommOptions& options) override {
    return std::make_unique<DelayedCommunicator>(inner_->group(members, name, options), link_, at_once_);
  }
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override { return inner_->allocate(ledger, tag, bytes); }

  Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                        std::string_view tag) override {
    i64 bytes = 0;
    for (const auto& s : segments) bytes += s.slice_elems * dtype_bytes(wire);
    return late(inner_->reduce_scatter(segments, wire, accumulate, tag), (size() - 1) * bytes);
  }
  Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) override {
    i64 bytes = 0;
    for (const auto& s : segments) bytes += s.slice_bytes;
    return late(inner_->all_gather(segments, tag), (size() - 1) * bytes);
  }
  Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) override {
    return late(inner_->all_reduce(data, n, dtype, op, tag), 2 * (size() - 1) * n * dtype_bytes(dtype) / size());
  }
  Ticket reduce(void* data, i64 n, DType dtype, ReduceOp op, int root, std::string_view tag) override {
    return late(inner_->reduce(data, n, dtype, op, root, tag), n * dtype_bytes(dtype));
  }
  Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) override {
    return late(inner_->broadcast(data, bytes, root, tag), bytes);
  }
  Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) override {
    return late(inner_->all_to_all(source, target, slice_bytes, tag), (size() - 1) * slice_bytes);
  }
  Ticket all_to_allv(const void* source, std::span<const AllToAllSlice> slices_out, void* target,
                     std::span<const AllToAllSlice> slices_in, std::string_view tag) override {
    i64 bytes = -slices_out[rank()].bytes;
    for (const AllToAllSlice& s : slices_out) bytes += s.bytes;
    return late(inner_->all_to_allv(source, slices_out, target, slices_in, tag), bytes);
  }
  Ticket gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) override {
    return late(inner_->gather(source, target, slice_bytes, root, tag), (size() - 1) * slice_bytes);
  }
  Ticket scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) override {
    return late(inner_->scatter(source, target, slice_bytes, root, tag), (size() - 1) * slice_bytes);
  }
  Ticket send(const void* data, i64 bytes, int to, std::string_view tag) override {
    return inner_->send(data, bytes, to, tag);
  }
  Ticket recv(void* data, i64 bytes, int from, std::string_view tag) override {
    return late(inner_->recv(data, bytes, from, tag), bytes);
  }
  void barrier(std::string_view tag) override { inner_->barrier(tag); }

  void drain() noexcept override { inner_->drain(); }
  void throw_if_failed() const override { inner_->throw_if_failed(); }
  void abort(const Error& why) noexcept override { inner_->abort(why); }
  std::map<std::string, CommCount> counts() const override { return inner_->counts(); }
  void reset_counts() override { inner_->reset_counts(); }
  i64 staging_bytes() const noexcept override { return inner_->staging_bytes(); }

 private:
  struct Late final : Ticket::State {
    Late(Ticket t, Link::Clock::time_point p) : ticket(std::move(t)), passed(p) {}
    void wait() override {
      ticket.wait();
      std::this_thread::sleep_until(passed);
    }
    bool done() const override { return ticket.done() && Link::Clock::now() >= passed; }
    Ticket ticket;
    const Link::Clock::time_point passed;
  };

  Ticket late(Ticket ticket, i64 bytes) {
    if (size() == 1) return ticket;
    Ticket result(std::make_shared<Late>(std::move(ticket), link_->pass(bytes)));
    if (at_once_) result.wait();
    return result;
  }

  const std::unique_ptr<Communicator> inner_;
  const std::shared_ptr<Link> link_;
  const bool at_once_;
};

}  // namespace ds::bench
