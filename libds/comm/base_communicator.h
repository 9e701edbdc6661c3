// SPDX-License-Identifier: Apache-2.0
#pragma once
// The base of all communicators: turns a call into an Operation, counts it, and passes it to the backend; and the latch
// that keeps the first failure.

#include <array>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "ds/communicator.h"

namespace ds {

enum class OpKind : u8 {
  ReduceScatter,
  AllGather,
  AllReduce,
  Reduce,
  Broadcast,
  AllToAll,
  AllToAllV,
  Gather,
  Scatter,
  Send,
  Recv,
  Barrier,
  Allocate,
  Attach
};
std::string_view op_name(OpKind) noexcept;

// One part of an operation. The Exchange states whether `source` and `target` hold one slice or one per rank.
struct OpSegment {
  const std::byte* source;
  std::byte* target;
  i64 slice_bytes;
  i64 source_gap = 0, target_gap = 0;  // bytes between slices

  i64 source_stride() const noexcept { return slice_bytes + source_gap; }
  i64 target_stride() const noexcept { return slice_bytes + target_gap; }
};

inline bool is_16_bit(DType dtype) noexcept { return dtype == DType::BF16 || dtype == DType::F16; }
// The dtypes of all_reduce and reduce.
inline bool is_reducible(DType dtype) noexcept {
  return dtype == DType::F32 || is_16_bit(dtype) || dtype == DType::F64 || dtype == DType::I32 || dtype == DType::I64;
}

// Memory for operations. Freed blocks are kept, so that a training step calls no allocator.
std::pmr::memory_resource* operation_memory();

struct Operation {
  OpKind kind;
  DType dtype = DType::U8;
  ReduceOp reduce = ReduceOp::Sum;
  bool accumulate = false;
  int peer = -1;  // the root, or the other side of send and recv
  int root = -1;  // of a collective: world rank
  std::pmr::vector<OpSegment> segments{operation_memory()};
  // For all_to_allv, which has no segments: the bytes for each rank, and the place of those from each.
  std::pmr::vector<std::span<const std::byte>> out{operation_memory()};
  std::pmr::vector<std::span<std::byte>> in{operation_memory()};
  std::pmr::string tag{operation_memory()};
  Buffer* buffer = nullptr;  // only for Allocate, with ledger and memory_tag
  MemoryLedger* ledger = nullptr;
  Tag memory_tag = Tag::Comm;

  i64 slice_bytes() const noexcept;  // over all segments
  i64 out_bytes() const noexcept;    // of all_to_allv, over all ranks
};

// The part of an operation that all ranks must agree on; plain data, exchanged between them.
struct CallInfo {
  u64 number = 0;     // collective calls before this one
  i64 bytes = 0;      // per slice
  u64 shape = 0;      // hash of the segments' sizes
  u64 imbalance = 0;  // size_imbalance(); need not agree
  u32 segments = 0;
  i32 root = -1;  // world rank
  OpKind kind{};
  DType dtype{};
  ReduceOp reduce{};
  bool accumulate = false;
  std::array<char, 36> tag{};  // for messages; need not agree

  bool agrees_with(const CallInfo& other) const noexcept;
  std::string describe() const;  // all_gather "dp.params" of 2 segments, 1024 bytes per slice
};

struct Failure {
  Errc code;
  std::string message;
  int rank;
};

// Keeps the first failure. Thread-safe.
class FailureLatch {
 public:
  void set(const Failure& failure);
  std::shared_ptr<const Failure> get() const;  // null: none
  void throw_if_set() const;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Failure> failure_;
};

// The world ranks of its ranks.
std::vector<int> world_ranks(const Communicator&);

class BaseCommunicator : public Communicator {
 public:
  int rank() const noexcept final { return rank_; }
  int size() const noexcept final { return size_; }
  std::string_view backend() const noexcept final { return backend_; }
  int world_rank(int rank) const noexcept final { return members_.empty() ? rank : members_[rank]; }

  // Throws: there are no groups over device memory.
  std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name, const CommOptions&) override;

  Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                        std::string_view tag) final;
  Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) final;
  Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) final;
  Ticket reduce(void* data, i64 n, DType dtype, ReduceOp op, int root, std::string_view tag) final;
  Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) final;
  Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) final;
  Ticket all_to_allv(const void* source, std::span<const AllToAllSlice> slices_out, void* target,
                     std::span<const AllToAllSlice> slices_in, std::string_view tag) final;
  Ticket gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) final;
  Ticket scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) final;
  Ticket send(const void* data, i64 bytes, int to, std::string_view tag) final;
  Ticket recv(void* data, i64 bytes, int from, std::string_view tag) final;
  void barrier(std::string_view tag) final;
  std::map<std::string, CommCount> counts() const final;
  void reset_counts() final;

 protected:
  // members: the ranks' world ranks; empty: this is a world.
  BaseCommunicator(std::string_view backend, int rank, int size, std::vector<int> members = {})
      : backend_(backend), rank_(rank), size_(size), members_(std::move(members)) {}

  int own_number() const noexcept { return world_rank(rank_); }  // world rank

  // Executes the operation or queues it; throws an earlier failure.
  virtual Ticket submit(Operation&& operation) = 0;
  void count_time(std::string_view tag, double seconds);
  // Counts the call.
  Operation make_operation(OpKind kind, std::string_view tag, i64 sent_bytes);
  CallInfo call_info(const Operation&, u64 number) const noexcept;

 private:
  const std::string_view backend_;
  const int rank_;
  const int size_;
  const std::vector<int> members_;
  mutable std::mutex mutex_;
  std::map<std::string, CommCount, std::less<>> counts_;
};

}  // namespace ds
