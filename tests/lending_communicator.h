// SPDX-License-Identifier: Apache-2.0
#pragma once
// A communicator that takes the contract at its word: the buffers of an operation are lent to it until its ticket is
// waited for, or that of a later operation of the same order. It gives copies to another communicator, which may be as
// quick as it likes, fills targets with NaN, and puts the results there when the wait ends. So a caller that reads a
// result too early computes with NaN, and one that touches lent memory is reported: on every run, whatever the timing.

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>

#include "comm/make_communicator.h"
#include "device/device.h"

namespace ds::testing {

// Violations of the rules for lent memory, by all ranks of a test.
class LendingRules {
 public:
  void broken(std::string how) {
    const std::lock_guard lock(mutex_);
    broken_.insert(std::move(how));
  }
  // Each in words, once.
  std::set<std::string> all_broken() const {
    const std::lock_guard lock(mutex_);
    return broken_;
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> broken_;
};

class LendingCommunicator final : public Communicator {
 public:
  LendingCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<LendingRules> rules,
                      std::string name = "the world")
      : inner_(std::move(inner)), rules_(std::move(rules)), name_(std::move(name)) {}

  ~LendingCommunicator() override {  // what is still lent may be gone by now
    for (const Order* order : {&operations_, &sends_}) {
      for (const auto& loan : *order) loan->order = nullptr;
    }
  }

  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  std::string_view backend() const noexcept override { return inner_->backend(); }
  int world_rank(int rank) const noexcept override { return inner_->world_rank(rank); }
  std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name,
                                      const CommOptions& options) override {
    return std::make_unique<LendingCommunicator>(inner_->group(members, name, options), rules_, std::string(name));
  }
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override { return inner_->allocate(ledger, tag, bytes); }

  Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                        std::string_view tag) override {
    const auto loan = begin("reduce_scatter", tag);
    std::vector<ReduceScatterSegment> lent;
    for (const ReduceScatterSegment& s : segments) {
      const i64 source_bytes = size() * s.slice_elems * dtype_bytes(wire), target_bytes = s.slice_elems * 4;
      std::byte* const source = loan->lend(s.source, source_bytes, Use::Reads);
      const i64 inside = reinterpret_cast<std::byte*>(s.target) - static_cast<const std::byte*>(s.source);
      std::byte* const within = inside >= 0 && inside < source_bytes ? source + inside : nullptr;
      lent.push_back(
          {source, reinterpret_cast<float*>(loan->lend(s.target, target_bytes, Use::Writes, within)), s.slice_elems});
    }
    loan->poison();
    return lend_until_waited(loan, inner_->reduce_scatter(lent, wire, accumulate, tag));
  }
  Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) override {
    const auto loan = begin("all_gather", tag);
    std::vector<AllGatherSegment> lent;
    for (const AllGatherSegment& s : segments) {
      auto* const at = static_cast<std::byte*>(s.buffer);
      const i64 own = rank() * s.slice_bytes, end = size() * s.slice_bytes;
      std::byte* const copy = loan->lend(at, end, Use::Reads);
      loan->lend(at, own, Use::Writes, copy);
      loan->lend(at + own + s.slice_bytes, end - own - s.slice_bytes, Use::Writes, copy + own + s.slice_bytes);
      lent.push_back({copy, s.slice_bytes});
    }
    loan->poison();
    return lend_until_waited(loan, inner_->all_gather(lent, tag));
  }
  Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) override {
    const auto loan = begin("all_reduce", tag);
    void* const lent = loan->lend(data, n * dtype_bytes(dtype), Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->all_reduce(lent, n, dtype, op, tag));
  }
  Ticket reduce(void* data, i64 n, DType dtype, ReduceOp op, int root, std::string_view tag) override {
    const auto loan = begin("reduce", tag);
    void* const lent = loan->lend(data, n * dtype_bytes(dtype), root == rank() ? Use::Writes : Use::Reads);
    loan->poison();
    return lend_until_waited(loan, inner_->reduce(lent, n, dtype, op, root, tag));
  }
  Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) override {
    const auto loan = begin("broadcast", tag);
    void* const lent = loan->lend(data, bytes, root == rank() ? Use::Reads : Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->broadcast(lent, bytes, root, tag));
  }
  Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) override {
    const auto loan = begin("all_to_all", tag);
    const void* const from = loan->lend(source, size() * slice_bytes, Use::Reads);
    void* const to = loan->lend(target, size() * slice_bytes, Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->all_to_all(from, to, slice_bytes, tag));
  }
  Ticket all_to_allv(const void* source, std::span<const AllToAllSlice> slices_out, void* target,
                     std::span<const AllToAllSlice> slices_in, std::string_view tag) override {
    const auto loan = begin("all_to_allv", tag);
    const void* const from = loan->lend_slices(source, slices_out, Use::Reads);
    void* const to = loan->lend_slices(target, slices_in, Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->all_to_allv(from, slices_out, to, slices_in, tag));
  }
  Ticket gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) override {
    const auto loan = begin("gather", tag);
    const void* const from = loan->lend(source, slice_bytes, Use::Reads);
    void* const to = loan->lend(target, root == rank() ? size() * slice_bytes : 0, Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->gather(from, to, slice_bytes, root, tag));
  }
  Ticket scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) override {
    const auto loan = begin("scatter", tag);
    const void* const from = loan->lend(source, root == rank() ? size() * slice_bytes : 0, Use::Reads);
    void* const to = loan->lend(target, slice_bytes, Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->scatter(from, to, slice_bytes, root, tag));
  }
  Ticket send(const void* data, i64 bytes, int to, std::string_view tag) override {
    const auto loan = begin("send", tag);
    loan->order = &sends_;
    const void* const lent = loan->lend(data, bytes, Use::Reads);
    loan->poison();
    return lend_until_waited(loan, inner_->send(lent, bytes, to, tag));
  }
  Ticket recv(void* data, i64 bytes, int from, std::string_view tag) override {
    const auto loan = begin("recv", tag);
    void* const lent = loan->lend(data, bytes, Use::Writes);
    loan->poison();
    return lend_until_waited(loan, inner_->recv(lent, bytes, from, tag));
  }
  void barrier(std::string_view tag) override { inner_->barrier(tag); }

  void drain() noexcept override {
    inner_->drain();
    for (Order* order : {&operations_, &sends_}) {
      try {
        if (order->empty()) continue;
        const std::shared_ptr<Loan> last = order->back();  // nobody else may hold it
        last->wait();
      } catch (const Error&) {
        order->clear();
      }
    }
  }
  void throw_if_failed() const override { inner_->throw_if_failed(); }
  void abort(const Error& why) noexcept override { inner_->abort(why); }
  std::map<std::string, CommCount> counts() const override { return inner_->counts(); }
  void reset_counts() override { inner_->reset_counts(); }
  i64 staging_bytes() const noexcept override { return inner_->staging_bytes(); }
  void look_for_failures() override { inner_->look_for_failures(); }
  bool has_left(int rank) const override { return inner_->has_left(rank); }
  void show(u64 number) noexcept override { inner_->show(number); }
  u64 shown(int rank) const noexcept override { return inner_->shown(rank); }

 private:
  enum class Use : u8 { Reads, Writes };
  struct Loan;
  using Order = std::deque<std::shared_ptr<Loan>>;

  struct Loan final : Ticket::State {
    struct Range {
      std::byte* owned;
      std::byte* lent;
      size_t bytes;
      Use use;
      std::vector<std::byte> left = {};  // what the owner has meanwhile
    };

    // A copy of the owner's memory; of a part of a copy that there is already, `lent`.
    std::byte* lend(const void* owned, i64 count, Use use, std::byte* lent = nullptr) {
      const size_t bytes = static_cast<size_t>(count);
      if (lent == nullptr) {
        lent = copies.emplace_back(std::make_unique<std::byte[]>(bytes)).get();
        if (bytes > 0) std::memcpy(lent, owned, bytes);
      }
      // Owners that lend to be read only gave us const.
      if (bytes > 0) ranges.push_back({const_cast<std::byte*>(static_cast<const std::byte*>(owned)), lent, bytes, use});
      return lent;
    }
    // A copy that contains the slices at the same offsets; the gaps between them are not lent.
    std::byte* lend_slices(const void* owned, std::span<const AllToAllSlice> slices, Use use) {
      const auto* const from = static_cast<const std::byte*>(owned);
      i64 end = 0;
      for (const AllToAllSlice& s : slices) end = std::max(end, s.offset + s.bytes);
      std::byte* const lent = copies.emplace_back(std::make_unique<std::byte[]>(static_cast<size_t>(end))).get();
      for (const AllToAllSlice& s : slices) {
        if (s.bytes > 0) std::memcpy(lent + s.offset, from + s.offset, static_cast<size_t>(s.bytes));
        lend(from + s.offset, s.bytes, use, lent + s.offset);
      }
      return lent;
    }
    void poison() {
      for (const Range& r : ranges) {
        if (r.use == Use::Writes) std::memset(r.owned, 0xFF, r.bytes);
      }
      for (Range& r : ranges) r.left.assign(r.owned, r.owned + r.bytes);
    }
    void give_back() {
      ticket.wait();
      for (const Range& r : ranges) {
        if (std::memcmp(r.owned, r.left.data(), r.bytes) != 0)
          rules->broken(what + (r.use == Use::Reads ? ": its source was changed" : ": its target was written to") +
                        " before its ticket was waited for");
      }
      for (const Range& r : ranges) {
        if (r.use == Use::Writes) std::memcpy(r.owned, r.lent, r.bytes);
      }
      order = nullptr;
    }
    void wait() override {
      while (order != nullptr) {
        const std::shared_ptr<Loan> first = order->front();
        Order& all = *order;
        first->give_back();
        all.pop_front();
      }
    }
    bool done() const override {
      if (order == nullptr) return true;
      if (!ticket.done()) return false;
      const_cast<Loan*>(this)->wait();  // what is asked for may be used
      return true;
    }

    std::string what;
    std::shared_ptr<LendingRules> rules;
    Order* order;  // null: given back
    std::vector<std::unique_ptr<std::byte[]>> copies;
    std::vector<Range> ranges;
    Ticket ticket;
  };

  std::shared_ptr<Loan> begin(std::string_view operation, std::string_view tag) {
    auto loan = std::make_shared<Loan>();
    loan->what = std::string(operation) + " \"" + std::string(tag) + "\" of " + name_;
    loan->rules = rules_;
    loan->order = &operations_;
    return loan;
  }
  static Ticket lend_until_waited(const std::shared_ptr<Loan>& loan, Ticket&& ticket) {
    loan->ticket = std::move(ticket);
    loan->order->push_back(loan);
    return Ticket(loan);
  }

  const std::unique_ptr<Communicator> inner_;
  const std::shared_ptr<LendingRules> rules_;
  const std::string name_;
  Order operations_, sends_;  // under way, in the order of the calls
};

// Ranks as threads that lend.
inline std::vector<std::unique_ptr<Communicator>> make_lending_threads(int size, const CommOptions& options,
                                                                       const std::shared_ptr<LendingRules>& rules) {
  std::vector<std::unique_ptr<Communicator>> all;
  for (std::unique_ptr<Communicator>& inner : make_thread_communicators(size, options))
    all.push_back(std::make_unique<LendingCommunicator>(std::move(inner), rules));
  return all;
}

}  // namespace ds::testing
