// SPDX-License-Identifier: Apache-2.0
#include "comm/async_communicator.h"

#include <algorithm>
#include <bit>
#include <cctype>
#include <cstring>
#include <exception>

#include "base/as_error.h"
#include "base/clock.h"
#include "base/thread.h"
#include "base/trace.h"
#include "comm/copy_bytes.h"
#include "comm/slice_sizes.h"
#include "comm/staging_size.h"

namespace ds {
namespace {

constexpr i64 kVectorBytes = 256;  // shorter pieces do not justify a kernel
constexpr i64 kReduceRound = i64{8} << 20;

const OpTable& table_of(const CommOptions& options) {
  const OpTable* ops = options.ops != nullptr ? options.ops : cpu_ops();
  DS_CHECK(ops != nullptr, Errc::Unavailable, "this CPU does not support AVX2 and FMA, which the kernels need");
  return *ops;
}

template <class T>
T combine_two(T a, T b, ReduceOp op) noexcept {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    const float x = to_float(a), y = to_float(b);
    return std::bit_cast<u32>(combine_two(x, y, op)) == std::bit_cast<u32>(x) ? a : b;
  } else {
    switch (op) {
      case ReduceOp::Sum:
        if constexpr (std::is_integral_v<T>) {
          using Bits = std::make_unsigned_t<T>;
          return static_cast<T>(static_cast<Bits>(a) + static_cast<Bits>(b));
        } else {
          return a + b;
        }
      // NaN wins on either side.
      case ReduceOp::Max: return a < b || b != b ? b : a;
      case ReduceOp::Min: return b < a || b != b ? b : a;
    }
    return a;
  }
}

template <class T>
void combine_in_rank_order(std::byte* target, std::span<const std::byte* const> sources, i64 bytes, ReduceOp op) {
  T* out = reinterpret_cast<T*>(target);
  for (i64 i = 0; i < bytes / static_cast<i64>(sizeof(T)); ++i) {
    T value = reinterpret_cast<const T*>(sources[0])[i];
    for (const std::byte* s : sources.subspan(1)) value = combine_two(value, reinterpret_cast<const T*>(s)[i], op);
    out[i] = value;
  }
}

}  // namespace

i64 Exchange::length() const noexcept {
  i64 sum = 0;
  for (const OpSegment& s : segments) sum += s.slice_bytes;
  return sum;
}

void QueuedOperation::wait() {
  finished.wait(0, std::memory_order_acquire);
  if (const Failure* f = failure.get()) throw Error(f->code, f->message, f->rank);
}

void AsyncCommunicator::Worker::push(std::shared_ptr<QueuedOperation> operation) {
  {
    const std::lock_guard lock(mutex_);
    start();
    queue_.push(std::move(operation));
  }
  wake_.notify_one();
}

void AsyncCommunicator::Worker::start() {
  if (thread_.joinable()) return;
  thread_ = start_thread(fmt::format("the communication thread of rank {}", owner_.own_number()), [this] { loop(); });
}

void AsyncCommunicator::Worker::loop() {
  for (;;) {
    std::shared_ptr<QueuedOperation> next;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      if (queue_.empty()) idle_.notify_all();
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop();
      busy_ = true;
    }
    owner_.run(*next);
  }
}

bool AsyncCommunicator::Worker::idle() {
  const std::lock_guard lock(mutex_);
  start();
  return queue_.empty() && !busy_;
}

void AsyncCommunicator::Worker::drain() noexcept {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void AsyncCommunicator::Worker::finish() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

AsyncCommunicator::AsyncCommunicator(std::string_view backend, int rank, int size, const CommOptions& options,
                                     Membership membership)
    : BaseCommunicator(backend, rank, size, std::move(membership.ranks)),
      world_(membership.world != nullptr ? *membership.world : *this),
      of_group_(membership.name.empty() ? "" : fmt::format(" of group \"{}\"", membership.name)),
      timeout_s_(options.timeout_s),
      progress_thread_(options.progress_thread),
      times_calls_(options.time_calls),
      trace_(options.trace),
      ops_(table_of(options)),
      uncaught_at_birth_(std::uncaught_exceptions()),
      fold_sources_(static_cast<size_t>(size)),
      combined_(static_cast<size_t>(size)) {}

void AsyncCommunicator::shut_down() noexcept {
  if (std::uncaught_exceptions() > uncaught_at_birth_) {
    abort(Error(Errc::Comm, "an error unwound the owner of its communicator"));
  }
  progress_.finish();
  sender_.finish();
}

Ticket AsyncCommunicator::submit(Operation&& operation) {
  throw_if_failed();
  auto op = std::allocate_shared<QueuedOperation>(std::pmr::polymorphic_allocator<QueuedOperation>(operation_memory()),
                                                  std::move(operation));
  if (op->kind == OpKind::Send) {
    if (!sender_.idle() || !run(*op, true)) sender_.push(op);
  } else if (progress_thread_) {
    progress_.push(op);
  } else {
    run(*op);
  }
  return Ticket(std::move(op));
}

bool AsyncCommunicator::run(QueuedOperation& op, bool at_once) noexcept {
  const auto failed = [&](const Failure& failure) {
    settle(failure);
    op.failure = world_.failure_.get();
  };
  const bool timed = times_calls_ || trace_ != nullptr;
  const Clock::time_point start = timed ? Clock::now() : Clock::time_point();
  try {
    throw_if_failed();
    if (!at_once) {
      execute(op);
    } else if (!transmit_at_once(op, op.peer)) {
      return false;
    }
    if (times_calls_) count_time(op.tag, seconds_since(start));
    if (trace_ != nullptr && trace_->is_on()) {
      const bool uneven = op.kind == OpKind::AllToAllV;
      trace_->add(fmt::format("{}{}", op.kind == OpKind::Send ? "sends" : "messages", of_group_), op.tag, start,
                  Clock::now(), uneven ? op.out_bytes() : op.slice_bytes(), uneven ? "bytes" : "slice_bytes");
    }
  } catch (const Error& e) {
    failed({e.code(), e.what(), e.rank()});
  } catch (const std::exception& e) {
    failed({as_error(e).code(), fmt::format("rank {}: {}", own_number(), as_error(e).what()), own_number()});
  }
  op.finished.store(1, std::memory_order_release);
  op.finished.notify_all();
  return true;
}

Exchange exchange_of(const Operation& op) noexcept {
  const bool from_root = op.kind == OpKind::Broadcast || op.kind == OpKind::Scatter;
  return {.sliced = op.kind == OpKind::AllToAll || op.kind == OpKind::Scatter,
          .segments = op.segments,
          .only_from = from_root ? op.peer : -1,
          .only_to = op.kind == OpKind::Gather ? op.peer : -1};
}

void AsyncCommunicator::execute(const Operation& op) {
  switch (op.kind) {
    case OpKind::ReduceScatter: return reduce_scatter_now(op, op.segments, op.accumulate);
    case OpKind::AllReduce: return all_reduce_now(op);
    case OpKind::Reduce: return reduce_now(op);
    case OpKind::AllGather:
    case OpKind::Broadcast:
    case OpKind::AllToAll:
    case OpKind::Gather:
    case OpKind::Scatter:
    case OpKind::Barrier: return move_now(op, exchange_of(op));
    case OpKind::AllToAllV: return all_to_allv_now(op);
    case OpKind::Send: return transmit(op, op.peer);
    case OpKind::Recv: return receive(op, op.peer);
    case OpKind::Attach: break;  // not a call
    case OpKind::Allocate:
      meet_now(op);
      *op.buffer = allocate_shared(*op.ledger, op.memory_tag, op.slice_bytes());
      return;
  }
}

void AsyncCommunicator::reduce_scatter_now(const Operation& op, std::span<const OpSegment> segments, bool accumulate) {
  const i64 size = dtype_bytes(op.dtype);
  exchange(op, {.sliced = true, .segments = segments}, [&](const SliceRange& p) {
    float* target = reinterpret_cast<float*>(p.segment->target) + p.offset / size;
    fold(target, p.sources, p.bytes / size, op.dtype, accumulate);
  });
}

void AsyncCommunicator::move_now(const Operation& op, const Exchange& which) {
  Exchange x = which;
  x.lands = true;
  exchange(op, x, [&](const SliceRange& p) {
    for (int q = 0; q < size(); ++q) {
      const std::byte* source = p.sources[q];
      if (source == nullptr) continue;
      std::byte* target = x.landing(*p.segment, q) + p.offset;
      if (source != target) copy_bytes(target, source, p.bytes);
    }
  });
}

void AsyncCommunicator::copy_own(const Operation& op) {
  const std::span<const std::byte> own = op.out[rank()];
  if (!own.empty()) copy_bytes(op.in[rank()].data(), own.data(), std::ssize(own));
}

void AsyncCommunicator::compare_calls(const Operation& op, FunctionRef<const CallInfo&(int)> call_of) {
  const CallInfo& first = call_of(0);
  u64 imbalance = first.imbalance;
  for (int q = 1; q < size(); ++q) {
    const CallInfo& other = call_of(q);
    if (!other.agrees_with(first)) {
      fail(Errc::Comm, world_rank(q),
           fmt::format("calls do not match{}: rank {} calls {}, rank {} calls {}", of_group(), world_rank(0),
                       first.describe(), world_rank(q), other.describe()));
    }
    imbalance += other.imbalance;
  }
  if (imbalance != 0) report_sizes(op);
}

// All ranks see the same imbalance, so all are here, and each finds the same pair.
void AsyncCommunicator::report_sizes(const Operation& op) {
  std::vector<i64> sizes(static_cast<size_t>(2 * size() * size()));
  const OpSegment own{reinterpret_cast<const std::byte*>(put_sizes(op, rank(), sizes)),
                      reinterpret_cast<std::byte*>(sizes.data()), 2 * size() * i64{sizeof(i64)}};
  Operation step{.kind = op.kind};
  step.tag = op.tag;
  move_now(step, {.sliced = false, .segments = {&own, 1}});
  const std::optional<Error> mismatch = size_mismatch(sizes, *this, op.tag, of_group());
  DS_ASSERT(mismatch.has_value());
  fail(mismatch->code(), mismatch->rank(), mismatch->what());
}

// A rank folds its data in its given form; axes of size one need no special case.
void AsyncCommunicator::all_reduce_now(const Operation& op) {
  if (size() == 1) return meet_now(op);
  std::byte* data = op.segments[0].target;
  const i64 total = op.segments[0].slice_bytes, slice = folded_slice_bytes(op, size());
  if (slice > 0) {
    const OpSegment whole{data, data + rank() * slice, slice}, own{data + rank() * slice, data, slice};
    if (is_16_bit(op.dtype)) {
      reduce_scatter_rounded(op, whole);
    } else {
      reduce_scatter_now(op, {&whole, 1}, false);
    }
    move_now(op, {.sliced = false, .segments = {&own, 1}});
  }
  combine_now(op, data + slice * size(), total - slice * size(), -1);
}

// A large sum is made in rounds: each rank folds a slice, and the root gathers them.
void AsyncCommunicator::reduce_now(const Operation& op) {
  if (size() == 1) return meet_now(op);
  std::byte* data = op.segments[0].target;
  const i64 total = op.segments[0].slice_bytes, elem = dtype_bytes(op.dtype);
  i64 done = 0;
  while (folds(op) && total - done > kReductionBlock) {
    const i64 slice = std::min(kReduceRound, total - done) / (size() * elem) * elem, elems = slice / elem;
    sums_.resize(std::max(sums_.size(), static_cast<size_t>(elems)));
    auto* const sums = reinterpret_cast<std::byte*>(sums_.data());
    const OpSegment whole{data + done, sums, slice};
    reduce_scatter_now(op, {&whole, 1}, false);
    OpSegment rounded{sums, data + done, slice};
    if (is_16_bit(op.dtype)) {
      scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(slice)));
      round_to(scratch_.data(), op.dtype, {sums_.data(), static_cast<size_t>(elems)});
      rounded.source = scratch_.data();
    }
    move_now(op, {.sliced = false, .segments = {&rounded, 1}, .only_to = op.peer});
    done += slice * size();
  }
  combine_now(op, data + done, total - done, op.peer);
}

void AsyncCommunicator::combine_now(const Operation& op, std::byte* data, i64 total, int only_to) {
  const bool consumes = only_to < 0 || only_to == rank();
  std::vector<const std::byte*>& sources = combined_;
  for (i64 done = 0; done < total;) {
    const i64 block = std::min(kReductionBlock, total - done);
    std::byte* const target = data + done;
    OpSegment segment{target, nullptr, block};
    if (consumes) {
      scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(size() * block)));
      for (int q = 0; q < size(); ++q) sources[q] = scratch_.data() + q * block;
      segment.target = scratch_.data();
    }
    move_now(op, {.sliced = false, .segments = {&segment, 1}, .only_to = only_to});
    if (consumes) combine(op, target, sources, block);
    done += block;
  }
}

void AsyncCommunicator::combine(const Operation& op, std::byte* target, std::span<const std::byte* const> sources,
                                i64 bytes) {
  if (op.dtype == DType::F32 && op.reduce == ReduceOp::Sum && bytes >= kVectorBytes)
    return fold(reinterpret_cast<float*>(target), sources, bytes / 4, op.dtype, false);
  switch (op.dtype) {
    case DType::F32: return combine_in_rank_order<float>(target, sources, bytes, op.reduce);
    case DType::F64: return combine_in_rank_order<double>(target, sources, bytes, op.reduce);
    case DType::I32: return combine_in_rank_order<i32>(target, sources, bytes, op.reduce);
    case DType::I64: return combine_in_rank_order<i64>(target, sources, bytes, op.reduce);
    default: break;
  }
  if (op.reduce == ReduceOp::Sum) return fold_rounded(target, sources, bytes / 2, op.dtype);
  if (op.dtype == DType::BF16) return combine_in_rank_order<bf16>(target, sources, bytes, op.reduce);
  combine_in_rank_order<f16>(target, sources, bytes, op.reduce);
}

void AsyncCommunicator::reduce_scatter_rounded(const Operation& op, const OpSegment& whole) {
  exchange(op, {.sliced = true, .segments = {&whole, 1}}, [&](const SliceRange& p) {
    fold_rounded(whole.target + p.offset, p.sources, p.bytes / dtype_bytes(op.dtype), op.dtype);
  });
}

void AsyncCommunicator::fold(float* target, std::span<const std::byte* const> sources, i64 elems, DType wire,
                             bool accumulate) {
  for (size_t q = 0; q < sources.size(); ++q)
    fold_sources_[q] = TensorView::of(const_cast<std::byte*>(sources[q]), wire, {elems});
  Stream stream{.pool = &fold_pool_};
  ops_.fold(TensorView::of(target, DType::F32, {elems}), fold_sources_, accumulate, stream);
}

void AsyncCommunicator::fold_rounded(std::byte* target, std::span<const std::byte* const> sources, i64 elems,
                                     DType wire) {
  sums_.resize(std::max(sums_.size(), static_cast<size_t>(std::min(elems, kRoundedBlock))));
  std::pmr::vector<const std::byte*> from(sources.begin(), sources.end(), operation_memory());
  for (i64 begin = 0; begin < elems; begin += kRoundedBlock) {
    const i64 count = std::min(kRoundedBlock, elems - begin);
    for (size_t q = 0; q < from.size(); ++q) from[q] = sources[q] + begin * dtype_bytes(wire);
    fold(sums_.data(), from, count, wire, false);
    round_to(target + begin * dtype_bytes(wire), wire, {sums_.data(), static_cast<size_t>(count)});
  }
}

void AsyncCommunicator::round_to(std::byte* target, DType wire, std::span<const float> sums) {
  const i64 elems = narrow<i64>(sums.size());
  Stream stream{.pool = &fold_pool_};
  ops_.cast(TensorView::of(target, wire, {elems}), TensorView::of(const_cast<float*>(sums.data()), DType::F32, {elems}),
            stream);
}

std::unique_ptr<Communicator> AsyncCommunicator::group(std::span<const int> members, std::string_view name,
                                                       const CommOptions& options) {
  const auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '-'; };
  DS_ASSERT(!name.empty() && name.size() <= 32 && std::all_of(name.begin(), name.end(), allowed));
  throw_if_failed();
  Membership group{.world = &world_, .name = std::string(name), .ranks = {}};
  int own = -1;
  for (const int member : members) {
    DS_ASSERT(member >= 0 && member < size());
    DS_ASSERT(std::find(group.ranks.begin(), group.ranks.end(), world_rank(member)) == group.ranks.end());
    if (member == rank()) own = narrow<int>(std::ssize(group.ranks));
    group.ranks.push_back(world_rank(member));
  }
  DS_ASSERT(own >= 0);
  try {
    return Part{world_}.make_group(own, std::move(group), options);
  } catch (const Error& e) {  // ranks that wait for this one must not wait in vain
    const bool named = e.rank() >= 0;
    const Failure f = settle({e.code(), named ? e.what() : fmt::format("rank {}: {}", own_number(), e.what()),
                              named ? e.rank() : own_number()});
    throw Error(f.code, f.message, f.rank);
  }
}

Buffer AsyncCommunicator::allocate(MemoryLedger& ledger, Tag tag, i64 bytes) {
  DS_ASSERT(bytes >= 0);
  Buffer result;
  auto op = make_operation(OpKind::Allocate, "allocate", 0);
  op.segments.push_back({nullptr, nullptr, bytes});
  op.buffer = &result;
  op.ledger = &ledger;
  op.memory_tag = tag;
  submit(std::move(op)).wait();
  return result;
}

void AsyncCommunicator::abort(const Error& why) noexcept {
  const bool named = why.rank() >= 0;  // the message states which rank it was
  settle({why.code(), named ? why.what() : fmt::format("rank {} gave up: {}", own_number(), why.what()),
          named ? why.rank() : own_number()});
}

void AsyncCommunicator::look_for_failures() {
  try {
    world_.look_at_peers();
  } catch (const Error& e) {
    settle({e.code(), e.what(), e.rank()});
  }
  throw_if_failed();
}

Failure AsyncCommunicator::settle(const Failure& failure) noexcept {
  const Failure holds = world_.publish(failure);
  world_.failure_.set(holds);
  return holds;
}

void AsyncCommunicator::fail(Errc code, int rank, const std::string& message) {
  const Failure f = settle({code, message, rank});
  throw Error(f.code, f.message, f.rank);
}

}  // namespace ds
