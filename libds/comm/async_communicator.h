// SPDX-License-Identifier: Apache-2.0
#pragma once
// The base of communicators over host memory. A progress thread executes queued Operations. Every collective is
// expressed by one primitive, `exchange`, in which ranks expose slices and consume those of their peers piece by piece,
// so a backend only moves bytes: exchange, transmit, receive.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>

#include "comm/base_communicator.h"

namespace ds {

// The slices that an exchange moves.
struct Exchange {
  bool sliced;  // a source holds P slices, slice q for rank q; else one slice for all ranks
  std::span<const OpSegment> segments;
  // Consuming means copying: data of rank q belongs at landing(q), where a backend may put it directly.
  bool lands = false;
  int only_from = -1;  // the only rank that has a source; -1: all
  int only_to = -1;    // the only rank that consumes; -1: all

  bool from(int rank) const noexcept { return only_from < 0 || rank == only_from; }
  bool to(int rank) const noexcept { return only_to < 0 || rank == only_to; }
  i64 length() const noexcept;
  // The slice for rank `to`.
  const std::byte* slice(const OpSegment& s, int to) const noexcept {
    return s.source + (sliced ? to * s.source_stride() : 0);
  }
  std::byte* landing(const OpSegment& s, int from) const noexcept {
    return s.target + (only_from < 0 ? from * s.target_stride() : 0);
  }
};

// Bytes [offset, offset + bytes) of one segment's slice from every rank: sources[q], null if from(q) is false.
struct SliceRange {
  const OpSegment* segment;
  i64 offset;
  i64 bytes;
  std::span<const std::byte* const> sources;
};

// Splits the range [begin, begin + count) of the segments' concatenated slices and calls f(segment, offset, bytes,
// position) for each part; position counts from begin.
template <class F>
void for_each_part(std::span<const OpSegment> segments, i64 begin, i64 count, F&& f) {
  i64 start = 0;
  for (const OpSegment& s : segments) {
    const i64 from = std::max(begin, start), to = std::min(begin + count, start + s.slice_bytes);
    if (from < to) f(s, from - start, to - from, from - begin);
    start += s.slice_bytes;
    if (start >= begin + count) return;
  }
}

struct QueuedOperation final : Ticket::State, Operation {
  explicit QueuedOperation(Operation&& operation) : Operation(std::move(operation)) {}
  void wait() override;
  bool done() const override { return finished.load(std::memory_order_acquire) != 0; }
  std::atomic<u32> finished{0};
  std::shared_ptr<const Failure> failure;  // written before `finished`
};

class AsyncCommunicator;

// Makes a communicator a group of a world, or a part of a group.
struct Membership {
  AsyncCommunicator* world = nullptr;  // null: this is a world
  std::string name;
  std::vector<int> ranks;  // world ranks; empty in a world
};

// A world and its groups share one failure, the world's. Every wait therefore checks what all ranks of the world have
// reported, and the health of all of them.
class AsyncCommunicator : public BaseCommunicator {
 public:
  std::unique_ptr<Communicator> group(std::span<const int> members, std::string_view name, const CommOptions&) final;
  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) final;
  void throw_if_failed() const final { world_.failure_.throw_if_set(); }
  void look_for_failures() final;
  void abort(const Error& why) noexcept final;
  void drain() noexcept final {
    progress_.drain();
    sender_.drain();
  }
  i64 staging_bytes() const noexcept override {
    return static_cast<i64>(scratch_.size() + sums_.size() * sizeof(float));
  }

 protected:
  AsyncCommunicator(std::string_view backend, int rank, int size, const CommOptions& options, Membership membership);

  // Executes the queued operations and ends the threads, or aborts if an exception is unwinding the owner. Call it
  // first in a backend's destructor.
  void shut_down() noexcept;

  // Collective. Checks that all ranks make the same call. Then, on ranks that consume, calls `consume` for ranges that
  // together cover every slice for this rank. Returns when no peer reads this rank's source any more.
  virtual void exchange(const Operation&, const Exchange&, FunctionRef<void(const SliceRange&)> consume) = 0;
  // Collective. Copies op.out[q] to op.in[this rank] on every rank q, after a check that all ranks make the same call
  // and that sizes match.
  virtual void all_to_allv_now(const Operation& op) = 0;
  void copy_own(const Operation& op);  // of all_to_allv
  // Throws if the calls of all ranks, call_of(rank), do not match, or the sizes of all_to_allv.
  void compare_calls(const Operation& op, FunctionRef<const CallInfo&(int)> call_of);
  // Collective, if the sizes of all_to_allv do not match: throws an error that names two of them.
  [[noreturn]] void report_sizes(const Operation& op);
  // Moves no data, but waits for all ranks.
  void meet_now(const Operation& op) { move_now(op, {.sliced = false, .segments = {}}); }
  // An exchange with `lands`.
  void move_now(const Operation&, const Exchange&);
  // Collective. target = the fold over ranks of our slice of each segment's source.
  virtual void reduce_scatter_now(const Operation&, std::span<const OpSegment> segments, bool accumulate);
  // The same for one segment, rounded to the wire dtype; the target may be our own slice.
  virtual void reduce_scatter_rounded(const Operation&, const OpSegment&);
  void fold(float* target, std::span<const std::byte* const> sources, i64 elems, DType wire, bool accumulate);
  // Rounds to the wire dtype; target may be one of the sources.
  void fold_rounded(std::byte* target, std::span<const std::byte* const> sources, i64 elems, DType wire);
  // target [sums.size()], in the wire dtype, = sums, rounded.
  void round_to(std::byte* target, DType wire, std::span<const float> sums);
  // Point to point; segments[0].source or .target. Runs on the sending thread, concurrently with exchange and receive.
  virtual void transmit(const Operation&, int to) = 0;
  // The same in the caller's thread, if no send is running and it cannot block; false: nothing was done. Starting a
  // thread on a busy core is slow, and the receiver would wait for it.
  virtual bool transmit_at_once(const Operation&, int /*to*/) { return false; }
  virtual void receive(const Operation&, int from) = 0;
  // Collective, after an exchange in which the ranks agreed on the size.
  virtual Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) = 0;
  // The next three functions are called on a world, for itself and its groups. Thread-safe.
  // Reports `failure` to all ranks unless one has been reported; returns the one that counts.
  virtual Failure publish(Failure failure) noexcept = 0;
  // Throws if a peer has reported a failure.
  virtual void look_for_reports() = 0;
  // Throws also if a peer has died.
  virtual void look_at_peers() = 0;
  // Creates a group of at least two ranks of the world, in which this rank is number `rank`; waits for the others.
  virtual std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership,
                                                        const CommOptions& options) = 0;

  // For a communicator made of others, which run in its thread.
  struct Part;
  // For messages: this rank waits in another part for a world rank; -1: it no longer does.
  virtual void waits_elsewhere(int /*number*/) noexcept {}
  // Informs the other part, if there is one.
  void tell_wait(int number) noexcept {
    if (beside_ != nullptr && (tells_while_ == nullptr || tells_while_->load(std::memory_order_relaxed)))
      beside_->waits_elsewhere(number);
  }

  void throw_if_reported() { world_.look_for_reports(); }
  void throw_if_peer_failed() { world_.look_at_peers(); }
  // For messages: empty, or " of group \"tp\"".
  const std::string& of_group() const noexcept { return of_group_; }
  // Reports a failure and makes it final; returns the one that counts.
  Failure settle(const Failure& failure) noexcept;

  double timeout_s() const noexcept { return timeout_s_; }
  bool progress_thread() const noexcept { return progress_thread_; }
  // Reports a failure of world rank `rank`, and throws the one that counts.
  [[noreturn]] void fail(Errc code, int rank, const std::string& message);

 private:
  // A queue and the thread that executes it; the thread starts with the first operation.
  class Worker {
   public:
    explicit Worker(AsyncCommunicator& owner) : owner_(owner) {}
    void push(std::shared_ptr<QueuedOperation> operation);
    bool idle();  // returns whether the queue is empty; the thread exists then, so that no later step has to start it
    void drain() noexcept;   // waits for that
    void finish() noexcept;  // after the queue is empty

   private:
    void start();  // requires mutex_
    void loop();
    AsyncCommunicator& owner_;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::queue<std::shared_ptr<QueuedOperation>, std::pmr::deque<std::shared_ptr<QueuedOperation>>> queue_{
        std::pmr::deque<std::shared_ptr<QueuedOperation>>(operation_memory())};
    bool stop_ = false, busy_ = false;
    std::jthread thread_;
  };

  Ticket submit(Operation&& operation) final;
  // With at_once, returns false without having done anything if transmit_at_once() does.
  bool run(QueuedOperation& operation, bool at_once = false) noexcept;
  void execute(const Operation& operation);
  void all_reduce_now(const Operation&);
  void reduce_now(const Operation&);
  // Small reductions: combines `total` bytes at `data` with those of the peers, block by block, on the ranks that
  // consume.
  void combine_now(const Operation&, std::byte* data, i64 total, int only_to);
  void combine(const Operation&, std::byte* target, std::span<const std::byte* const> sources, i64 bytes);

  AsyncCommunicator& world_;
  AsyncCommunicator* beside_ = nullptr;
  const std::atomic<bool>* tells_while_ = nullptr;
  const std::string of_group_;
  const double timeout_s_;
  const bool progress_thread_;
  const bool times_calls_;
  Trace* const trace_;
  const OpTable& ops_;
  const int uncaught_at_birth_;

  ThreadPool fold_pool_{1};
  std::vector<TensorView> fold_sources_;
  std::vector<const std::byte*> combined_;
  std::vector<std::byte> scratch_;  // of small reductions
  std::vector<float> sums_;         // of a fold, before it is rounded or sent on

  FailureLatch failure_;  // of a world

  Worker progress_{*this};
  Worker sender_{*this};
};

// The group of only this rank.
std::unique_ptr<AsyncCommunicator> make_group_of_one(Membership membership, const CommOptions&);

// Access to the protected functions of another communicator.
struct AsyncCommunicator::Part {
  AsyncCommunicator& c;

  // Tells `beside` which rank this communicator waits for; only while *when, if that is given.
  void tell(AsyncCommunicator& beside, const std::atomic<bool>* when = nullptr) {
    c.beside_ = &beside;
    c.tells_while_ = when;
  }
  void waits_elsewhere(int number) noexcept { c.waits_elsewhere(number); }
  void meet(const Operation& op) { c.meet_now(op); }
  void move(const Operation& op, const Exchange& x) { c.move_now(op, x); }
  void reduce_scatter(const Operation& op, std::span<const OpSegment> segments, bool accumulate) {
    c.reduce_scatter_now(op, segments, accumulate);
  }
  Ticket submit(Operation&& op) { return c.submit(std::move(op)); }
  void all_to_allv(const Operation& op) { c.all_to_allv_now(op); }
  void transmit(const Operation& op, int to) { c.transmit(op, to); }
  bool transmit_at_once(const Operation& op, int to) { return c.transmit_at_once(op, to); }
  void receive(const Operation& op, int from) { c.receive(op, from); }
  Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) { return c.allocate_shared(ledger, tag, bytes); }
  Failure publish(const Failure& failure) noexcept { return c.publish(failure); }
  void look_for_reports() { c.look_for_reports(); }
  void look_at_peers() { c.look_at_peers(); }
  std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership, const CommOptions& options) {
    if (membership.ranks.size() == 1) return make_group_of_one(std::move(membership), options);
    return c.make_group(rank, std::move(membership), options);
  }
};

// The exchange for an operation that moves bytes.
Exchange exchange_of(const Operation&) noexcept;

// A communicator over an arena: a part of `part.world` that joins the ranks of a node, or a world of its own. Waits for
// all of them.
class Arena;
std::unique_ptr<AsyncCommunicator> make_shared_communicator(std::string_view backend, std::unique_ptr<Arena>,
                                                            const CommOptions&, Membership part = {});
std::unique_ptr<AsyncCommunicator> make_mpi_world(const CommOptions&);

}  // namespace ds
