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

std::string_view op_name(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::ReduceScatter: return "reduce_scatter";
    case OpKind::AllGather: return "all_gather";
    case OpKind::AllReduce: return "all_reduce";
    case OpKind::Broadcast: return "broadcast";
    case OpKind::AllToAll: return "all_to_all";
    case OpKind::Send: return "send";
    case OpKind::Recv: return "recv";
    case OpKind::Barrier: return "barrier";
    case OpKind::Allocate: return "allocate";
  }
  return "?";
}

std::pmr::memory_resource* operation_memory() {
  // One pool for all threads (operations are made by one and freed by another), filled ahead so that what a step has in
  // flight, which varies, does not make it grow. Never destroyed: tickets may outlive every communicator.
  class Pool final : public std::pmr::memory_resource {
   public:
    Pool() {
      constexpr size_t kBlocks = 64;
      for (size_t bytes = 16; bytes <= 2048; bytes *= 2) {
        std::array<void*, kBlocks> blocks;
        for (void*& b : blocks) b = pool_.allocate(bytes);
        for (void* b : blocks) pool_.deallocate(b, bytes);
      }
    }

   private:
    void* do_allocate(size_t bytes, size_t alignment) override {
      const std::lock_guard lock(mutex_);
      return pool_.allocate(bytes, alignment);
    }
    void do_deallocate(void* p, size_t bytes, size_t alignment) override {
      const std::lock_guard lock(mutex_);
      pool_.deallocate(p, bytes, alignment);
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
    std::mutex mutex_;
    std::pmr::unsynchronized_pool_resource pool_;
  };
  static auto* pool = new Pool;
  return pool;
}

i64 Operation::slice_bytes() const noexcept {
  i64 sum = 0;
  for (const Segment& s : segments) sum += s.slice_bytes;
  return sum;
}

i64 Exchange::length() const noexcept {
  i64 sum = 0;
  for (const Segment& s : segments) sum += s.slice_bytes;
  return sum;
}

CallInfo CallInfo::of(const Operation& op, u64 number) noexcept {
  CallInfo info{.number = number,
                .bytes = op.slice_bytes(),
                .shape = 14695981039346656037u,
                .segments = static_cast<u32>(op.segments.size()),
                .root = op.peer,
                .kind = op.kind,
                .dtype = op.dtype,
                .reduce = op.reduce};
  for (const Segment& s : op.segments) info.shape = (info.shape ^ static_cast<u64>(s.slice_bytes)) * 1099511628211u;
  op.tag.copy(info.tag.data(), info.tag.size() - 1);
  return info;
}

bool CallInfo::agrees_with(const CallInfo& o) const noexcept {
  return number == o.number && bytes == o.bytes && shape == o.shape && segments == o.segments && root == o.root &&
         kind == o.kind && dtype == o.dtype && reduce == o.reduce;
}

std::string CallInfo::describe() const {
  std::string text = fmt::format("{} \"{}\" (call {}", op_name(kind), tag.data(), number + 1);
  if (segments > 0) text += fmt::format(", {} segments, {} bytes per slice, {}", segments, bytes, dtype_name(dtype));
  if (root >= 0) text += fmt::format(", root {}", root);
  return text + ")";
}

void Ticket::wait() {
  if (!state_) return;
  state_->finished.wait(0, std::memory_order_acquire);
  if (const Failure* f = state_->failure.get()) throw Error(f->code, f->message, f->rank);
}

bool Ticket::done() const { return !state_ || state_->finished.load(std::memory_order_acquire) != 0; }

void AsyncCommunicator::Worker::push(std::shared_ptr<Ticket::State> operation) {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::jthread([this] { loop(); });
    queue_.push(std::move(operation));
  }
  wake_.notify_one();
}

void AsyncCommunicator::Worker::loop() {
  for (;;) {
    std::shared_ptr<Ticket::State> next;
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
    : backend_(backend),
      rank_(rank),
      size_(size),
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

std::shared_ptr<Ticket::State> AsyncCommunicator::make_operation(OpKind kind, std::string_view tag, i64 sent_bytes) {
  auto op =
      std::allocate_shared<Ticket::State>(std::pmr::polymorphic_allocator<Ticket::State>(operation_memory()), kind);
  op->tag = tag;
  const std::lock_guard lock(mutex_);
  auto count = counts_.find(tag);
  if (count == counts_.end()) count = counts_.try_emplace(std::string(tag)).first;
  ++count->second.calls;
  count->second.bytes += sent_bytes;
  return op;
}

Ticket AsyncCommunicator::submit(std::shared_ptr<Ticket::State> op) {
  throw_if_failed();
  if (op->kind == OpKind::Send) {
    sender_.push(op);
  } else if (progress_thread_) {
    progress_.push(op);
  } else {
    run(*op);
  }
  return Ticket(std::move(op));
}

void AsyncCommunicator::run(Ticket::State& op) noexcept {
  const auto failed = [&](const Failure& failure) {
    latch(publish(failure));
    const std::lock_guard lock(mutex_);
    op.failure = failure_;
  };
  try {
    throw_if_failed();
    execute(op);
  } catch (const Error& e) {
    failed({e.code(), e.what(), e.rank()});
  } catch (const std::exception& e) {
    failed({Errc::Internal, fmt::format("rank {}: {}", rank_, e.what()), rank_});
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
    for (int q = 0; q < size_; ++q) {
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
    const i64 slice = total / (size_ * dtype_bytes(op.dtype)) * dtype_bytes(op.dtype);
    const Segment whole{data, data + rank_ * slice, slice}, own{data + rank_ * slice, data, slice};
    reduce_scatter_now(op, {&whole, 1});
    gather_now(op, {&own, 1}, Pattern::Share);
    done = slice * size_;
  }
  while (done < total) {
    const i64 block = std::min(kAllReduceBlock, total - done);
    scratch_.resize(std::max(scratch_.size(), static_cast<size_t>(size_ * block)));
    std::byte* own = scratch_.data() + rank_ * block;
    std::memcpy(own, data + done, static_cast<size_t>(block));
    const Segment segment{own, scratch_.data(), block};
    gather_now(op, {&segment, 1}, Pattern::Share);
    std::pmr::vector<const std::byte*> sources(static_cast<size_t>(size_), operation_memory());
    for (int q = 0; q < size_; ++q) sources[static_cast<size_t>(q)] = scratch_.data() + q * block;
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
  op->segments.push_back({nullptr, nullptr, bytes});
  op->buffer = &result;
  op->ledger = &ledger;
  op->memory_tag = tag;
  submit(std::move(op)).wait();
  return result;
}

Ticket AsyncCommunicator::reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                                         std::string_view tag) {
  DS_ASSERT(wire == DType::F32 || wire == DType::BF16 || wire == DType::F16);
  i64 slice_elems = 0;
  for (const auto& s : segments) slice_elems += s.slice_elems;
  auto op = make_operation(OpKind::ReduceScatter, tag, (size_ - 1) * slice_elems * dtype_bytes(wire));
  op->dtype = wire;
  op->accumulate = accumulate;
  op->segments.reserve(segments.size());
  for (const auto& s : segments) {
    DS_ASSERT(s.slice_elems >= 0);
    op->segments.push_back({static_cast<const std::byte*>(s.source), reinterpret_cast<std::byte*>(s.target),
                            s.slice_elems * dtype_bytes(wire)});
  }
  return submit(std::move(op));
}

Ticket AsyncCommunicator::all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) {
  i64 slice_bytes = 0;
  for (const auto& s : segments) slice_bytes += s.slice_bytes;
  auto op = make_operation(OpKind::AllGather, tag, (size_ - 1) * slice_bytes);
  op->segments.reserve(segments.size());
  for (const auto& s : segments) {
    DS_ASSERT(s.slice_bytes >= 0);
    auto* buffer = static_cast<std::byte*>(s.buffer);
    op->segments.push_back({buffer + rank_ * s.slice_bytes, buffer, s.slice_bytes});
  }
  return submit(std::move(op));
}

Ticket AsyncCommunicator::all_reduce(void* data, i64 n, DType dtype, ReduceOp reduce, std::string_view tag) {
  DS_ASSERT(n >= 0 && (dtype == DType::F32 || dtype == DType::F64 || dtype == DType::I64));
  const i64 bytes = n * dtype_bytes(dtype);
  auto op = make_operation(OpKind::AllReduce, tag, 2 * (size_ - 1) * bytes / size_);
  op->dtype = dtype;
  op->reduce = reduce;
  op->segments.push_back({static_cast<std::byte*>(data), static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

Ticket AsyncCommunicator::broadcast(void* data, i64 bytes, int root, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && root >= 0 && root < size_);
  auto op = make_operation(OpKind::Broadcast, tag, root == rank_ ? (size_ - 1) * bytes : 0);
  op->peer = root;
  op->segments.push_back({static_cast<std::byte*>(data), static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

Ticket AsyncCommunicator::all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) {
  DS_ASSERT(slice_bytes >= 0);
  auto op = make_operation(OpKind::AllToAll, tag, (size_ - 1) * slice_bytes);
  op->segments.push_back({static_cast<const std::byte*>(source), static_cast<std::byte*>(target), slice_bytes});
  return submit(std::move(op));
}

Ticket AsyncCommunicator::send(const void* data, i64 bytes, int to, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && to >= 0 && to < size_ && to != rank_);
  auto op = make_operation(OpKind::Send, tag, bytes);
  op->peer = to;
  op->segments.push_back({static_cast<const std::byte*>(data), nullptr, bytes});
  return submit(std::move(op));
}

Ticket AsyncCommunicator::recv(void* data, i64 bytes, int from, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && from >= 0 && from < size_ && from != rank_);
  auto op = make_operation(OpKind::Recv, tag, 0);
  op->peer = from;
  op->segments.push_back({nullptr, static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

void AsyncCommunicator::barrier(std::string_view tag) { submit(make_operation(OpKind::Barrier, tag, 0)).wait(); }

void AsyncCommunicator::abort(const Error& why) noexcept {
  const bool named = why.rank() >= 0;  // the message says which rank it was
  latch(publish({why.code(), named ? why.what() : fmt::format("rank {} gave up: {}", rank_, why.what()),
                 named ? why.rank() : rank_}));
}

std::map<std::string, CommCount> AsyncCommunicator::counts() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, CommCount> counts;
  for (const auto& [tag, count] : counts_)
    if (count.calls > 0) counts.emplace(tag, count);
  return counts;
}

void AsyncCommunicator::reset_counts() {
  const std::lock_guard lock(mutex_);
  for (auto& [tag, count] : counts_) count = {};  // the nodes stay: counting allocates nothing
}

void AsyncCommunicator::fail(Errc code, int rank, const std::string& message) {
  const Failure f = publish({code, message, rank});
  throw Error(f.code, f.message, f.rank);
}

void AsyncCommunicator::latch(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::make_shared<const Failure>(failure);
}

void AsyncCommunicator::throw_if_failed() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(failure_->code, failure_->message, failure_->rank);
}

}  // namespace ds
