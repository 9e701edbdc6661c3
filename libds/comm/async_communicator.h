// SPDX-License-Identifier: Apache-2.0
#pragma once
// What communicators over host memory have in common: Operations in a queue that a progress thread works off; and every
// collective expressed as one primitive, `exchange`, in which ranks expose slices and consume those of their peers
// piece by piece. A backend only moves bytes: exchange, transmit, receive.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>

#include "comm/base_communicator.h"

namespace ds {

// Which slices travel.
struct Exchange {
  bool sliced;  // a source holds P slices, slice q is for rank q; else one slice for everyone
  std::span<const OpSegment> segments;
  // True: consuming means copying, what comes from rank q belongs at landing(q), and a backend may put it there itself.
  bool lands = false;
  int only_from = -1;  // the one rank that has a source
  int only_to = -1;    // the one rank that consumes

  bool from(int rank) const noexcept { return only_from < 0 || rank == only_from; }
  bool to(int rank) const noexcept { return only_to < 0 || rank == only_to; }
  i64 length() const noexcept;
  // Of what is for rank `to`.
  const std::byte* slice(const OpSegment& s, int to) const noexcept {
    return s.source + (sliced ? to * s.source_stride() : 0);
  }
  std::byte* landing(const OpSegment& s, int from) const noexcept {
    return s.target + (only_from < 0 ? from * s.target_stride() : 0);
  }
};

// Bytes [offset, offset + bytes) of one segment's slice, from every rank: sources[q], null where from(q) is false.
struct SliceRange {
  const OpSegment* segment;
  i64 offset;
  i64 bytes;
  std::span<const std::byte* const> sources;
};

// Calls f(segment, offset, bytes, position) for the parts of the segments' concatenated slices that cover
// [begin, begin + count); position counts from begin.
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

// What makes a communicator a group of a world, or a part of one.
struct Membership {
  AsyncCommunicator* world = nullptr;  // null: it is a world
  std::string name;
  std::vector<int> ranks;  // in the world; empty in a world
};

// A world and its groups share one failure: the world's. So whoever waits in one of them looks at what all ranks of
// the world have reported, and at the health of all.
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

  // Works off what is queued and ends the threads; or, when an exception is unwinding the owner, aborts. The first line
  // of a backend's destructor.
  void shut_down() noexcept;

  // Collective. Checks that all ranks make the same call, then, on ranks that consume, calls `consume` for ranges that
  // together cover every slice that is for this rank. Returns when no peer reads this rank's source any more.
  virtual void exchange(const Operation&, const Exchange&, FunctionRef<void(const SliceRange&)> consume) = 0;
  // Nothing travels, but all ranks come.
  void meet_now(const Operation& op) { move_now(op, {.sliced = false, .segments = {}}); }
  // An exchange that lands.
  void move_now(const Operation&, const Exchange&);
  // Collective. target = the fold over ranks of our slice of each segment's source.
  virtual void reduce_scatter_now(const Operation&, std::span<const OpSegment> segments, bool accumulate);
  // The same of one segment, rounded to the wire's type; the target may be our own slice.
  virtual void reduce_scatter_rounded(const Operation&, const OpSegment&);
  void fold(float* target, std::span<const std::byte* const> sources, i64 elems, DType wire, bool accumulate);
  // Rounded to the wire's type; target may be one of the sources.
  void fold_rounded(std::byte* target, std::span<const std::byte* const> sources, i64 elems, DType wire);
  // target [sums.size()] in the wire's type = sums, rounded.
  void round_to(std::byte* target, DType wire, std::span<const float> sums);
  // Point to point; segments[0].source or .target. Runs on the sending thread, beside exchange and receive.
  virtual void transmit(const Operation&, int to) = 0;
  // The same in the caller's thread, when no send is under way, where it can be done without waiting for anybody;
  // false: nothing has happened. A busy core is slow to start a thread, and the receiver would wait for it.
  virtual bool transmit_at_once(const Operation&, int /*to*/) { return false; }
  virtual void receive(const Operation&, int from) = 0;
  // Collective, after an exchange in which the ranks agreed on the size.
  virtual Buffer allocate_shared(MemoryLedger& ledger, Tag tag, i64 bytes) = 0;
  // Of a world, for itself and its groups, and thread-safe:
  // Makes `failure` known to all ranks unless one is known already; returns the one that holds.
  virtual Failure publish(Failure failure) noexcept = 0;
  // Throws if a peer has reported a failure.
  virtual void look_for_reports() = 0;
  // And if one has died.
  virtual void look_at_peers() = 0;
  // The group of at least two of its ranks, this one among them as number `rank`; meets the others.
  virtual std::unique_ptr<AsyncCommunicator> make_group(int rank, Membership membership,
                                                        const CommOptions& options) = 0;

  // For a communicator that is made of others, which run in its thread.
  struct Part;
  // That this rank waits in another part for a rank of the world; -1: no longer. For messages.
  virtual void waits_elsewhere(int /*number*/) noexcept {}
  // Tells the part beside this one, if there is one.
  void tell_wait(int number) noexcept {
    if (beside_ != nullptr && (tells_while_ == nullptr || tells_while_->load(std::memory_order_relaxed)))
      beside_->waits_elsewhere(number);
  }

  void throw_if_reported() { world_.look_for_reports(); }
  void throw_if_peer_failed() { world_.look_at_peers(); }
  // For messages: "", or of group "tp".
  const std::string& of_group() const noexcept { return of_group_; }
  // Makes a failure known and final; the one that holds.
  Failure settle(const Failure& failure) noexcept;

  double timeout_s() const noexcept { return timeout_s_; }
  bool progress_thread() const noexcept { return progress_thread_; }
  // The peers' failure as an exception: publishes, then throws what holds.
  // `rank`: in the world.
  [[noreturn]] void fail(Errc code, int rank, const std::string& message);

 private:
  // A queue and the thread that works it off; the thread starts with the first operation.
  class Worker {
   public:
    explicit Worker(AsyncCommunicator& owner) : owner_(owner) {}
    void push(std::shared_ptr<QueuedOperation> operation);
    bool idle();             // all is worked off; the thread is there, so that no later step has to start it
    void drain() noexcept;   // returns when it is
    void finish() noexcept;  // after the queue is empty

   private:
    void start();  // under mutex_
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
  // at_once: false, and nothing has happened, if transmit_at_once() says so.
  bool run(QueuedOperation& operation, bool at_once = false) noexcept;
  void execute(const Operation& operation);
  void all_reduce_now(const Operation&);
  void reduce_now(const Operation&);
  // Small reductions: what `total` bytes at `data` and those of the peers come to, block by block, on the ranks that
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

// The group of this rank alone.
std::unique_ptr<AsyncCommunicator> make_group_of_one(Membership membership, const CommOptions&);

// The protected functions of another communicator.
struct AsyncCommunicator::Part {
  AsyncCommunicator& c;

  // `beside` is told whom this one waits for; only while *when, if that is given.
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

// What an operation that moves bytes is as an exchange.
Exchange exchange_of(const Operation&) noexcept;

// Over an arena: the ranks of a node as a part of another communicator, `part.world`, or a world of their own. Waits
// for all of them.
class Arena;
std::unique_ptr<AsyncCommunicator> make_shared_communicator(std::string_view backend, std::unique_ptr<Arena>,
                                                            const CommOptions&, Membership part = {});
std::unique_ptr<AsyncCommunicator> make_mpi_world(const CommOptions&);

}  // namespace ds
