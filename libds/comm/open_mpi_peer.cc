// SPDX-License-Identifier: Apache-2.0
// Open MPI's own collectives behind our interface, in the caller's thread, for comparison with ours; the field's
// benchmarks measure the same. Not for training: the order of sums is Open MPI's, calls are not compared, and an absent
// rank is waited for without a limit.

#include <mpi.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "comm/base_communicator.h"
#include "comm/make_communicator.h"

namespace ds {
namespace {

void check(int rc, std::string_view call) { DS_CHECK(rc == MPI_SUCCESS, Errc::Comm, "{} failed with {}", call, rc); }

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case DType::F32: return MPI_FLOAT;
    case DType::F64: return MPI_DOUBLE;
    case DType::I32: return MPI_INT32_T;
    case DType::I64: return MPI_INT64_T;
    default: throw Error(Errc::Config, fmt::format("Open MPI does not reduce {}", dtype_name(dtype)));
  }
}

MPI_Op op_of(ReduceOp op) { return op == ReduceOp::Sum ? MPI_SUM : op == ReduceOp::Max ? MPI_MAX : MPI_MIN; }

int count(i64 n) {
  DS_CHECK(n <= INT_MAX, Errc::Config, "Open MPI counts up to {}, not {}", INT_MAX, n);
  return static_cast<int>(n);
}

struct Request final : Ticket::State {
  void wait() override { check(MPI_Wait(&request, MPI_STATUS_IGNORE), "MPI_Wait"); }
  bool done() const override {
    int flag = 0;
    check(MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE), "MPI_Request_get_status");
    return flag != 0;
  }
  MPI_Request request = MPI_REQUEST_NULL;
};

class OpenMpiPeer final : public BaseCommunicator {
 public:
  explicit OpenMpiPeer(std::unique_ptr<Communicator> world)
      : BaseCommunicator("openmpi", world->rank(), world->size()), world_(std::move(world)) {
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  }
  ~OpenMpiPeer() override {
    drain();
    MPI_Comm_free(&comm_);
  }
  void drain() noexcept override {
    for (const auto& request : under_way_) MPI_Wait(&request->request, MPI_STATUS_IGNORE);
    under_way_.clear();
  }

  Buffer allocate(MemoryLedger& ledger, Tag tag, i64 bytes) override { return Buffer(ledger, tag, bytes); }
  void throw_if_failed() const override { world_->throw_if_failed(); }
  void look_for_failures() override { world_->look_for_failures(); }
  void abort(const Error& why) noexcept override { world_->abort(why); }
  i64 staging_bytes() const noexcept override { return static_cast<i64>(scratch_.size() * sizeof(float)); }

 private:
  Ticket submit(Operation&& op) override {
    throw_if_failed();
    if (op.kind == OpKind::Barrier) check(MPI_Barrier(comm_), "MPI_Barrier");
    if (op.kind == OpKind::AllToAllV) all_to_allv(op);
    for (const OpSegment& s : op.segments) {
      if (op.kind == OpKind::Send || op.kind == OpKind::Recv) return message(op, s);
      collective(op, s);
    }
    return {};
  }

  Ticket message(const Operation& op, const OpSegment& s) {
    auto request = std::allocate_shared<Request>(std::pmr::polymorphic_allocator<Request>(operation_memory()));
    const int bytes = count(s.slice_bytes);
    if (op.kind == OpKind::Send) {
      check(MPI_Isend(s.source, bytes, MPI_BYTE, op.peer, 0, comm_, &request->request), "MPI_Isend");
    } else {
      check(MPI_Irecv(s.target, bytes, MPI_BYTE, op.peer, 0, comm_, &request->request), "MPI_Irecv");
    }
    if (under_way_.size() ==
        under_way_.capacity())  // rarely, and without a call, since messages of a few hundred ns are timed
      std::erase_if(under_way_, [](const auto& r) { return r->request == MPI_REQUEST_NULL; });
    under_way_.push_back(request);
    return Ticket(std::move(request));
  }

  void collective(const Operation& op, const OpSegment& s) {
    const int bytes = count(s.slice_bytes), elems = count(s.slice_bytes / dtype_bytes(op.dtype));
    const bool at_root = op.peer == rank();
    const void* const source = s.source;
    switch (op.kind) {
      case OpKind::ReduceScatter: return reduce_scatter(op, s, elems);
      case OpKind::AllGather:
        return check(MPI_Allgather(MPI_IN_PLACE, 0, MPI_BYTE, s.target, bytes, MPI_BYTE, comm_), "MPI_Allgather");
      case OpKind::AllReduce:
        return check(MPI_Allreduce(MPI_IN_PLACE, s.target, elems, type_of(op.dtype), op_of(op.reduce), comm_),
                     "MPI_Allreduce");
      case OpKind::Reduce:
        return check(MPI_Reduce(at_root ? MPI_IN_PLACE : source, s.target, elems, type_of(op.dtype), op_of(op.reduce),
                                op.peer, comm_),
                     "MPI_Reduce");
      case OpKind::Broadcast: return check(MPI_Bcast(s.target, bytes, MPI_BYTE, op.peer, comm_), "MPI_Bcast");
      case OpKind::AllToAll:
        return check(MPI_Alltoall(s.source == s.target ? MPI_IN_PLACE : source, bytes, MPI_BYTE, s.target, bytes,
                                  MPI_BYTE, comm_),
                     "MPI_Alltoall");
      case OpKind::Gather: {
        const bool in_place = at_root && s.source == s.target + rank() * s.slice_bytes;
        return check(
            MPI_Gather(in_place ? MPI_IN_PLACE : source, bytes, MPI_BYTE, s.target, bytes, MPI_BYTE, op.peer, comm_),
            "MPI_Gather");
      }
      case OpKind::Scatter: {
        const bool in_place = at_root && s.target == s.source + rank() * s.slice_bytes;
        return check(
            MPI_Scatter(source, bytes, MPI_BYTE, in_place ? MPI_IN_PLACE : s.target, bytes, MPI_BYTE, op.peer, comm_),
            "MPI_Scatter");
      }
      default: DS_ASSERT(false);
    }
  }

  // The counts and places of slices, from the one with the lowest address on.
  struct Slices {
    void set(const auto& slices) {
      counts.clear();
      places.clear();
      base = std::ranges::min(slices, {}, [](const auto& s) { return s.data(); }).data();
      for (const auto& s : slices) {
        counts.push_back(count(std::ssize(s)));
        places.push_back(count(s.data() - base));
      }
    }
    const std::byte* base = nullptr;
    std::vector<int> counts, places;
  };
  void all_to_allv(const Operation& op) {
    out_.set(op.out);
    in_.set(op.in);
    check(MPI_Alltoallv(out_.base, out_.counts.data(), out_.places.data(), MPI_BYTE, const_cast<std::byte*>(in_.base),
                        in_.counts.data(), in_.places.data(), MPI_BYTE, comm_),
          "MPI_Alltoallv");
  }

  // Open MPI has no variant whose result replaces this rank's slice of the source.
  void reduce_scatter(const Operation& op, const OpSegment& s, int elems) {
    DS_CHECK(op.dtype == DType::F32 && !op.accumulate, Errc::Config,
             "Open MPI's reduce-scatter supports only F32 without accumulation");
    const std::byte* const end = s.source + size() * s.slice_bytes;
    const bool inside = s.target >= s.source && s.target < end;
    scratch_.resize(inside ? std::max(scratch_.size(), static_cast<size_t>(elems)) : scratch_.size());
    void* const target = inside ? static_cast<void*>(scratch_.data()) : s.target;
    check(MPI_Reduce_scatter_block(s.source, target, elems, MPI_FLOAT, MPI_SUM, comm_), "MPI_Reduce_scatter_block");
    if (inside) std::copy_n(scratch_.data(), elems, reinterpret_cast<float*>(s.target));
  }

  const std::unique_ptr<Communicator> world_;  // keeps MPI initialised
  MPI_Comm comm_ = MPI_COMM_NULL;
  std::vector<float> scratch_;
  Slices out_, in_;  // of an all_to_allv
  std::vector<std::shared_ptr<Request>> under_way_;
};

}  // namespace

std::unique_ptr<Communicator> make_open_mpi_peer(const CommOptions& options) {
  return std::make_unique<OpenMpiPeer>(make_mpi_communicator(options));
}

}  // namespace ds
