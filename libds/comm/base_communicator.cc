// SPDX-License-Identifier: Apache-2.0
#include "comm/base_communicator.h"

#include <sys/mman.h>

#include <new>

#include "comm/slice_sizes.h"

namespace ds {

std::string_view op_name(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::ReduceScatter: return "reduce_scatter";
    case OpKind::AllGather: return "all_gather";
    case OpKind::AllReduce: return "all_reduce";
    case OpKind::Reduce: return "reduce";
    case OpKind::Broadcast: return "broadcast";
    case OpKind::AllToAll: return "all_to_all";
    case OpKind::AllToAllV: return "all_to_allv";
    case OpKind::Gather: return "gather";
    case OpKind::Scatter: return "scatter";
    case OpKind::Send: return "send";
    case OpKind::Recv: return "recv";
    case OpKind::Barrier: return "barrier";
    case OpKind::Allocate: return "allocate";
    case OpKind::Attach: return "attach";
  }
  return "?";
}

std::pmr::memory_resource* operation_memory() {
  // One pool for all threads, since one thread creates an operation and another frees it. It is filled ahead, so the
  // varying number of operations in flight does not make it grow during a step. Never destroyed: tickets may outlive
  // every communicator.
  class Pool final : public std::pmr::memory_resource {
   public:
    Pool() {
      // libstdc++'s pool does not survive running out of memory while it grows, so reserve more than it needs here. Not
      // by malloc, which would cache large blocks from then on.
      constexpr size_t kAhead = size_t{4} << 20;
      void* const ahead = mmap(nullptr, kAhead, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (ahead == MAP_FAILED) throw std::bad_alloc();
      munmap(ahead, kAhead);
      // For any size classes that the pool may have.
      constexpr size_t kBlocks = 64;
      for (size_t bytes = 8; bytes <= 2048; bytes += bytes < 128 ? 8 : bytes < 512 ? 64 : 256) {
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
  for (const OpSegment& s : segments) sum += s.slice_bytes;
  return sum;
}

i64 Operation::out_bytes() const noexcept {
  i64 sum = 0;
  for (const auto& slice : out) sum += std::ssize(slice);
  return sum;
}

CallInfo BaseCommunicator::call_info(const Operation& op, u64 number) const noexcept {
  CallInfo info{.number = number,
                .bytes = op.slice_bytes(),
                .shape = 14695981039346656037u,
                .imbalance = size_imbalance(op, rank_),
                .segments = static_cast<u32>(op.segments.size()),
                .root = op.root,
                .kind = op.kind,
                .dtype = op.dtype,
                .reduce = op.reduce,
                .accumulate = op.accumulate};
  for (const OpSegment& s : op.segments) info.shape = (info.shape ^ static_cast<u64>(s.slice_bytes)) * 1099511628211u;
  op.tag.copy(info.tag.data(), info.tag.size() - 1);
  return info;
}

bool CallInfo::agrees_with(const CallInfo& o) const noexcept {
  return number == o.number && bytes == o.bytes && shape == o.shape && segments == o.segments && root == o.root &&
         kind == o.kind && dtype == o.dtype && reduce == o.reduce && accumulate == o.accumulate;
}

std::string CallInfo::describe() const {
  std::string text = fmt::format("{} \"{}\" (call {}", op_name(kind), tag.data(), number + 1);
  if (segments > 0) text += fmt::format(", {} segments, {} bytes per slice, {}", segments, bytes, dtype_name(dtype));
  if (root >= 0) text += fmt::format(", root {}", root);
  if (accumulate) text += ", accumulating";
  return text + ")";
}

void Ticket::wait() {
  if (state_) state_->wait();
}

bool Ticket::done() const { return !state_ || state_->done(); }

void FailureLatch::set(const Failure& failure) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::make_shared<const Failure>(failure);
}

std::shared_ptr<const Failure> FailureLatch::get() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void FailureLatch::throw_if_set() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(failure_->code, failure_->message, failure_->rank);
}

std::vector<int> world_ranks(const Communicator& c) {
  std::vector<int> ranks(static_cast<size_t>(c.size()));
  for (int q = 0; q < c.size(); ++q) ranks[q] = c.world_rank(q);
  return ranks;
}

std::unique_ptr<Communicator> BaseCommunicator::group(std::span<const int>, std::string_view name, const CommOptions&) {
  throw Error(Errc::Internal,
              fmt::format("group \"{}\": \"{}\" has no groups; create the device communicator over a group instead",
                          name, backend_));
}

Operation BaseCommunicator::make_operation(OpKind kind, std::string_view tag, i64 sent_bytes) {
  Operation op{.kind = kind};
  op.tag = tag;
  const std::lock_guard lock(mutex_);
  auto count = counts_.find(tag);
  if (count == counts_.end()) count = counts_.try_emplace(std::string(tag)).first;
  ++count->second.calls;
  count->second.bytes += sent_bytes;
  return op;
}

void BaseCommunicator::count_time(std::string_view tag, double seconds) {
  const std::lock_guard lock(mutex_);
  if (const auto count = counts_.find(tag); count != counts_.end()) count->second.seconds += seconds;
}

Ticket BaseCommunicator::reduce_scatter(std::span<const ReduceScatterSegment> segments, DType wire, bool accumulate,
                                        std::string_view tag) {
  DS_ASSERT(wire == DType::F32 || wire == DType::BF16 || wire == DType::F16);
  i64 slice_elems = 0;
  for (const auto& s : segments) slice_elems += s.slice_elems;
  auto op = make_operation(OpKind::ReduceScatter, tag, (size_ - 1) * slice_elems * dtype_bytes(wire));
  op.dtype = wire;
  op.accumulate = accumulate;
  op.segments.reserve(segments.size());
  for (const auto& s : segments) {
    DS_ASSERT(s.slice_elems >= 0);
    op.segments.push_back({static_cast<const std::byte*>(s.source), reinterpret_cast<std::byte*>(s.target),
                           s.slice_elems * dtype_bytes(wire)});
  }
  return submit(std::move(op));
}

Ticket BaseCommunicator::all_gather(std::span<const AllGatherSegment> segments, std::string_view tag) {
  i64 slice_bytes = 0;
  for (const auto& s : segments) slice_bytes += s.slice_bytes;
  auto op = make_operation(OpKind::AllGather, tag, (size_ - 1) * slice_bytes);
  op.segments.reserve(segments.size());
  for (const auto& s : segments) {
    DS_ASSERT(s.slice_bytes >= 0);
    auto* buffer = static_cast<std::byte*>(s.buffer);
    op.segments.push_back({buffer + rank_ * s.slice_bytes, buffer, s.slice_bytes});
  }
  return submit(std::move(op));
}

Ticket BaseCommunicator::all_reduce(void* data, i64 n, DType dtype, ReduceOp reduce, std::string_view tag) {
  DS_ASSERT(n >= 0);
  DS_ASSERT(is_reducible(dtype));
  const i64 bytes = n * dtype_bytes(dtype);
  auto op = make_operation(OpKind::AllReduce, tag, 2 * (size_ - 1) * bytes / size_);
  op.dtype = dtype;
  op.reduce = reduce;
  op.segments.push_back({static_cast<std::byte*>(data), static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::reduce(void* data, i64 n, DType dtype, ReduceOp reduce, int root, std::string_view tag) {
  DS_ASSERT(n >= 0 && is_reducible(dtype) && root >= 0 && root < size_);
  const i64 bytes = n * dtype_bytes(dtype);
  auto op = make_operation(OpKind::Reduce, tag, root == rank_ ? (size_ - 1) * bytes / size_ : bytes);
  op.dtype = dtype;
  op.reduce = reduce;
  op.peer = root;
  op.root = world_rank(root);
  op.segments.push_back({static_cast<std::byte*>(data), static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::broadcast(void* data, i64 bytes, int root, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && root >= 0 && root < size_);
  auto op = make_operation(OpKind::Broadcast, tag, root == rank_ ? (size_ - 1) * bytes : 0);
  op.peer = root;
  op.root = world_rank(root);
  op.segments.push_back({static_cast<std::byte*>(data), static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::all_to_all(const void* source, void* target, i64 slice_bytes, std::string_view tag) {
  DS_ASSERT(slice_bytes >= 0);
  auto op = make_operation(OpKind::AllToAll, tag, (size_ - 1) * slice_bytes);
  op.segments.push_back({static_cast<const std::byte*>(source), static_cast<std::byte*>(target), slice_bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::all_to_allv(const void* source, std::span<const AllToAllSlice> slices_out, void* target,
                                     std::span<const AllToAllSlice> slices_in, std::string_view tag) {
  DS_ASSERT(std::ssize(slices_out) == size_ && std::ssize(slices_in) == size_);
  i64 sent = -slices_out[rank_].bytes;
  for (const AllToAllSlice& s : slices_out) sent += s.bytes;
  auto op = make_operation(OpKind::AllToAllV, tag, sent);
  op.out.reserve(slices_out.size());
  op.in.reserve(slices_in.size());
  for (size_t q = 0; q < slices_out.size(); ++q) {
    const AllToAllSlice &out = slices_out[q], &in = slices_in[q];
    DS_ASSERT(out.offset >= 0 && out.bytes >= 0 && in.offset >= 0 && in.bytes >= 0);
    op.out.emplace_back(static_cast<const std::byte*>(source) + out.offset, static_cast<size_t>(out.bytes));
    op.in.emplace_back(static_cast<std::byte*>(target) + in.offset, static_cast<size_t>(in.bytes));
  }
  return submit(std::move(op));
}

Ticket BaseCommunicator::gather(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) {
  DS_ASSERT(slice_bytes >= 0 && root >= 0 && root < size_);
  auto op = make_operation(OpKind::Gather, tag, root == rank_ ? 0 : slice_bytes);
  op.peer = root;
  op.root = world_rank(root);
  op.segments.push_back({static_cast<const std::byte*>(source), static_cast<std::byte*>(target), slice_bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::scatter(const void* source, void* target, i64 slice_bytes, int root, std::string_view tag) {
  DS_ASSERT(slice_bytes >= 0 && root >= 0 && root < size_);
  auto op = make_operation(OpKind::Scatter, tag, root == rank_ ? (size_ - 1) * slice_bytes : 0);
  op.peer = root;
  op.root = world_rank(root);
  op.segments.push_back({static_cast<const std::byte*>(source), static_cast<std::byte*>(target), slice_bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::send(const void* data, i64 bytes, int to, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && to >= 0 && to < size_ && to != rank_);
  auto op = make_operation(OpKind::Send, tag, bytes);
  op.peer = to;
  op.segments.push_back({static_cast<const std::byte*>(data), nullptr, bytes});
  return submit(std::move(op));
}

Ticket BaseCommunicator::recv(void* data, i64 bytes, int from, std::string_view tag) {
  DS_ASSERT(bytes >= 0 && from >= 0 && from < size_ && from != rank_);
  auto op = make_operation(OpKind::Recv, tag, 0);
  op.peer = from;
  op.segments.push_back({nullptr, static_cast<std::byte*>(data), bytes});
  return submit(std::move(op));
}

void BaseCommunicator::barrier(std::string_view tag) { submit(make_operation(OpKind::Barrier, tag, 0)).wait(); }

std::map<std::string, CommCount> BaseCommunicator::counts() const {
  const std::lock_guard lock(mutex_);
  std::map<std::string, CommCount> counts;
  for (const auto& [tag, count] : counts_)
    if (count.calls > 0) counts.emplace(tag, count);
  return counts;
}

void BaseCommunicator::reset_counts() {
  const std::lock_guard lock(mutex_);
  for (auto& [tag, count] : counts_) count = {};  // keeps the nodes, so that counting does not allocate
}

}  // namespace ds
