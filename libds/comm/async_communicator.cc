// SPDX-License-Identifier: Apache-2.0
#include "comm/async_communicator.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace ds {
namespace {

// An fp32 sum above this size is a reduce-scatter and an all-gather; other all-reduces go in blocks of this size, which
// every rank gathers and folds for itself.
constexpr i64 kAllReduceBlock = i64{64} << 10;

const OpTable& table_of(const CommOptions& options) {
  const OpTable* ops = options.ops != nullptr ? options.ops : cpu_ops();
  DS_CHECK(ops != nullptr, Errc::Unavailable, "this CPU lacks AVX2 and FMA, which the kernels need");
  return *ops;
}

template <class T>
T combine(T a, T b, ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::Sum:
      if constexpr (std::is_same_v<T, i64>) {
        return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b));
      } else {
        return a + b;
      }
    // A NaN wins, whichever side it is on.
    case ReduceOp::Max: return a < b || b != b ? b : a;
    case ReduceOp::Min: return b < a || b != b ? b : a;
  }
  return a;
}

template <class T>
void combine_in_rank_order(std::byte* target, std::span<const std::byte* const> sources, i64 bytes, ReduceOp op) {
  T* out = reinterpret_cast<T*>(target);
  for (i64 i = 0; i < bytes / static_cast<i64>(sizeof(T)); ++i) {
    T value = reinterpret_cast<const T*>(sources[0])[i];
    for (const std::byte* s : sources.subspan(1)) value = combine(value, reinterpret_cast<const T*>(s)[i], op);
    out[i] = value;
  }
}

}  // namespace

i64 Exchange::length() const noexcept {
  i64 sum = 0;
  for (const Segment& s : segments) sum += s.slice_bytes;
  return sum;
}

void QueuedOperation::wait() {
  finished.wait(0, std::memory_order_acquire);
  if (const Failure* f = failure.get()) throw Error(f->code, f->message, f->rank);
}

void AsyncCommunicator::Worker::push(std::shared_ptr<QueuedOperation> operation) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::jthread([this] { loop(); });
    queue_.push(std::move(operation));
  }
  wake_.notify_one();
}

void AsyncCommunicator::Worker::loop() {
  for (;;) {
    std::shared_ptr<QueuedOperation> next;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      next = std::move(queue_.front());
      queue_.pop();
    }
    owner_.run(*next);
  }
}

void AsyncCommunicator::Worker::finish() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

AsyncCommunicator::AsyncCommunicator(std::string_view backend, int rank, int size, const CommOptions& options)
    : BaseCommunicator(backend, rank, size),
      timeout_s_(options.timeout_s),
      progress_thread_(options.progress_thread),
      ops_(table_of(options)),
      uncaught_at_birth_(std::uncaught_exceptions()),
      fold_sources_(static_cast<size_t>(size)) {}

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
    sender_.push(op);
  } else if (progress_thread_) {
    progress_.push(op);
  } else {
    run(*op);
  }
  return Ticket(std::move(op));
}

void AsyncCommunicator::run(QueuedOperation& op) noexcept {
  const auto failed = [&](const Failure& failure) {
    failure_.set(publish(failure));
    op.failure = failure_.get();
  };
  try {
    throw_if_failed();
    execute(op);
  } catch (const Error& e) {
    failed({e.code(), e.what(), e.rank()});
  } catch (const std::exception& e) {
    failed({Errc::Internal, fmt::format("rank {}: {}", rank(), e.what()), rank()});
  }
  op.finished.store(1, std::memory_order_release);
  op.finished.notify_all();
}

void AsyncCommunicator::execute(const Operation& op) {
  const auto nothing = [](const Piece&) {};
  switch (op.kind) {
    case OpKind::ReduceScatter: return reduce_scatter_now(op, op.segments);
    case OpKind::AllGather: return gather_now(op, op.segments, Pattern::Share);
    case OpKind::AllReduce: return all_reduce_now(op);
    case OpKind::Broadcast: return gather_now(op, op.segments, Pattern::Root);
    case OpKind::AllToAll: return gather_now(op, op.segments, Pattern::Scatter);
    case OpKind::Send: return transmit(op);
    case OpKind::Recv: return receive(op);
    case OpKind::Barrier: return exchange(op, {.pattern = Pattern::Share, .segments = {}}, nothing);
    case OpKind::Allocate:
      exchange(op, {.pattern = Pattern::Share, .segments = {}}, nothing);
      *op.buffer = allocate_shared(*op.ledger, op.memory_tag, op.slice_bytes());
      return;
  }
}

void AsyncCommunicator::reduce_scatter_now(const Operation& op, std::span<const Segment> segments) {
  const i64 size = dtype_bytes(op.dtype);
  exchange(op, {.pattern = Pattern::Scatter, .segments = segments}, [&](const Piece& p) {
    float* target = reinterpret_cast<float*>(p.segment->target) + p.offset / size;
    fold(target, p.sources, p.bytes / size, op.dtype, op.accumulate);
  });
}

void AsyncCommunicator::gather_now(const Operation& op, std::span<const Segment> segments, Pattern pattern) {
  const Exchange x{.pattern = pattern, .segments = segments, .lands = true, .root = op.peer};
  exchange(op, x, [&](const Piece& p) {
    for (int q = 0; q < size(); ++q) {
      const std::byte* source = p.sources[static_cast<size_t>(q)];
      std::byte* target = x.landing(*p.segment, q) + p.offset;
      if (source != nullptr && source != target) std::memcpy(target, source, static_cast<size_t>(p.bytes));
    }
  });
}

void AsyncCommunicator::all_reduce_now(const Operation& op) {
  std::byte* data = op.segments[0].target;
  const i64 total = op.segments[0].slice_bytes;
  i64 done = 0;
  if (op.dtype == DType::F32 && op.reduce == ReduceOp::Sum && total > kAllReduceBlock) {
    const i64 slice = total / (size() * dtype_bytes(op.dtype)) * dtype_bytes(op.dtype);
    const Segment whole{data, data + rank() * slice, slice}, own{data + rank() * slice, data, slice};
    reduce_scatter_now(op, {&whole, 1});
    gather_now(op, {&own, 1}, Pattern::Share);
    done = slice * size();
  }
  while (done < total) {
    const i64 block = std::min(kAllReduceBlock, total - done);
    scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(size() * block)));
    std::byte* own = scratch_.data() + rank() * block;
    std::memcpy(own, data + done, static_cast<size_t>(block));
    const Segment segment{own, scratch_.data(), block};
    gather_now(op, {&segment, 1}, Pattern::Share);
    std::pmr::vector<const std::byte*> sources(static_cast<size_t>(size()), operation_memory());
    for (int q = 0; q < size(); ++q) sources[static_cast<size_t>(q)] = scratch_.data() + q * block;
    if (op.dtype == DType::I64) {
      combine_in_rank_order<i64>(data + done, sources, block, op.reduce);
    } else if (op.dtype == DType::F64) {
      combine_in_rank_order<double>(data + done, sources, block, op.reduce);
    } else {
      combine_in_rank_order<float>(data + done, sources, block, op.reduce);
    }
    done += block;
  }
}

void AsyncCommunicator::fold(float* target, std::span<const std::byte* const> sources, i64 elems, DType wire,
                             bool accumulate) {
  for (size_t q = 0; q < sources.size(); ++q)
    fold_sources_[q] = TensorView::of(const_cast<std::byte*>(sources[q]), wire, {elems});
  Stream stream{.pool = &fold_pool_};
  ops_.fold(TensorView::of(target, DType::F32, {elems}), fold_sources_, accumulate, stream);
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
  const bool named = why.rank() >= 0;  // the message says which rank it was
  failure_.set(publish({why.code(), named ? why.what() : fmt::format("rank {} gave up: {}", rank(), why.what()),
                        named ? why.rank() : rank()}));
}

void AsyncCommunicator::look_for_failures() {
  try {
    look_at_peers();
  } catch (const Error& e) {
    failure_.set(publish({e.code(), e.what(), e.rank()}));
  }
  throw_if_failed();
}

void AsyncCommunicator::fail(Errc code, int rank, const std::string& message) {
  const Failure f = publish({code, message, rank});
  throw Error(f.code, f.message, f.rank);
}

}  // namespace ds
