// SPDX-License-Identifier: Apache-2.0
// nccl: collectives between GPUs on the Comm queue. NCCL moves bytes, but sums are ours, since its rings and trees add
// in an order of their own: a reduce-scatter is an exchange of slices, which sends as much as a ring, (P-1)/P n,
// followed by a fold in rank order. One staging area serves both, since one queue runs them in turn. Only integer
// reductions, whose order does not matter, are NCCL's. Operations that NCCL does not promise (NaN wins a maximum) and
// that no step needs go through host memory and the world. So do the sizes of an all_to_allv, which the hosts compare
// before its slices travel.
//
// Messages along a link (CommOptions::links) go from device to device. NCCL runs the operations of a communicator in
// the order of its calls, and a send ends only with its receive, so a link has a NCCL communicator of its two ranks and
// a queue of its own at each end: it waits for nothing but its own earlier messages. The first message is sent when the
// link is made, since NCCL connects the two ranks in it. All other messages go through host memory, as do those before
// use_links().
//
// Nothing hangs. No call into NCCL waits for a peer. A watcher checks NCCL, the world (which knows of peers that
// failed, died or left) and the age of the oldest unfinished operation of each connection. On a failure it informs the
// world and aborts NCCL, which ends the work on the streams. NCCL does not compare calls: a mismatch is noticed if the
// world shows the peers' calls, else as a timeout.

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>

#include "base/as_error.h"
#include "base/thread.h"
#include "comm/make_communicator.h"
#include "comm/nccl_api.h"
#include "comm/nccl_connection.h"
#include "comm/slice_sizes.h"
#include "comm/staging.h"

namespace ds {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
using nccl::Connection, nccl::EnqueuedOperation, nccl::first;

constexpr i64 kStagingBytes = i64{64} << 20;  // received slices of a fold: one round
constexpr i64 kStagingStep = i64{1} << 20;    // increment by which staging grows
constexpr i64 kAlignment = 256;               // of parts in the staging
constexpr i64 kGatherBytes = i64{64} << 10;   // smaller sums of floats are gathered, and every rank folds them
constexpr auto kWatchPeriod = 50ms;
constexpr auto kUnderWay = 500ms;  // for messages in flight from a peer that has left
constexpr auto kHearsay = 1s;      // for the world to report which rank died, when NCCL reports an error without a rank

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
  // A wait for a message of that rank, or to it; `calls` is that of the last collective call.
  static Shown waits_for(int rank) noexcept { return {0, OpKind::Recv, static_cast<u32>(rank)}; }
  bool is_wait() const noexcept { return kind == OpKind::Recv; }
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
        timeline_(std::make_shared<nccl::Timeline>(device_)),
        all_(api_, device_, Queue::Comm),
        fence_(device_.make_event()),
        uncaught_at_birth_(std::uncaught_exceptions()),
        fold_sources_(static_cast<size_t>(size())) {
    try {
      connect(options.links);
    } catch (const Error& e) {
      give_up(e);
      leave();
      throw_if_failed();
    }
    try {
      watcher_ = start_thread("the thread that watches NCCL", [this] { watch(); });
    } catch (const Error& e) {
      abort(e);
      leave();
      throw;
    }
  }

  ~NcclCommunicator() override {
    if (std::uncaught_exceptions() > uncaught_at_birth_) {
      abort(Error(Errc::Comm, "an error unwound the owner of its communicator"));
    } else {
      try {  // the watcher ends stuck work
        for_each_connection([&](Connection& c) {
          c.expect_all();
          device_.synchronize(c.queue());
        });
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
    leave();
  }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override {
    make_operation(OpKind::Allocate, "allocate", 0);
    return device_buffer(device_, ledger, tag, bytes);
  }
  void throw_if_failed() const override { timeline_->failure.throw_if_set(); }
  void abort(const Error& why) noexcept override { give_up(why); }
  i64 staging_bytes() const noexcept override {
    return staging_.bytes() + host_.bytes() + std::ssize(sizes_) * i64{sizeof(i64)};
  }
  void use_links() override { uses_links_ = true; }

 private:
  // One part of a segment's slices, and its place in the staging.
  struct Part {
    const OpSegment* segment;
    i64 offset, bytes, position;
  };

  // The end at this rank of messages from one rank to another.
  struct Link {
    Link(const MessageLink& link, const nccl::Api& api, Device& device)
        : ranks(link), connection(api, device, device.make_queue()) {}
    const MessageLink ranks;
    Connection connection;
    u64 calls = 0;
  };

  static size_t count(i64 n) noexcept { return static_cast<size_t>(n); }

  void for_each_connection(auto&& visit) {
    visit(all_);
    for (Link& link : links_) visit(link.connection);
  }

  void connect(std::span<const MessageLink> links) {
    device_.synchronize();  // also makes the device current for this thread, as NCCL needs
    connect(all_, make_id(0), rank(), size(), fmt::format("its {} ranks", size()));
    if (!links.empty()) first_message_ = device_buffer(device_, ledger_, Tag::Comm, 1);
    std::vector<nccl::UniqueId> ids;
    for (const MessageLink& link : links) ids.push_back(make_id(link.from));
    // In one order on all ranks, since the two ranks of a link wait for each other.
    for (size_t i = 0; i < links.size(); ++i) {
      if (links[i].from == rank() || links[i].to == rank())
        connect(links_.emplace_back(links[i], api_, device_), ids[i]);
    }
  }

  // `root` makes the id of a NCCL communicator; all ranks learn it.
  nccl::UniqueId make_id(int root) {
    nccl::UniqueId id{};
    if (rank() == root) {
      const nccl::Result r = api_.GetUniqueId(&id);
      DS_CHECK(r == nccl::Result::Success, Errc::Comm, "NCCL found no network address: {}", all_.describe(r));
    }
    world_.broadcast(id.internal.data(), static_cast<i64>(sizeof id), root, "nccl.connect").wait();
    return id;
  }

  void connect(Connection& c, const nccl::UniqueId& id, int own, int members, const std::string& ranks) {
    finish_connecting(c, c.begin(id, own, members), ranks);
  }

  void connect(Link& link, const nccl::UniqueId& id) {
    const std::string ranks =
        fmt::format("ranks {} and {} for messages", world_rank(link.ranks.from), world_rank(link.ranks.to));
    const bool sends = link.ranks.from == rank();
    Connection& c = link.connection;
    connect(c, id, sends ? 0 : 1, 2, ranks);
    auto* const data = static_cast<std::byte*>(first_message_.data());
    const auto pass = [&](nccl::Comm comm) { return sends ? c.send(comm, data, 1, 1) : c.recv(comm, data, 1, 0); };
    finish_connecting(c, c.launch(pass).value_or(nccl::Result::Success), ranks);
    device_.record(fence_, c.queue());
    nccl::Result r{};
    wait_for([&] { return nccl::is_error(r = c.state()) || device_.reached(fence_); }, ranks);
    DS_CHECK(!nccl::is_error(r), Errc::Comm, "NCCL cannot connect: {}", c.describe(r));
  }

  void finish_connecting(Connection& c, nccl::Result r, const std::string& ranks) {
    wait_for([&] { return r != nccl::Result::InProgress || (r = c.state()) != nccl::Result::InProgress; }, ranks);
    DS_CHECK(r == nccl::Result::Success, Errc::Comm, "NCCL cannot connect: {}", c.describe(r));
  }

  void wait_for(auto&& done, const std::string& ranks) {
    const auto limit = Clock::now() + std::chrono::duration<double>(timeout_s_);
    while (!done()) {
      world_.look_for_failures();
      DS_CHECK(Clock::now() < limit, Errc::Timeout, "NCCL did not connect {} within {} s", ranks, timeout_s_);
      std::this_thread::sleep_for(1ms);
    }
  }

  void leave() noexcept {
    for_each_connection([](Connection& c) { c.disconnect(); });
    for (const Link& link : links_) device_.destroy_queue(link.connection.queue());
    device_.destroy(fence_);
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
      case OpKind::AllToAllV: return enqueue(op, [&] { all_to_allv(op); });
      case OpKind::Gather: return enqueue(op, [&] { gather(op); });
      case OpKind::Scatter: return enqueue(op, [&] { scatter(op); });
      case OpKind::Reduce: return through_host(op);
      case OpKind::Barrier: device_.synchronize(Queue::Comm); return through_host(op);
      case OpKind::Send:
      case OpKind::Recv: {
        Link* const link = uses_links_ ? link_of(op) : nullptr;
        return link != nullptr ? pass(op, *link) : through_host(op);
      }
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

  // A collective operation, which `work` puts on the Comm queue.
  template <class Work>
  Ticket enqueue(const Operation& op, Work&& work) {
    const CallInfo info = call_info(op, calls_++);
    {
      const std::lock_guard lock(shown_mutex_);
      shown_ = Shown::of(info);
      world_.show(shown_.pack());
    }
    return enqueue(all_, info, !overlap_, std::forward<Work>(work));
  }

  // Null: the message goes through host memory.
  Link* link_of(const Operation& op) {
    const MessageLink ranks = op.kind == OpKind::Send ? MessageLink{rank(), op.peer} : MessageLink{op.peer, rank()};
    const auto found = std::ranges::find(links_, ranks, &Link::ranks);
    return found != links_.end() ? &*found : nullptr;
  }

  Ticket pass(const Operation& op, Link& link) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return {};
    Connection& c = link.connection;
    const bool sends = op.kind == OpKind::Send;
    return enqueue(c, call_info(op, link.calls++), !sends && !overlap_, [&] {
      group(c, [&](nccl::Comm comm) {
        return sends ? c.send(comm, s.source, s.slice_bytes, 1) : c.recv(comm, s.target, s.slice_bytes, 0);
      });
    });
  }

  // `work` puts the operation on the connection's queue, after everything that is on Compute now. at_once: later work
  // on Compute comes after it.
  template <class Work>
  Ticket enqueue(Connection& c, const CallInfo& info, bool at_once, Work&& work) {
    auto state = std::allocate_shared<EnqueuedOperation>(
        std::pmr::polymorphic_allocator<EnqueuedOperation>(operation_memory()), timeline_, info, &c != &all_);
    device_.record(state->ready, Queue::Compute);
    device_.wait(c.queue(), state->ready);
    c.add(state);
    work();
    device_.record(state->end, c.queue());
    state->enqueued.store(true, std::memory_order_release);
    if (at_once) state->wait();
    return Ticket(std::move(state));
  }

  // One group of NCCL calls, each of which the connection's communicator is given. Returns when it is on the stream.
  template <class Calls>
  void group(Connection& c, Calls&& calls) {
    const std::optional<nccl::Result> r = c.group(calls);
    if (r == nccl::Result::Success) return;
    if (r) report(c, *r);
    throw_if_failed();
  }
  template <class Calls>
  void group(Calls&& calls) {
    group(all_, std::forward<Calls>(calls));
  }

  void* stream() const { return all_.stream(); }

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
    group([&](nccl::Comm comm) {
      nccl::Result r{};
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() - step + size()) % size();
        for (const Part& p : parts_) {
          const OpSegment& s = *p.segment;
          r = first(r, all_.send(comm, s.source + to * s.slice_bytes + p.offset, p.bytes, to));
          r = first(r, all_.recv(comm, received(from, p), p.bytes, from));
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
    group([&](nccl::Comm comm) {
      nccl::Result r{};
      for (const OpSegment& s : segments) {
        if (s.slice_bytes == 0) continue;
        r = first(r, api_.AllGather(s.source, s.target, count(s.slice_bytes), nccl::DataType::Uint8, comm, stream()));
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
    group([&](nccl::Comm comm) {
      return api_.AllReduce(s.target, s.target, count(s.slice_bytes / 8), nccl::DataType::Int64, reduce, comm,
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
    group([&](nccl::Comm comm) {
      return api_.AllGather(data, staging, count(rest), nccl::DataType::Uint8, comm, stream());
    });
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
    group([&](nccl::Comm comm) {
      return api_.Broadcast(s.target, s.target, count(s.slice_bytes), nccl::DataType::Uint8, op.peer, comm, stream());
    });
  }

  void all_to_all(const OpSegment& s) {
    if (s.slice_bytes == 0) return;
    group([&](nccl::Comm comm) {
      nccl::Result r{};
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() - step + size()) % size();
        r = first(r, all_.send(comm, s.source + to * s.slice_bytes, s.slice_bytes, to));
        r = first(r, all_.recv(comm, s.target + from * s.slice_bytes, s.slice_bytes, from));
      }
      return r;
    });
    copy_own(s.target + rank() * s.slice_bytes, s.source + rank() * s.slice_bytes, s.slice_bytes);
  }

  // NCCL does not compare sizes, so the hosts do it first.
  void all_to_allv(const Operation& op) {
    try {
      compare_sizes(world_, op, sizes_);
    } catch (const Error& e) {
      give_up(e);
      throw;
    }
    group([&](nccl::Comm comm) {
      nccl::Result r{};
      for (int step = 1; step < size(); ++step) {
        const int to = (rank() + step) % size(), from = (rank() - step + size()) % size();
        const std::span<const std::byte> out = op.out[to];
        const std::span<std::byte> in = op.in[from];
        if (!out.empty()) r = first(r, all_.send(comm, out.data(), std::ssize(out), to));
        if (!in.empty()) r = first(r, all_.recv(comm, in.data(), std::ssize(in), from));
      }
      return r;
    });
    if (!op.out[rank()].empty()) copy_own(op.in[rank()].data(), op.out[rank()].data(), std::ssize(op.out[rank()]));
  }

  void gather(const Operation& op) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return;
    if (op.peer == rank()) copy_own(s.target + rank() * s.slice_bytes, s.source, s.slice_bytes);
    group([&](nccl::Comm comm) {
      if (op.peer != rank()) return all_.send(comm, s.source, s.slice_bytes, op.peer);
      nccl::Result r{};
      for (int q = 0; q < size(); ++q) {
        if (q != rank()) r = first(r, all_.recv(comm, s.target + q * s.slice_bytes, s.slice_bytes, q));
      }
      return r;
    });
  }

  void scatter(const Operation& op) {
    const OpSegment& s = op.segments[0];
    if (s.slice_bytes == 0) return;
    if (op.peer == rank()) copy_own(s.target, s.source + rank() * s.slice_bytes, s.slice_bytes);
    group([&](nccl::Comm comm) {
      if (op.peer != rank()) return all_.recv(comm, s.target, s.slice_bytes, op.peer);
      nccl::Result r{};
      for (int q = 0; q < size(); ++q) {
        if (q != rank()) r = first(r, all_.send(comm, s.source + q * s.slice_bytes, s.slice_bytes, q));
      }
      return r;
    });
  }

  void copy_own(std::byte* target, const std::byte* source, i64 bytes) {
    if (target != source) device_.copy(target, source, bytes, Queue::Comm);
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
    for_each_connection([](Connection& c) { c.abort(); });
  }

  // NCCL's errors name no rank; the world may know more, a little later.
  void report(Connection& c, nccl::Result r) noexcept {
    const std::string words = c.describe(r);
    const std::shared_ptr<EnqueuedOperation> op = c.oldest();
    try {
      for (const auto limit = Clock::now() + kHearsay; Clock::now() < limit; std::this_thread::sleep_for(5ms))
        world_.look_for_failures();
      give_up(Error(Errc::Comm, fmt::format("NCCL failed in {}: {}", op ? op->info.describe() : "no call", words)));
    } catch (const Error& e) {
      give_up(e);
    }
  }

  void watch() {
    std::unique_lock lock(watch_mutex_);
    while (!wake_.wait_for(lock, kWatchPeriod, [this] { return stop_; })) {
      lock.unlock();
      try {
        world_.look_for_failures();
        for_each_connection([&](Connection& c) {
          if (const nccl::Result r = c.state(); nccl::is_error(r)) report(c, r);
        });
        if (timeline_->failure.get() != nullptr) return;
        show_wait();
        watch(all_, nullptr);
        for (Link& link : links_) watch(link.connection, &link);
      } catch (const std::exception& e) {
        give_up(as_error(e));
        return;
      }
      lock.lock();
    }
  }

  // link: null if the connection is that of all ranks.
  void watch(Connection& c, const Link* link) {
    const std::shared_ptr<EnqueuedOperation> op = c.oldest();
    if (op == nullptr) return;
    const auto now = Clock::now();
    Connection::Watch& watched = c.watch;
    // The clock starts when the operation is due and all earlier ones are done.
    if (op->info.number != watched.call || !op->is_due()) watched = {op->info.number, now, now};
    if (link == nullptr) compare_calls(op->info);
    if (const int peer = one_that_left(link); peer < 0) {
      watched.left = now;
    } else if (now - watched.left > kUnderWay) {
      throw Error(
          Errc::Comm,
          fmt::format("rank {} has left while rank {} is in {}", world_rank(peer), own_number(), op->info.describe()),
          world_rank(peer));
    }
    if (now - watched.since > std::chrono::duration<double>(timeout_s_)) report_absence(op->info, link);
  }

  // Shows the rank for which Compute waits in a message, if any, so that others do not take this rank for the late one.
  void show_wait() {
    Shown waiting;
    for (Link& link : links_) {
      const std::shared_ptr<EnqueuedOperation> op = link.connection.oldest();
      if (op != nullptr && op->is_due()) waiting = Shown::waits_for(peer_of(link));
    }
    const std::lock_guard lock(shown_mutex_);
    Shown now = shown_;
    if (waiting.is_wait()) now.kind = waiting.kind, now.hash = waiting.hash;
    if (now.pack() != world_.shown(rank())) world_.show(now.pack());
  }

  int peer_of(const Link& link) const noexcept { return link.ranks.from == rank() ? link.ranks.to : link.ranks.from; }

  int one_that_left(const Link* link) const {
    if (link != nullptr) return world_.has_left(peer_of(*link)) ? peer_of(*link) : -1;
    for (int q = 0; q < size(); ++q) {
      if (q != rank() && world_.has_left(q)) return q;
    }
    return -1;
  }

  void compare_calls(const CallInfo& mine) const {
    const Shown own = Shown::of(mine);
    for (int q = 0; q < size(); ++q) {
      const Shown other = Shown::unpack(world_.shown(q));
      if (q == rank() || other.is_wait() || other.calls != own.calls || other.pack() == own.pack()) continue;
      throw Error(
          Errc::Comm,
          fmt::format("calls do not match: rank {} calls {}, rank {} calls {} {}", own_number(), mine.describe(),
                      world_rank(q), op_name(other.kind), other.kind == own.kind ? "of other sizes" : "instead"),
          world_rank(q));
    }
  }

  [[noreturn]] void report_absence(const CallInfo& call, const Link* link) const {
    if (link != nullptr) {
      // From wait to wait, to a rank that waits for none.
      int late = peer_of(*link);
      std::string waits;
      for (int i = 0; i < size(); ++i) {
        const Shown shown = Shown::unpack(world_.shown(late));
        const int next = static_cast<int>(shown.hash);
        if (!shown.is_wait() || next == rank() || next >= size()) break;
        waits += fmt::format(", rank {} waits for rank {}", world_rank(late), world_rank(next));
        late = next;
      }
      throw Error(Errc::Timeout,
                  fmt::format("rank {} did not arrive within {} s: rank {} is in {}{}", world_rank(late), timeout_s_,
                              own_number(), call.describe(), waits),
                  world_rank(late));
    }
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
  const std::shared_ptr<nccl::Timeline> timeline_;
  Connection all_;          // of all ranks
  std::deque<Link> links_;  // that begin or end at this rank
  bool uses_links_ = false;
  const Device::Event fence_;
  const int uncaught_at_birth_;

  MemoryLedger ledger_;
  Buffer first_message_;  // of every link; freed after NCCL has ended, since freeing waits for the device
  Buffer staging_;
  std::vector<Part> parts_;
  std::vector<i64> sizes_;  // of an all_to_allv, of all ranks
  std::vector<std::byte*> fold_sources_;
  std::vector<TensorView> fold_views_;
  u64 calls_ = 0;
  std::mutex shown_mutex_;
  Shown shown_;  // of the last collective call

  std::mutex watch_mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::jthread watcher_;
};

}  // namespace

// Every other link first, so that they can be made side by side.
std::vector<MessageLink> ring_links(int ranks, int step) {
  std::vector<MessageLink> links;
  for (const int first_rank : {0, 1}) {
    for (int from = first_rank; from < ranks && ranks > 1; from += 2)
      links.push_back({from, (from + step + ranks) % ranks});
  }
  return links;
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& world, const CommOptions& options) {
  DS_ASSERT(options.device != nullptr);
  return std::make_unique<NcclCommunicator>(world, options);
}

}  // namespace ds
