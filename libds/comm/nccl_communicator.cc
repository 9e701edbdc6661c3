// SPDX-License-Identifier: Apache-2.0
// nccl: collectives between GPUs on the Comm queue. NCCL moves bytes, but sums are ours, since its rings and trees add
// in an order of their own: a reduce-scatter is an exchange of slices, which sends as much as a ring, (P-1)/P n,
// followed by a fold in rank order. One staging area serves both, since one queue runs them in turn. Only integer
// reductions, whose order does not matter, are NCCL's. Operations that NCCL does not promise (NaN wins a maximum; sends
// that do not wait for the receiver) and that no step needs go through host memory and the world.
//
// Nothing hangs. The communicator is non-blocking: no call into NCCL waits for a peer. A watcher checks NCCL, the world
// (which knows of peers that failed, died or left) and the age of the oldest unfinished operation. On a failure it
// informs the world and aborts NCCL, which ends the work on the stream. NCCL does not compare calls: a mismatch is
// noticed if the world shows the peers' calls, else as a timeout.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>

#include "base/as_error.h"
#include "base/thread.h"
#include "comm/make_communicator.h"
#include "comm/nccl_api.h"
#include "comm/staging.h"

namespace ds {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr i64 kStagingBytes = i64{64} << 20;  // received slices of a fold: one round
constexpr i64 kStagingStep = i64{1} << 20;    // increment by which staging grows
constexpr i64 kAlignment = 256;               // of parts in the staging
constexpr i64 kGatherBytes = i64{64} << 10;   // smaller sums of floats are gathered, and every rank folds them
constexpr auto kWatchPeriod = 50ms;
constexpr auto kUnderWay = 500ms;  // for messages in flight from a peer that has left
constexpr auto kHearsay = 1s;      // for the world to report which rank died, when NCCL reports an error without a rank
constexpr auto kGrace = 2s;        // for peers to finalise together
constexpr int kYields = 100;
constexpr auto kSleep = 50us;

std::string describe(const nccl::Api& api, nccl::Comm comm, nccl::Result r) {
  const char* last = comm != nullptr ? api.GetLastError(comm) : nullptr;
  return fmt::format("{}{}{}", api.GetErrorString(r), last != nullptr && *last != 0 ? ": " : "",
                     last != nullptr ? last : "");
}

// State that tickets need; lives as long as they do.
struct Timeline {
  explicit Timeline(Device& d) : device(d) { spare.reserve(256); }
  ~Timeline() {
    for (const Device::Event e : spare) device.destroy(e);
  }
  Device::Event take() {
    {
      const std::lock_guard lock(mutex);
      if (!spare.empty()) {
        const Device::Event e = spare.back();
        spare.pop_back();
        return e;
      }
    }
    return device.make_event();
  }
  void give(Device::Event e) {
    const std::lock_guard lock(mutex);
    spare.push_back(e);
  }

  Device& device;
  FailureLatch failure;
  std::mutex mutex;
  std::vector<Device::Event> spare;
};

struct EnqueuedOperation final : Ticket::State {
  EnqueuedOperation(std::shared_ptr<Timeline> t, const CallInfo& call)
      : timeline(std::move(t)), info(call), ready(timeline->take()), end(timeline->take()) {}
  ~EnqueuedOperation() override {
    timeline->give(ready);
    timeline->give(end);
  }
  void wait() override {
    timeline->failure.throw_if_set();
    timeline->device.wait(Queue::Compute, end);
  }
  bool done() const override { return timeline->failure.get() != nullptr || finished(); }
  bool finished() const { return enqueued.load(std::memory_order_acquire) && timeline->device.reached(end); }

  const std::shared_ptr<Timeline> timeline;
  const CallInfo info;
  const Device::Event ready;  // inputs are ready
  const Device::Event end;
  std::atomic<bool> enqueued{false};  // `end` is recorded
};

// The information about a call that the world shows: its number, and enough of the rest to notice a difference.
struct Shown {
  u32 calls = 0;  // including this one
  OpKind kind{};
  u32 hash = 0;  // 24 bits

  static Shown of(const CallInfo& c) noexcept {
    u64 h = c.shape;
    for (const u64 x : {static_cast<u64>(c.bytes), u64{c.segments}, static_cast<u64>(c.root), static_cast<u64>(c.dtype),
                        static_cast<u64>(c.reduce), u64{c.accumulate}})
      h = (h ^ x) * 1099511628211u;
    return {static_cast<u32>(c.number + 1), c.kind, static_cast<u32>(h >> 40)};
  }
  static Shown unpack(u64 x) noexcept {
    return {static_cast<u32>(x >> 32), static_cast<OpKind>(x >> 24 & 0xff), static_cast<u32>(x & 0xffffff)};
  }
  u64 pack() const noexcept { return u64{calls} << 32 | u64{static_cast<u8>(kind)} << 24 | hash; }
};

class NcclCommunicator final : public BaseCommunicator {
 public:
  NcclCommunicator(Communicator& world, const CommOptions& options)
      : BaseCommunicator("nccl", world.rank(), world.size(), world_ranks(world)),
        world_(world),
        device_(*options.device),
        timeout_s_(options.timeout_s),
        overlap_(options.progress_thread),
        api_(nccl::load()),
        host_(world, device_),
        timeline_(std::make_shared<Timeline>(device_)),
        fence_(device_.make_event()),
        uncaught_at_birth_(std::uncaught_exceptions()),
        fold_sources_(static_cast<size_t>(size())) {
    try {
      connect();
    } catch (...) {
      device_.destroy(fence_);
      throw;
    }
    try {
      watcher_ = start_thread("the thread that watches NCCL", [this] { watch(); });
    } catch (const Error& e) {
      abort(e);
      device_.destroy(fence_);
      throw;
    }
  }

  ~NcclCommunicator() override {
    if (std::uncaught_exceptions() > uncaught_at_birth_) {
      abort(Error(Errc::Comm, "an error unwound the owner of its communicator"));
    } else {
      try {
        device_.synchronize(Queue::Comm);  // the watcher ends stuck work
      } catch (const Error& e) {
        abort(e);
      }
    }
    {
      const std::lock_guard lock(watch_mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    watcher_.join();
    disconnect();
    device_.destroy(fence_);
  }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    make_operation(OpKind::Allocate, "allocate", 0);
    return device_buffer(device_, ledger, tag, bytes);
  }
  void throw_if_failed() const override { timeline_->failure.throw_if_set(); }
  void abort(const Error& why) noexcept override { give_up(why); }
  i64 staging_bytes() const noexcept override { return staging_.bytes() + host_.bytes(); }

 private:
  // One part of a segment's slices, and its place in the staging.
  struct Part {
    const OpSegment* segment;
    i64 offset, bytes, position;
  };

  static bool is_error(nccl::Result r) noexcept { return r != nccl::Result::Success && r != nccl::Result::InProgress; }
  // The first error; b if there is none.
  static nccl::Result first(nccl::Result a, nccl::Result b) noexcept { return is_error(a) ? a : b; }
  static size_t count(i64 n) noexcept { return static_cast<size_t>(n); }

  void connect() {
    device_.synchronize();  // also makes the device current for this thread, as NCCL needs
    nccl::UniqueId id{};
    if (rank() == 0) {
      const nccl::Result r = api_.GetUniqueId(&id);
      DS_CHECK(r == nccl::Result::Success, Errc::Comm, "NCCL found no network address: {}", describe(api_, nullptr, r));
    }
    world_.broadcast(id.internal.data(), static_cast<i64>(sizeof id), 0, "nccl.connect").wait();
    nccl::Config config;
    nccl::Result r = api_.CommInitRankConfig(&comm_, size(), id, rank(), &config);
    try {
      const auto limit = Clock::now() + std::chrono::duration<double>(timeout_s_);
      while (r == nccl::Result::InProgress) {
        world_.look_for_failures();
        DS_CHECK(Clock::now() < limit, Errc::Timeout, "NCCL did not connect its {} ranks within {} s", size(),
                 timeout_s_);
        std::this_thread::sleep_for(1ms);
        r = state();
      }
      DS_CHECK(r == nccl::Result::Success, Errc::Comm, "NCCL cannot connect: {}", describe(api_, comm_, r));
    } catch (const Error& e) {
      give_up(e);
      throw_if_failed();
    }
  }

  // The result of CommGetAsyncError; InProgress while a call is running.
  nccl::Result state() {
    nccl::Result r{};
    const nccl::Result asked = api_.CommGetAsyncError(comm_, &r);
    return first(asked, r);
  }

  // NCCL requires all ranks to finalise; aborts if they do not within the grace time.
  void disconnect() noexcept {
    const std::lock_guard lock(nccl_mutex_);
    if (comm_ != nullptr) {
      nccl::Result r = api_.CommFinalize(comm_);
      for (const auto limit = Clock::now() + kGrace; r == nccl::Result::InProgress && Clock::now() < limit;) {
        std::this_thread::sleep_for(1ms);
        r = state();
      }
      if (r == nccl::Result::Success) {
        api_.CommDestroy(comm_);
        comm_ = nullptr;
      }
    }
    abort_nccl();
    for (const auto limit = Clock::now() + kGrace; aborting_ && aborting_->load() && Clock::now() < limit;)
      std::this_thread::sleep_for(1ms);
  }

  Ticket submit(Operation&& op) override {
    throw_if_failed();
    const bool integers = op.dtype == DType::I64;
    const bool fold = (op.dtype == DType::F32 || is_16_bit(op.dtype)) && op.reduce == ReduceOp::Sum;
    switch (op.kind) {
      case OpKind::ReduceScatter:
        return enqueue(op, [&] { reduce_scatter(op.segments, op.dtype, op.accumulate, DType::F32); });
      case OpKind::AllGather: return enqueue(op, [&] { all_gather(op.segments); });
      case OpKind::AllReduce:
        if (integers) return enqueue(op, [&] { all_reduce_integers(op); });
        if (fold) return enqueue(op, [&] { all_reduce_sum(op.segments[0], op.dtype); });
        return through_host(op);
      case OpKind::Broadcast: return enqueue(op, [&] { broadcast(op); });
      case OpKind::AllToAll: return enqueue(op, [&] { all_to_all(op.segments[0]); });
      case OpKind::Gather: return enqueue(op, [&] { gather(op); });
      case OpKind::Scatter: return enqueue(op, [&] { scatter(op); });
      case OpKind::Reduce: return through_host(op);
      case OpKind::Barrier: device_.synchronize(Queue::Comm); return through_host(op);
      case OpKind::Send:
      case OpKind::Recv: return through_host(op);
      case OpKind::Allocate:
      case OpKind::Attach: break;
    }
    DS_ASSERT(false);
    return {};
  }

  // In call order with the work on the Comm queue.
  Ticket through_host(const Operation& op) {
    device_.record(fence_, Queue::Comm);
    device_.wait(Queue::Compute, fence_);
    try {
      return host_.run(op);
    } catch (const Error& e) {
      give_up(e);
      throw;
    }
  }

  // `work` puts the operation on the Comm queue, after everything that is on Compute now.
  template <class Work>
  Ticket enqueue(const Operation& op, Work&& work) {
    auto state = std::allocate_shared<EnqueuedOperation>(
        std::pmr::polymorphic_allocator<EnqueuedOperation>(operation_memory()), timeline_, call_info(op, calls_++));
    device_.record(state->ready, Queue::Compute);
    device_.wait(Queue::Comm, state->ready);
    world_.show(Shown::of(state->info).pack());
    {
      const std::lock_guard lock(pending_mutex_);
      while (!pending_.empty() && pending_.front()->finished()) pending_.pop_front();
      pending_.push_back(state);
    }
    work();
    device_.record(state->end, Queue::Comm);
    state->enqueued.store(true, std::memory_order_release);
    if (!overlap_) device_.wait(Queue::Compute, state->end);
    return Ticket(std::move(state));
  }

  // One group of NCCL calls. `calls` returns the first error. Returns when the group is on the stream; the watcher ends
  // a wait for peers that do not arrive.
  template <class Calls>
  void group(Calls&& calls) {
    nccl::Result r{};
    {
      const std::lock_guard lock(nccl_mutex_);
      if (comm_ == nullptr) throw_if_failed();
      r = api_.GroupStart();
      if (r == nccl::Result::Success) {
        const nccl::Result made = calls();
        r = first(made, api_.GroupEnd());
      }
    }
    for (int round = 0; r == nccl::Result::InProgress; ++round) {
      if (round < kYields) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kSleep);
      }
      const std::lock_guard lock(nccl_mutex_);
      if (comm_ == nullptr) throw_if_failed();
      r = state();
    }
    if (r == nccl::Result::Success) return;
    report(r);
    throw_if_failed();
  }

  void* stream() { return device_.native(Queue::Comm); }

  // `result`: F32, or the wire dtype, to which sums are rounded.
  void reduce_scatter(std::span<const OpSegment> segments, DType wire, bool accumulate, DType result) {
    const i64 slices = size() - 1 + (result == DType::F32 ? 0 : 4 / dtype_bytes(wire));  // in the staging
    const i64 room = kStagingBytes / std::max<i64>(slices, 1) / kAlignment * kAlignment;
    size_t at = 0;
    for (i64 offset = 0; at < segments.size();) {
      i64 used = 0;
      parts_.clear();
      while (at < segments.size() && used < room) {
        const OpSegment& s = segments[at];
        const i64 bytes = std::min(s.slice_bytes - offset, room - used);
        if (bytes > 0) parts_.push_back({&s, offset, bytes, used});
        used += align_up(bytes, kAlignment);
        offset += bytes;
        if (offset == s.slice_bytes) {
          ++at;
          offset = 0;
        }
      }
      exchange_and_fold(used, slices, wire, accumulate, result);
    }
  }

  // `used`: staging bytes of the parts for each peer; sums that are rounded come after them.
  void exchange_and_fold(i64 used, i64 slices, DType wire, bool accumulate, DType result) {
    if (parts_.empty()) return;
    std::byte* const staging = room(slices * used);
    std::byte* const sums = staging + (size() - 1) * used;
    const auto received = [&](int from, const Part& p) {
      return staging + (from - (from > rank() ? 1 : 0)) * used + p.position;
    };
    group([&] {
      nccl::Result r{};
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() - step + size()) % size();
        for (const Part& p : parts_) {
          const OpSegment& s = *p.segment;
          r = first(r, send_bytes(s.source + to * s.slice_bytes + p.offset, p.bytes, to));
          r = first(r, recv_bytes(received(from, p), p.bytes, from));
        }
      }
      return r;
    });
    for (const Part& p : parts_) {
      const OpSegment& s = *p.segment;
      for (int q = 0; q < size(); ++q) {
        fold_sources_[q] =
            q == rank() ? const_cast<std::byte*>(s.source) + q * s.slice_bytes + p.offset : received(q, p);
      }
      const i64 elems = p.bytes / dtype_bytes(wire), first_elem = p.offset / dtype_bytes(wire);
      if (result == DType::F32) {
        fold(reinterpret_cast<float*>(s.target) + first_elem, wire, elems, accumulate);
      } else {
        fold_rounded(s.target + p.offset, reinterpret_cast<float*>(sums) + p.position / dtype_bytes(wire), wire, elems);
      }
    }
  }

  // Folds fold_sources_ by way of `sums` [elems].
  void fold_rounded(std::byte* target, float* sums, DType wire, i64 elems) {
    fold(sums, wire, elems, false);
    device_.ops().cast(TensorView::of(target, wire, {elems}), TensorView::of(sums, DType::F32, {elems}),
                       device_.stream(Queue::Comm));
  }

  // Folds fold_sources_.
  void fold(float* target, DType wire, i64 elems, bool accumulate) {
    fold_views_.clear();
    for (std::byte* source : fold_sources_) fold_views_.push_back(TensorView::of(source, wire, {elems}));
    device_.ops().fold(TensorView::of(target, DType::F32, {elems}), fold_views_, accumulate,
                       device_.stream(Queue::Comm));
  }

  void all_gather(std::span<const OpSegment> segments) {
    group([&] {
      nccl::Result r{};
      for (const OpSegment& s : segments) {
        if (s.slice_bytes == 0) continue;
        r = first(r, api_.AllGather(s.source, s.target, count(s.slice_bytes), nccl::DataType::Uint8, comm_, stream()));
      }
      return r;
    });
  }

  void all_reduce_integers(const Operation& op) {
    const OpSegment& s = op.segments[0];
    const nccl::RedOp reduce = op.reduce == ReduceOp::Sum   ? nccl::RedOp::Sum
                               : op.reduce == ReduceOp::Max ? nccl::RedOp::Max
                                                            : nccl::RedOp::Min;
    if (s.slice_bytes == 0) return;
    group([&] {
      return api_.AllReduce(s.target, s.target, count(s.slice_bytes / 8), nccl::DataType::Int64, reduce, comm_,
                            stream());
    });
  }

  // Most of the sum is reduce-scattered and gathered in place. A small sum, and the remainder of a division by P, is
  // gathered, and every rank folds it.
  void all_reduce_sum(const OpSegment& whole, DType dtype) {
    const i64 elem = dtype_bytes(dtype);
    i64 done = 0;
    if (whole.slice_bytes > kGatherBytes) {
      const i64 slice = whole.slice_bytes / (size() * elem) * elem;
      const OpSegment scattered{whole.target, whole.target + rank() * slice, slice};
      const OpSegment gathered{whole.target + rank() * slice, whole.target, slice};
      reduce_scatter({&scattered, 1}, dtype, false, dtype);
      all_gather({&gathered, 1});
      done = slice * size();
    }
    const i64 rest = whole.slice_bytes - done;
    if (rest == 0) return;
    const i64 gathered_bytes = align_up(size() * rest, kAlignment), elems = rest / elem;
    std::byte *const staging = room(gathered_bytes + elems * 4), *const data = whole.target + done;
    group([&] { return api_.AllGather(data, staging, count(rest), nccl::DataType::Uint8, comm_, stream()); });
    for (int q = 0; q < size(); ++q) fold_sources_[q] = staging + q * rest;
    if (dtype == DType::F32) {
      fold(reinterpret_cast<float*>(data), dtype, elems, false);
    } else {
      fold_rounded(data, reinterpret_cast<float*>(staging + gathered_bytes), dtype, elems);
    }
  }

  void broadcast(const Operation& op) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return;
    group([&] {
      return api_.Broadcast(s.target, s.target, count(s.slice_bytes), nccl::DataType::Uint8, op.peer, comm_, stream());
    });
  }

  void all_to_all(const OpSegment& s) {
    if (s.slice_bytes == 0) return;
    group([&] {
      nccl::Result r{};
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() - step + size()) % size();
        r = first(r, send_bytes(s.source + to * s.slice_bytes, s.slice_bytes, to));
        r = first(r, recv_bytes(s.target + from * s.slice_bytes, s.slice_bytes, from));
      }
      return r;
    });
    copy_own(s.target + rank() * s.slice_bytes, s.source + rank() * s.slice_bytes, s.slice_bytes);
  }

  void gather(const Operation& op) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return;
    if (op.peer == rank()) copy_own(s.target + rank() * s.slice_bytes, s.source, s.slice_bytes);
    group([&] {
      if (op.peer != rank()) return send_bytes(s.source, s.slice_bytes, op.peer);
      nccl::Result r{};
      for (int q = 0; q < size(); ++q) {
        if (q != rank()) r = first(r, recv_bytes(s.target + q * s.slice_bytes, s.slice_bytes, q));
      }
      return r;
    });
  }

  void scatter(const Operation& op) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return;
    if (op.peer == rank()) copy_own(s.target, s.source + rank() * s.slice_bytes, s.slice_bytes);
    group([&] {
      if (op.peer != rank()) return recv_bytes(s.target, s.slice_bytes, op.peer);
      nccl::Result r{};
      for (int q = 0; q < size(); ++q) {
        if (q != rank()) r = first(r, send_bytes(s.source + q * s.slice_bytes, s.slice_bytes, q));
      }
      return r;
    });
  }

  void copy_own(std::byte* target, const std::byte* source, i64 bytes) {
    if (target != source) device_.copy(target, source, bytes, Queue::Comm);
  }
  nccl::Result send_bytes(const std::byte* source, i64 bytes, int to) {
    return api_.Send(source, count(bytes), nccl::DataType::Uint8, to, comm_, stream());
  }
  nccl::Result recv_bytes(std::byte* target, i64 bytes, int from) {
    return api_.Recv(target, count(bytes), nccl::DataType::Uint8, from, comm_, stream());
  }

  // Staging of at least this size; it grows in the first steps.
  std::byte* room(i64 bytes) {
    if (bytes > staging_.bytes()) {
      device_.synchronize(Queue::Comm);
      staging_ = {};
      staging_ = device_buffer(device_, ledger_, Tag::Comm, align_up(bytes, kStagingStep));
    }
    return static_cast<std::byte*>(staging_.data());
  }

  // Reports the failure to all ranks, ends NCCL's work, and keeps the failure that counts: the first one.
  void give_up(const Error& why) noexcept {
    world_.abort(why);
    try {
      world_.throw_if_failed();
    } catch (const Error& e) {
      timeline_->failure.set({e.code(), e.what(), e.rank()});
    }
    const std::lock_guard lock(nccl_mutex_);
    abort_nccl();
  }

  // Requires nccl_mutex_. Runs on a thread of its own, since it has been seen to wait for dead peers: it first ends the
  // work on the stream, and only then frees NCCL's resources.
  void abort_nccl() noexcept {
    if (comm_ == nullptr) return;
    aborting_ = std::make_shared<std::atomic<bool>>(true);
    try {
      start_thread("a thread that ends NCCL", [abort = api_.CommAbort, comm = comm_, aborting = aborting_] {
        abort(comm);
        aborting->store(false);
      }).detach();
    } catch (const Error&) {  // NCCL's resources are freed with the process
      aborting_->store(false);
    }
    comm_ = nullptr;
  }

  // NCCL's errors name no rank; the world may know more, a little later.
  void report(nccl::Result r) noexcept {
    std::string words;
    {
      const std::lock_guard lock(nccl_mutex_);
      if (comm_ != nullptr) words = describe(api_, comm_, r);
    }
    const std::shared_ptr<EnqueuedOperation> op = oldest();
    try {
      for (const auto limit = Clock::now() + kHearsay; Clock::now() < limit; std::this_thread::sleep_for(5ms))
        world_.look_for_failures();
      give_up(Error(Errc::Comm, fmt::format("NCCL failed in {}: {}", op ? op->info.describe() : "no call", words)));
    } catch (const Error& e) {
      give_up(e);
    }
  }

  // Null: all are finished.
  std::shared_ptr<EnqueuedOperation> oldest() {
    const std::lock_guard lock(pending_mutex_);
    while (!pending_.empty() && pending_.front()->finished()) pending_.pop_front();
    return pending_.empty() ? nullptr : pending_.front();
  }

  void watch() {
    u64 watched = ~u64{0};  // the call whose age is measured
    Clock::time_point since{}, left{};
    std::unique_lock lock(watch_mutex_);
    while (!wake_.wait_for(lock, kWatchPeriod, [this] { return stop_; })) {
      lock.unlock();
      try {
        world_.look_for_failures();
        if (const nccl::Result r = async_error(); is_error(r)) {
          report(r);
          return;
        }
        const auto now = Clock::now();
        if (const auto op = oldest()) {
          // The clock starts when the inputs are ready and all earlier operations are done.
          if (op->info.number != watched || !device_.reached(op->ready)) {
            watched = op->info.number;
            since = left = now;
          }
          compare_calls(op->info);
          if (const int peer = one_that_left(); peer < 0) {
            left = now;
          } else if (now - left > kUnderWay) {
            throw Error(Errc::Comm,
                        fmt::format("rank {} has left while rank {} is in {}", world_rank(peer), own_number(),
                                    op->info.describe()),
                        world_rank(peer));
          }
          if (now - since > std::chrono::duration<double>(timeout_s_)) report_absence(op->info);
        }
      } catch (const std::exception& e) {
        give_up(as_error(e));
        return;
      }
      lock.lock();
    }
  }

  nccl::Result async_error() {
    const std::lock_guard lock(nccl_mutex_);
    return comm_ != nullptr ? state() : nccl::Result::Success;
  }

  int one_that_left() const {
    for (int q = 0; q < size(); ++q) {
      if (q != rank() && world_.has_left(q)) return q;
    }
    return -1;
  }

  void compare_calls(const CallInfo& mine) const {
    const Shown own = Shown::of(mine);
    for (int q = 0; q < size(); ++q) {
      const Shown other = Shown::unpack(world_.shown(q));
      if (q == rank() || other.calls != own.calls || other.pack() == own.pack()) continue;
      throw Error(
          Errc::Comm,
          fmt::format("calls do not match: rank {} calls {}, rank {} calls {} {}", own_number(), mine.describe(),
                      world_rank(q), op_name(other.kind), other.kind == own.kind ? "of other sizes" : "instead"),
          world_rank(q));
    }
  }

  [[noreturn]] void report_absence(const CallInfo& call) const {
    for (int q = 0; q < size(); ++q) {
      const u64 shown = q == rank() ? 0 : world_.shown(q);
      const u64 calls = Shown::unpack(shown).calls;
      if (q != rank() && world_.shown(rank()) != 0 && calls <= call.number) {
        throw Error(Errc::Timeout,
                    fmt::format("rank {} did not arrive within {} s: rank {} is in {}, rank {} has made {} calls",
                                world_rank(q), timeout_s_, own_number(), call.describe(), world_rank(q), calls),
                    world_rank(q));
      }
    }
    throw Error(Errc::Timeout, fmt::format("{} did not end within {} s, and NCCL does not say which rank is missing",
                                           call.describe(), timeout_s_));
  }

  Communicator& world_;
  Device& device_;
  const double timeout_s_;
  const bool overlap_;
  const nccl::Api api_;
  Staging host_;
  const std::shared_ptr<Timeline> timeline_;
  const Device::Event fence_;
  const int uncaught_at_birth_;

  MemoryLedger ledger_;
  Buffer staging_;
  std::vector<Part> parts_;
  std::vector<std::byte*> fold_sources_;
  std::vector<TensorView> fold_views_;
  u64 calls_ = 0;

  std::mutex nccl_mutex_;      // for calls on comm_, none of which waits for a peer
  nccl::Comm comm_ = nullptr;  // null: aborted
  std::shared_ptr<std::atomic<bool>> aborting_;

  std::mutex pending_mutex_;
  std::deque<std::shared_ptr<EnqueuedOperation>, std::pmr::polymorphic_allocator<std::shared_ptr<EnqueuedOperation>>>
      pending_{operation_memory()};

  std::mutex watch_mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::jthread watcher_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& world, const CommOptions& options) {
  DS_ASSERT(options.device != nullptr);
  return std::make_unique<NcclCommunicator>(world, options);
}

}  // namespace ds
