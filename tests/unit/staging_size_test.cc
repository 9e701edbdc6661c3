// SPDX-License-Identifier: Apache-2.0
// Memory that a communicator allocates for itself, against the prediction from its calls.

#include "comm/staging_size.h"

#include <gtest/gtest.h>

#include "../comm_exercise.h"
#include "comm/base_communicator.h"
#include "comm/make_communicator.h"

namespace ds {
namespace staging_size_test {

struct Sum {
  i64 elems;
  DType dtype;
  ReduceOp op;
};

// Calls, and the same noted.
void all_reduce(Communicator& comm, LargestCalls& calls, const Sum& sum) {
  std::vector<std::byte> data(static_cast<size_t>(sum.elems * dtype_bytes(sum.dtype)));
  comm.all_reduce(data.data(), sum.elems, sum.dtype, sum.op, "t").wait();
  Operation op{.kind = OpKind::AllReduce, .dtype = sum.dtype, .reduce = sum.op};
  op.segments.push_back({data.data(), data.data(), std::ssize(data)});
  calls.add(op, comm.size());
}

void reduce_scatter(Communicator& comm, LargestCalls& calls, i64 elems, DType wire) {
  std::vector<std::byte> source(static_cast<size_t>(comm.size() * elems * dtype_bytes(wire)));
  std::vector<float> target(static_cast<size_t>(elems));
  const ReduceScatterSegment segment{source.data(), target.data(), elems};
  comm.reduce_scatter({&segment, 1}, wire, false, "t").wait();
  calls.add({.folded_bytes = elems * dtype_bytes(wire)});
}

void expect_predicted(const Communicator& comm, const LargestCalls& calls) {
  EXPECT_EQ(comm.staging_bytes(), staging_size(comm.backend(), comm.size(), calls).value())
      << comm.backend() << " of " << comm.size();
}

class StagingSize : public ::testing::TestWithParam<int> {};

TEST_P(StagingSize, IsWhatWasForetoldAfterEachCall) {
  run_threads(GetParam(), {.timeout_s = 60}, [](Communicator& comm) {
    LargestCalls calls;
    expect_predicted(comm, calls);
    for (const Sum& sum : {Sum{2, DType::I64, ReduceOp::Max}, Sum{1000, DType::F32, ReduceOp::Sum},
                           Sum{70000, DType::F32, ReduceOp::Sum}, Sum{70001, DType::F32, ReduceOp::Max},
                           Sum{333, DType::BF16, ReduceOp::Sum}, Sum{123457, DType::F16, ReduceOp::Sum}}) {
      all_reduce(comm, calls, sum);
      expect_predicted(comm, calls);
    }
    for (const i64 elems : {i64{7}, i64{300000}}) {
      reduce_scatter(comm, calls, elems, DType::BF16);
      expect_predicted(comm, calls);
    }
    test::exercise_all_to_allv(comm, {}, 700000, 1);
    expect_predicted(comm, calls);
    if (comm.size() == 1) return;
    // Around the ring, twice: a channel is one.
    const int next = (comm.rank() + 1) % comm.size(), previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (int i = 0; i < 2; ++i) {
      std::vector<std::byte> out(100), in(100);
      Ticket sent = comm.send(out.data(), std::ssize(out), next, "t");
      comm.recv(in.data(), std::ssize(in), previous, "t").wait();
      sent.wait();
      calls.sent_to.insert(next);
      expect_predicted(comm, calls);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StagingSize, ::testing::Values(1, 2, 3, 5));

TEST(StagingSizeOf, BackendsWithPartsOfTheirOwnIsNotKnown) {
  EXPECT_FALSE(staging_size("shm+mpi", 4, {}));
  EXPECT_FALSE(staging_size("nccl", 4, {}));
  EXPECT_EQ(staging_size("self", 1, {}), 0);
}

}  // namespace staging_size_test
}  // namespace ds
