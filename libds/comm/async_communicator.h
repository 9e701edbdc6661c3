// SPDX-License-Identifier: Apache-2.0
#pragma once
// What all communicators have in common: calls become Operations in a queue that a progress thread works off; counting;
// the latch that keeps the first failure; and every collective expressed as one primitive, `exchange`, in which ranks
// expose slices and consume those of their peers piece by piece. A backend only moves bytes: exchange, transmit,
// receive.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>

#include "comm/communicator.h"

namespace ds {

enum class OpKind : u8 { ReduceScatter, AllGather, AllReduce, Broadcast, AllToAll, Send, Recv, Barrier, Allocate };
std::string_view op_name(OpKind) noexcept;

// One contiguous part of an operation. Whether `source` and `target` hold one slice or one per rank is the Exchange's.
struct Segment {
  const std::byte* source;
  std::byte* target;
  i64 slice_bytes;
};

// Memory of operations: freed blocks are kept, so that a training step reaches no allocator.
std::pmr::memory_resource* operation_memory();

struct Operation {
  OpKind kind;
  DType dtype = DType::U8;
  ReduceOp reduce = ReduceOp::Sum;
  bool accumulate = false;
  int peer = -1;  // root of a broadcast, other side of send and recv
  std::pmr::vector<Segment> segments{operation_memory()};
  std::pmr::string tag{operation_memory()};
  Buffer* buffer = nullptr;  // Allocate only, with ledger and memory_tag
  MemoryLedger* ledger = nullptr;
  Tag memory_tag = Tag::Comm;

  i64 slice_bytes() const noexcept;  // over all segments
};

// The part of an operation that all ranks must agree on; plain data that travels between them.
struct CallInfo {
  u64 number = 0;  // collective calls before this one
  i64 bytes = 0;   // per slice
  u64 shape = 0;   // hash of the segments' sizes
  u32 segments = 0;
  i32 root = -1;
  OpKind kind{};
  DType dtype{};
  ReduceOp reduce{};
  std::array<char, 37> tag{};  // for messages; need not agree

  static CallInfo of(const Operation&, u64 number) noexcept;
  bool agrees_with(const CallInfo& other) const noexcept;
  std::string describe() const;  // all_gather "dp.params" of 2 segments, 1024 bytes per slice
};

// Which slices travel. Scatter: source holds P slices, slice q is for rank q. Share: source is one slice, for everyone.
// Root: as Share, but only the root's.
enum class Pattern : u8 { Scatter, Share, Root };

struct Exchange {
  Pattern pattern;
  std::span<const Segment> segments;
  // True: consuming means copying, what comes from rank q belongs at target + q * slice_bytes (Root: at target), and a
  // backend may put it there itself.
  bool lands = false;
  int root = -1;

  bool from(int rank) const noexcept { return pattern != Pattern::Root || rank == root; }
  i64 length() const noexcept;
  std::byte* landing(const Segment& s, int from) const noexcept {
    return s.target + (pattern == Pattern::Root ? 0 : from * s.slice_bytes);
  }
};

// Bytes [offset, offset + bytes) of one segment's slice, from every rank: sources[q], null where from(q) is false.
struct Piece {
  const Segment* segment;
  i64 offset;
  i64 bytes;
  std::span<const std::byte* const> sources;
};

// Calls f(segment, offset, bytes, position) for the parts of the segments' concatenated slices that cover
// [begin, begin + count); position counts from begin.
template <class F>
void for_each_part(std::span<const Segment> segments, i64 begin, i64 count, F&& f) {
  i64 start = 0;
  for (const Segment& s : segments) {
    const i64 from = std::max(begin, start), to = std::min(begin + count, start + s.slice_bytes);
    if (from < to) f(s, from - start, to - from, from - begin);
    start += s.slice_bytes;
    if (start >= begin + count) return;
  }
}

struct Failure {
  Errc code;
  std::string message;
  int rank;
};

struct Ticket::State : Operation {
  explicit State(OpKind op_kind) : Operation{.kind = op_kind} {}
  std::atomic<u32> finished{0};
  std::shared_ptr<const Failure> failure;  // written before `finished`
};

class AsyncCommunicator : public Communicator {
 public:
  int rank() const noexcept final { return rank_; }
  int size() const noexcept final { return size_; }
  std::string_view backend() const noexcept final { return backend_; }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) final;
  Ticket reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                        std::string_view tag) final;
  Ticket all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) final;
  Ticket all_reduce(void* data, i64 n, DType dtype, ReduceOp op, std::string_view tag) final;
  Ticket broadcast(void* data, i64 bytes, int root, std::string_view tag) final;
  Ticket all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) final;
  Ticket send(const void* data, i64 bytes, int to, std::string_view tag) final;
  Ticket recv(void* data, i64 bytes, int from, std::string_view tag) final;
  void barrier(std::string_view tag) final;
  void throw_if_failed() const final;
  void abort(const Error& why) noexcept final;
  std::map<std::string, CommCount> counts() const final;
  void reset_counts() final;
  i64 staging_bytes() const noexcept override { return narrow<i64>(scratch_.size()); }

 protected:
  AsyncCommunicator(std::string_view backend, int rank, int size, const CommOptions& options);

  // Works off what is queued and ends the threads; or, when an exception is unwinding the owner, aborts. The first line
  // of a backend's destructor.
  void shut_down() noexcept;

  // Collective. Checks that all ranks make the same call, then calls `consume` for pieces that together cover every
  // slice that is for this rank. Returns when no peer reads this rank's source any more.
  virtual void exchange(const Operation&, const Exchange&, FunctionRef<void(const Piece&)> consume) = 0;
  // Point to point; segments[0].source or .target. Runs on the sending thread, beside exchange and receive.
  virtual void transmit(const Operation&) = 0;
  virtual void receive(const Operation&) = 0;
  // Collective, after an exchange in which the ranks agreed on the size.
  virtual Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) = 0;
  // Makes `failure` known to all ranks unless one is known already; returns the one that holds. Thread-safe.
  virtual Failure publish(Failure failure) noexcept = 0;

  double timeout_s() const noexcept { return timeout_s_; }
  // The peers' failure as an exception: publishes, then throws what holds.
  [[noreturn]] void fail(Errc code, int rank, const std::string& message);

 private:
  // A queue and the thread that works it off; the thread starts with the first operation.
  class Worker {
   public:
    explicit Worker(AsyncCommunicator& owner) : owner_(owner) {}
    void push(std::shared_ptr<Ticket::State> operation);
    void finish() noexcept;  // after the queue is empty

   private:
    void loop();
    AsyncCommunicator& owner_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::queue<std::shared_ptr<Ticket::State>, std::pmr::deque<std::shared_ptr<Ticket::State>>> queue_{
        std::pmr::deque<std::shared_ptr<Ticket::State>>(operation_memory())};
    bool stop_ = false;
    std::jthread thread_;
  };

  std::shared_ptr<Ticket::State> make_operation(OpKind kind, std::string_view tag, i64 sent_bytes);
  Ticket submit(std::shared_ptr<Ticket::State> operation);
  void run(Ticket::State& operation) noexcept;
  void execute(const Operation& operation);
  void reduce_scatter_now(const Operation&, std::span<const Segment> segments);
  void all_reduce_now(const Operation&);
  void gather_now(const Operation&, std::span<const Segment> segments, Pattern pattern);
  void fold(float* target, std::span<const std::byte* const> sources, i64 elems, DType wire, bool accumulate);
  void latch(const Failure& failure);

  const std::string_view backend_;
  const int rank_;
  const int size_;
  const double timeout_s_;
  const bool progress_thread_;
  const OpTable& ops_;
  const int uncaught_at_birth_;

  ThreadPool fold_pool_{1};
  std::vector<TensorView> fold_sources_;
  std::vector<std::byte> scratch_;  // of small all-reduces

  mutable std::mutex mutex_;
  std::shared_ptr<const Failure> failure_;
  std::map<std::string, CommCount, std::less<>> counts_;

  Worker progress_{*this};
  Worker sender_{*this};
};

}  // namespace ds
