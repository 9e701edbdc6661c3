// SPDX-License-Identifier: Apache-2.0
// shm+mpi, its nodes and its network made of threads: the same bits as all others, groups of every shape, and errors
// that reach all nodes and name the rank.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "../comm_exercise.h"
#include "../slow_set.h"
#include "comm/make_communicator.h"

namespace ds {
namespace comm_composed_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Ranks = std::vector<int>;

CommOptions options(double timeout_s = 60, bool progress_thread = true) {
  return {.timeout_s = timeout_s, .progress_thread = progress_thread};
}

struct Layout {
  int nodes, local_size;
};

class Composed : public ::testing::TestWithParam<Layout> {};

TEST_P(Composed, PassesTheExercise) {
  const auto [nodes, local_size] = GetParam();
  for (bool progress_thread : {true, false}) {
    run_composed_threads(nodes, local_size, options(60, progress_thread), [&](Communicator& c) {
      EXPECT_EQ(c.size(), nodes * local_size);
      EXPECT_EQ(c.backend(), "shm+mpi");
      test::exercise(c, 3001);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Composed,
                         test::values_of<Layout>({{1, 1}, {2, 1}, {2, 2}, {2, 3}}, {{1, 3}, {3, 2}, {4, 2}}),
                         [](const auto& p) { return fmt::format("{}x{}", p.param.nodes, p.param.local_size); });

// Sums of fp32 along the chain of nodes, and where there are enough ranks on a node those of bf16 too.
TEST(ComposedComm, SumsGoAlongTheChain) {
  for (const auto& [nodes, local_size] : {Layout{3, 2}, Layout{4, 3}}) {
    run_composed_threads(nodes, local_size, options(), [](Communicator& c) {
      for (bool accumulate : {false, true}) {
        test::exercise_reduce_scatter(c, {}, {200'001, 5, 0, 70'000}, DType::F32, accumulate, false, 1);
        test::exercise_reduce_scatter(c, {}, {200'001, 5, 0, 70'000}, DType::BF16, accumulate, false, 2);
      }
      test::exercise_reduce_scatter(c, {}, {200'001}, DType::F32, false, true, 3);
      test::exercise_reduction<float>(c, 700'001, ReduceOp::Sum, -1, 4);
      test::exercise_reduction<bf16>(c, 700'001, ReduceOp::Sum, -1, 5);
    });
  }
}

// More than a round of every algorithm, in segments that rounds cut.
TEST(ComposedComm, LargeOperationsGoInRounds) {
  run_composed_threads(2, 2, options(), [](Communicator& c) {
    MemoryLedger ledger;
    const Buffer buffer = c.allocate(ledger, Tag::Buckets, i64{4} * 4 * 1'500'000);
    for (auto memory : {buffer.as<std::byte>(), std::span<std::byte>()}) {
      for (bool accumulate : {false, true}) {
        test::exercise_reduce_scatter(c, memory, {900'001, 5, 0, 400'000}, DType::F32, accumulate, false, 1);
        test::exercise_reduce_scatter(c, memory, {900'001, 5, 0, 400'000}, DType::BF16, accumulate, false, 2);
      }
      test::exercise_reduce_scatter(c, memory, {1'300'001}, DType::F32, false, true, 3);
      test::exercise_all_gather(c, memory, {900'001, 5, 0, 400'000}, 4);
    }
    test::exercise_reduction<float>(c, 3'000'001, ReduceOp::Sum, -1, 5);
    test::exercise_reduction<bf16>(c, 3'000'001, ReduceOp::Sum, -1, 6);
    test::exercise_reduction<bf16>(c, 9'000'001, ReduceOp::Sum, 3, 7);
    for (int root : {0, 3}) {
      test::exercise_broadcast(c, 9'000'001, root, 8);
      test::exercise_gather_and_scatter(c, 5'000'001, root, 9);
    }
    test::exercise_all_to_all(c, 1'500'001, 10);
    test::exercise_all_to_allv(c, {}, 3'000'001, 12);
    test::exercise_ring(c, 1'000'001, 11);
    EXPECT_LE(c.staging_bytes(), i64{64} << 20);
  });
}

TEST(ComposedComm, GroupsAreOfTheKindThatTheirRanksAllow) {
  run_composed_threads(3, 4, options(), [](Communicator& world) {
    const int rank = world.rank(), node = rank / 4, local = rank % 4;
    const auto row = world.group(Ranks{node * 4, node * 4 + 1, node * 4 + 2, node * 4 + 3}, "row", options());
    EXPECT_EQ(row->backend(), "threads");  // inside a node
    const auto column = world.group(Ranks{local, local + 4, local + 8}, "column", options());
    EXPECT_EQ(column->backend(), "threads");  // the network
    const int half = local / 2 * 2;
    const auto block = world.group(Ranks{half, half + 1, half + 4, half + 5, half + 8, half + 9}, "block", options());
    EXPECT_EQ(block->backend(), "shm+mpi");
    for (int q = 0; q < block->size(); ++q) EXPECT_EQ(block->world_rank(q), q / 2 * 4 + half + q % 2);
    test::exercise(*row, 3001, 1000 * node);
    test::exercise(*column, 3001, 1000 * local);
    test::exercise(*block, 3001, 1000 * half);
    if (rank < 7) {
      const auto uneven = world.group(Ranks{6, 5, 4, 3, 2, 1, 0}, "uneven", options());
      EXPECT_EQ(uneven->backend(), "threads");
      test::exercise(*uneven, 3001);
    }
    world.barrier("end");
  });
}

// The messages of the errors that the ranks' bodies threw.
std::vector<std::string> messages_of(int nodes, int local_size, double timeout_s,
                                     const std::function<void(Communicator&)>& body) {
  std::vector<std::string> messages(static_cast<size_t>(nodes * local_size));
  try {
    run_composed_threads(nodes, local_size, options(timeout_s), [&](Communicator& c) {
      c.barrier("all are there");
      try {
        body(c);
      } catch (const Error& e) {
        messages[c.rank()] = fmt::format("{} [{}]", e.what(), e.rank());
        throw;
      }
    });
  } catch (const Error&) {
  }
  return messages;
}

TEST(ComposedComm, AMismatchIsReportedOnAllNodes) {
  for (int odd : {0, 1, 2, 3}) {
    const auto messages = messages_of(2, 2, 20, [&](Communicator& c) {
      std::vector<float> x(4000);
      c.barrier("before");
      if (c.rank() == odd) {
        c.broadcast(x.data(), 400, 0, "odd").wait();
      } else {
        c.all_to_all(x.data(), x.data() + 2000, 400, "even").wait();
      }
    });
    for (const std::string& m : messages)
      EXPECT_THAT(m, AllOf(HasSubstr("calls do not match"), HasSubstr("broadcast \"odd\""), HasSubstr("all_to_all")));
  }
  // Whole nodes that differ.
  for (const std::string& m : messages_of(2, 2, 20, [](Communicator& c) {
         float x = 0;
         c.all_reduce(&x, 1, DType::F32, c.rank() < 2 ? ReduceOp::Max : ReduceOp::Sum, "t").wait();
       }))
    EXPECT_THAT(m, HasSubstr("calls do not match"));
}

// Within a node and between nodes.
TEST(ComposedComm, MismatchedSlicesNameBothRanksAndSizesOnAllNodes) {
  for (const auto& [from, to] : {std::pair{1, 0}, {0, 3}, {2, 2}}) {
    const auto messages = messages_of(2, 2, 20, [&](Communicator& c) {
      std::vector<std::byte> x(4000), y(4000);
      std::vector<AllToAllSlice> out(4), in(4);
      for (int q = 0; q < 4; ++q) out[q] = in[q] = {q * 1000, 600};
      if (c.rank() == to) in[from].bytes = 500;
      c.all_to_allv(x.data(), out, y.data(), in, "t").wait();
    });
    for (const std::string& m : messages)
      EXPECT_EQ(m, fmt::format("sizes do not match: rank {} sends 600 bytes to rank {}, which expects 500, in "
                               "all_to_allv \"t\" [{}]",
                               from, to, from));
  }
}

// Nobody's neighbour calls what it calls.
TEST(ComposedComm, AMismatchThatGoesInACircleIsReportedToo) {
  for (const std::string& m : messages_of(2, 2, 20, [](Communicator& c) {
         std::array<float, 8> x{}, y{};
         if (c.rank() == 0 || c.rank() == 3) {
           c.all_to_all(x.data(), y.data(), 8, "t").wait();
         } else {
           const AllGatherSegment s{x.data(), 8};
           c.all_gather({&s, 1}, "t").wait();
         }
       }))
    EXPECT_THAT(m, HasSubstr("calls do not match"));
}

TEST(ComposedComm, AFoldThatContinuesIsAnotherCall) {
  for (const std::string& m : messages_of(2, 2, 20, [](Communicator& c) {
         std::vector<float> x(400);
         const ReduceScatterSegment s{x.data(), x.data() + 100 * c.rank(), 100};
         c.reduce_scatter({&s, 1}, DType::F32, c.rank() >= 2, "t").wait();
       }))
    EXPECT_THAT(m, AllOf(HasSubstr("calls do not match"), HasSubstr("accumulating")));
}

TEST(ComposedComm, WhoeverFailsIsNamedOnAllNodes) {
  for (int bad : {0, 3}) {
    for (const std::string& m : messages_of(2, 2, 20, [&](Communicator& c) {
           c.barrier("t");
           if (c.rank() == bad) throw Error(Errc::Io, "disk on fire");
           c.barrier("t");
         }))
      EXPECT_THAT(m, HasSubstr("disk on fire"));
  }
}

TEST(ComposedComm, AnAbsentRankIsNamedOnAllNodes) {
  for (int absent : {0, 1, 2, 3}) {
    const auto messages = messages_of(2, 2, 1, [&](Communicator& c) {
      std::vector<float> x(4 * 1'000'000);
      c.barrier("t");
      if (c.rank() == absent) std::this_thread::sleep_for(2500ms);
      const ReduceScatterSegment s{x.data(), x.data() + c.rank() * 1'000'000, 1'000'000};
      c.reduce_scatter({&s, 1}, DType::F32, false, "t").wait();
    });
    for (const std::string& m : messages)
      EXPECT_THAT(m, AllOf(HasSubstr(fmt::format("rank {} did not arrive within", absent)),
                           HasSubstr(fmt::format("[{}]", absent))));
  }
}

// In its node, and on the way to others.
TEST(ComposedComm, ARankThatIsAbsentFromAnUnevenExchangeIsNamedOnAllNodes) {
  for (int absent : {0, 3}) {
    const auto messages = messages_of(2, 2, 1, [&](Communicator& c) {
      std::vector<std::byte> x(4'000'000), y(x.size());
      std::vector<AllToAllSlice> slices(4);
      for (int q = 0; q < 4; ++q) slices[q] = {q * 1'000'000, 100'000 * (c.rank() + q)};
      for (int i = 0; i < 3; ++i) {
        if (i == 2 && c.rank() == absent) std::this_thread::sleep_for(2500ms);
        c.all_to_allv(x.data(), slices, y.data(), slices, "t").wait();
      }
    });
    for (const std::string& m : messages)
      EXPECT_THAT(m, AllOf(HasSubstr(fmt::format("rank {} did not arrive within", absent)),
                           HasSubstr(fmt::format("[{}]", absent))));
  }
}

// In the third of large operations that follow each other.
TEST(ComposedComm, ARankThatStaysAwayLaterIsNamedOnAllNodes) {
  for (int slow : {1, 2}) {
    const auto messages = messages_of(2, 2, 1, [&](Communicator& c) {
      std::vector<float> x(4 * 3'000'000);
      c.barrier("t");
      for (int i = 0; i < 3; ++i) {
        if (i == 2 && c.rank() == slow) std::this_thread::sleep_for(3500ms);
        const AllGatherSegment s{x.data(), 12'000'000};
        c.all_gather({&s, 1}, "t").wait();
      }
    });
    for (const std::string& m : messages) EXPECT_THAT(m, HasSubstr(fmt::format("rank {} did not arrive within", slow)));
  }
}

}  // namespace comm_composed_test
}  // namespace ds
