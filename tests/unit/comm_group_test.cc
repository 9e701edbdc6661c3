// SPDX-License-Identifier: Apache-2.0
// Groups of a communicator, over threads: their results, the end that they share with their world, and that every error
// names ranks of the world.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

#include "../comm_exercise.h"
#include "comm/make_communicator.h"

namespace ds {
namespace comm_group_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Ranks = std::vector<int>;

CommOptions options(double timeout_s = 20, bool progress_thread = true) {
  return {.timeout_s = timeout_s, .progress_thread = progress_thread};
}

template <class F>
Error error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(Errc::Internal, "");
}

// A world of rows x columns ranks; rank = row * columns + column.
struct Grid {
  Grid(Communicator& world, int rows, int columns, const CommOptions& row_options, const CommOptions& column_options) {
    Ranks in_row, in_column;
    for (int c = 0; c < columns; ++c) in_row.push_back(world.rank() / columns * columns + c);
    for (int r = 0; r < rows; ++r) in_column.push_back(r * columns + world.rank() % columns);
    row = world.group(in_row, "row", row_options);
    column = world.group(in_column, "column", column_options);
  }
  std::unique_ptr<Communicator> row, column;
};

void barrier_of(Communicator& c) { c.barrier("t"); }

class CommGroups : public ::testing::TestWithParam<bool> {};

TEST_P(CommGroups, RowsAndColumnsPassTheExerciseAtOnce) {
  run_threads(6, options(60), [&](Communicator& world) {
    const Grid grid(world, 2, 3, options(60, GetParam()), options(60, GetParam()));
    EXPECT_EQ(grid.row->size(), 3);
    EXPECT_EQ(grid.column->size(), 2);
    EXPECT_EQ(grid.row->rank(), world.rank() % 3);
    EXPECT_EQ(grid.column->rank(), world.rank() / 3);
    for (int q = 0; q < 3; ++q) EXPECT_EQ(grid.row->world_rank(q), world.rank() / 3 * 3 + q);
    std::jthread other([&] { test::exercise(*grid.row, 3001, 1000 * (1 + world.rank() / 3)); });
    test::exercise(*grid.column, 3001, 100000 * (1 + world.rank() % 3));
    other.join();
    test::exercise(world, 3001);
  });
}

INSTANTIATE_TEST_SUITE_P(Progress, CommGroups, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "Threads" : "Inline"; });

TEST(CommGroup, RanksAreInTheOrderGiven) {
  run_threads(4, options(), [](Communicator& world) {
    if (world.rank() == 0) return;
    const auto c = world.group(Ranks{3, 1, 2}, "turned", options());
    const std::array<int, 4> expected = {-1, 1, 2, 0};
    EXPECT_EQ(c->rank(), expected[world.rank()]);
    EXPECT_EQ(c->world_rank(0), 3);
    const std::array<float, 3> addend = {1e8f, 1.0f, -1e8f};  // any other order gives 1
    float x = addend[c->rank()];
    c->all_reduce(&x, 1, DType::F32, ReduceOp::Sum, "t").wait();
    EXPECT_EQ(x, 0.0f);
  });
}

TEST(CommGroup, GroupsOfGroupsNameRanksOfTheWorld) {
  run_threads(5, options(), [](Communicator& world) {
    if (world.rank() == 0) return;
    const auto c = world.group(Ranks{4, 3, 2, 1}, "outer", options());
    const auto inner = c->group(c->rank() < 2 ? Ranks{0, 1} : Ranks{3, 2}, "inner", options());
    EXPECT_EQ(inner->world_rank(0), world.rank() >= 3 ? 4 : 1);
    EXPECT_EQ(inner->world_rank(1), world.rank() >= 3 ? 3 : 2);
    i64 sum = world.rank();
    inner->all_reduce(&sum, 1, DType::I64, ReduceOp::Sum, "t").wait();
    EXPECT_EQ(sum, world.rank() >= 3 ? 7 : 3);
  });
}

TEST(CommGroup, OfOneRankWorksAndSharesTheFate) {
  run_threads(2, options(), [](Communicator& world) {
    const auto alone = world.group(Ranks{world.rank()}, "alone", options());
    EXPECT_EQ(alone->size(), 1);
    EXPECT_EQ(alone->rank(), 0);
    EXPECT_EQ(alone->world_rank(0), world.rank());
    EXPECT_EQ(alone->backend(), "self");
    test::exercise(*alone, 5001);
    world.barrier("t");
    if (world.rank() == 1) {
      alone->abort(Error(Errc::Io, "out of cheese"));
    } else {
      EXPECT_STREQ(error_of([&] { world.barrier("t"); }).what(), "rank 1 gave up: out of cheese");
    }
    for (int i = 0; i < 2; ++i) {
      const Error e = error_of([&] { alone->barrier("t"); });
      EXPECT_EQ(e.code(), Errc::Io);
      EXPECT_EQ(e.rank(), 1);
    }
  });
}

TEST(CommGroup, CountsAreItsOwn) {
  run_threads(4, options(), [](Communicator& world) {
    const Grid grid(world, 2, 2, options(), options());
    i64 x = 0;
    for (int i = 0; i < 3; ++i) grid.row->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
    world.broadcast(&x, 8, 0, "t").wait();
    EXPECT_EQ(grid.row->counts().at("t").calls, 3);
    EXPECT_EQ(grid.row->counts().at("t").bytes, 3 * 8);
    EXPECT_TRUE(grid.column->counts().empty());
    EXPECT_EQ(world.counts().at("t").calls, 1);
  });
}

TEST(CommGroup, NamesServeAgain) {
  run_threads(3, options(), [](Communicator& world) {
    for (int i = 0; i < 20; ++i) {
      const auto c = world.group(Ranks{0, 1, 2}, "again", options());
      i64 x = i;
      c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
      EXPECT_EQ(x, 3 * i);
    }
  });
}

TEST(CommGroup, MayLeaveInAnyOrderAndInPeace) {
  run_threads(4, options(), [](Communicator& world) {
    Grid grid(world, 2, 2, options(), options());
    barrier_of(*grid.row);
    (world.rank() % 2 == 0 ? grid.row : grid.column).reset();
    std::this_thread::sleep_for(world.rank() * 20ms);
    (world.rank() % 2 == 0 ? grid.column : grid.row).reset();
    world.barrier("t");  // others may have left groups, and none of it is a failure
    world.look_for_failures();
    if (world.rank() == 3) return;  // left the world, which the others' groups do without
    const auto rest = world.group(Ranks{0, 1, 2}, "rest", options());
    std::this_thread::sleep_for(50ms);
    test::exercise_broadcast(*rest, 1000, 1, 3);
  });
}

TEST(CommGroupFailure, ARankThatLeftAGroupIsNotWaitedForThere) {
  run_threads(4, options(), [](Communicator& world) {
    auto c = world.group(world.rank() < 2 ? Ranks{0, 1} : Ranks{2, 3}, "pair", options());
    const Error e = error_of([&] {
      world.barrier("t");  // all have their groups; from here on the failure may come at any time
      barrier_of(*c);
      if (world.rank() == 3) c.reset();
      world.rank() == 2 ? barrier_of(*c) : barrier_of(world);
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 3);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 3 has left while rank 2 is in barrier"), HasSubstr("\"pair\"")));
  });
}

// 0 waits for 2, 2 for 3, 1 for 0, each elsewhere, and 4 and 5 for each other: none of them for the one that fails, but
// rank 2.
TEST(CommGroupFailure, AnAbortEndsTheWaitsOfAllInOtherGroups) {
  run_threads(6, options(), [](Communicator& world) {
    const Grid grid(world, 3, 2, options(), options());
    world.barrier("t");
    std::array<Communicator*, 6> waits_in = {grid.column.get(), grid.row.get(), grid.row.get(),
                                             grid.column.get(), grid.row.get(), nullptr};
    const auto start = std::chrono::steady_clock::now();
    const Error e = error_of([&] {
      if (world.rank() == 3) {
        std::this_thread::sleep_for(50ms);
        grid.column->abort(Error(Errc::Io, "out of cheese"));
      }
      i64 x = 0;
      if (world.rank() == 5) grid.row->recv(&x, 8, 0, "from 4").wait();
      waits_in[world.rank()]->barrier("t");
    });
    EXPECT_EQ(e.code(), Errc::Io);
    EXPECT_EQ(e.rank(), 3);
    EXPECT_STREQ(e.what(), "rank 3 gave up: out of cheese");
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    for (Communicator* c : {grid.row.get(), grid.column.get(), &world})
      EXPECT_EQ(error_of([&] { barrier_of(*c); }).rank(), 3);
    EXPECT_THROW(world.group(Ranks{world.rank()}, "late", options()), Error);
  });
}

TEST(CommGroupFailure, AnErrorElsewhereIsSeenWithoutACall) {
  auto worlds = make_thread_communicators(3, options());
  std::unique_ptr<Communicator> group;
  {
    std::jthread peer([&] { worlds[1]->group(Ranks{0, 1}, "pair", options()); });
    group = worlds[0]->group(Ranks{0, 1}, "pair", options());
  }
  group->look_for_failures();
  worlds[2]->abort(Error(Errc::Io, "out of cheese"));
  group->throw_if_failed();  // it has not been informed
  EXPECT_EQ(error_of([&] { group->look_for_failures(); }).rank(), 2);
  EXPECT_EQ(error_of([&] { worlds[0]->throw_if_failed(); }).rank(), 2);
}

TEST(CommGroupFailure, AMismatchNamesRanksOfTheWorldAndEndsAll) {
  run_threads(5, options(), [](Communicator& world) {
    const bool in = world.rank() >= 2;
    const auto c = in ? world.group(Ranks{4, 2, 3}, "tp", options()) : nullptr;
    const Error e = error_of([&] {
      i64 x = 0;
      if (world.rank() == 3) c->broadcast(&x, 8, 1, "odd").wait();
      if (in) c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "even").wait();
      world.barrier("t");
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 3);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("of group \"tp\": rank 4 calls all_reduce \"even\""),
                                HasSubstr("rank 3 calls broadcast \"odd\" (call 1"), HasSubstr("root 2")));
  });
}

TEST(CommGroupFailure, AMessageOfOtherLengthNamesRanksOfTheWorld) {
  run_threads(4, options(), [](Communicator& world) {
    if (world.rank() < 2) return;
    const auto c = world.group(Ranks{3, 2}, "pp", options());
    std::array<i64, 2> x{};
    if (world.rank() == 3) return c->send(x.data(), 16, 1, "t").wait();
    const Error e = error_of([&] { c->recv(x.data(), 8, 0, "t").wait(); });
    EXPECT_EQ(e.rank(), 3);
    EXPECT_THAT(e.what(), HasSubstr("rank 3 sends 16 bytes where rank 2 receives 8"));
  });
}

TEST(CommGroupFailure, AnAbsentRankIsNamedByItsNumberInTheWorld) {
  run_threads(6, options(20), [](Communicator& world) {
    const bool in = world.rank() % 2 == 1;
    const auto c = in ? world.group(Ranks{1, 3, 5}, "tp", options(0.6)) : nullptr;
    world.barrier("t");
    if (world.rank() == 5) std::this_thread::sleep_for(1500ms);
    const Error e = error_of([&] { (in ? *c : world).barrier("t"); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 5);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 5 did not arrive within 0.6 s"),
                                HasSubstr("is in barrier (call 1) of group \"tp\""),
                                HasSubstr("rank 5 is outside any call after 0 calls of group \"tp\"")));
  });
}

// Rank 0 waits for 1 in a row, which waits for 3 in a column, and its time is up first.
TEST(CommGroupFailure, AChainOfWaitsLeadsThroughGroups) {
  run_threads(4, options(20), [](Communicator& world) {
    const Grid grid(world, 2, 2, options(1), options(20, false));
    world.barrier("t");
    if (world.rank() == 3) std::this_thread::sleep_for(2s);
    const Error e = error_of([&] { (world.rank() == 0 ? grid.row : grid.column)->barrier("t"); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 3);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 3 did not arrive within 1 s: rank 0 is in barrier"),
                                HasSubstr("rank 1 waits for rank 3")));
  });
}

// A receive that was posted ahead is no reason not to come to another group.
TEST(CommGroupFailure, AReceivePostedAheadMovesNoBlame) {
  run_threads(4, options(20), [](Communicator& world) {
    const Grid grid(world, 2, 2, options(0.4), options(20));
    world.barrier("t");
    i64 x = 0;
    Ticket ahead;
    if (world.rank() == 1) ahead = grid.column->recv(&x, 8, 1, "from 3");
    if (world.rank() == 1) std::this_thread::sleep_for(1500ms);
    const Error e = error_of([&] { (world.rank() < 2 ? *grid.row : world).barrier("t"); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 1);
    if (world.rank() == 1) {
      EXPECT_EQ(error_of([&] { ahead.wait(); }).rank(), 1);
    }
  });
}

TEST(CommGroupFailure, AMemberThatDoesNotMakeTheGroupIsNamed) {
  run_threads(4, options(20), [](Communicator& world) {
    world.barrier("t");
    const Error e = error_of([&] {
      if (world.rank() == 3) std::this_thread::sleep_for(1500ms);
      if (world.rank() == 0) world.barrier("t");
      world.group(Ranks{1, 2, 3}, "tp", options(0.6));
    });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 3);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 3 did not arrive within 0.6 s"), HasSubstr("is in attach"),
                                HasSubstr("of group \"tp\"")));
  });
}

TEST(CommGroupFailure, WhoFailsWhileOthersMakeAGroupEndsThat) {
  run_threads(3, options(20), [](Communicator& world) {
    if (world.rank() == 2) {
      std::this_thread::sleep_for(50ms);
      world.abort(Error(Errc::Io, "out of cheese"));
    } else if (world.rank() == 1) {
      EXPECT_EQ(error_of([&] { world.group(Ranks{0, 1, 2}, "tp", options()); }).rank(), 2);
    } else {
      EXPECT_EQ(error_of([&] { world.group(Ranks{0, 2}, "other", options()); }).rank(), 2);
    }
  });
}

TEST(CommGroupFailure, UnwindingPastAGroupTellsTheWorld) {
  struct Mine : std::runtime_error {
    using runtime_error::runtime_error;
  };
  for (int i = 0; i < 20; ++i) {
    EXPECT_THROW(run_threads(4, options(),
                             [](Communicator& world) {
                               const Grid grid(world, 2, 2, options(), options());
                               if (world.rank() == 3) throw Mine("first");
                               for (;;) (world.rank() == 0 ? world : *grid.row).barrier("t");
                             }),
                 Mine);
  }
}

TEST(CommGroupFailure, MistakesOfTheCallerAreErrors) {
  const auto world = make_self_communicator(options());
  for (const Ranks& bad : {Ranks{}, Ranks{1}, Ranks{-1}, Ranks{0, 0}})
    EXPECT_THROW(world->group(bad, "bad", options()), Error);
  for (const char* bad : {"", "a/b", "a.b", "a name that has more than 32 letters"})
    EXPECT_THROW(world->group(Ranks{0}, bad, options()), Error);
  const auto device = make_cpu_device(*cpu_ops(), 1);
  const auto over_device = make_device_self_communicator(*world, {.device = device.get()});
  EXPECT_THAT(error_of([&] { over_device->group(Ranks{0}, "g", options()); }).what(),
              HasSubstr("create the device communicator"));
}

// Aborts at random moments of large exchanges in one group; the members of the other free their buffers at once. The
// address sanitizer watches.
TEST(CommGroupFailure, DirectReadersLeaveBeforeTheOwnerIsTold) {
  for (int i = 0; i < 20; ++i) {
    auto worlds = make_thread_communicators(4, options());
    std::atomic<int> ready{0};
    std::vector<std::jthread> threads;
    for (auto& world : worlds) {
      threads.emplace_back([&, i] {
        const auto c = world->group(world->rank() < 2 ? Ranks{0, 1} : Ranks{2, 3}, "pair", options());
        try {
          ++ready;
          for (;;) {
            std::vector<float> x(400000), shard(200000);
            const ReduceScatterSegment s{x.data(), shard.data(), 200000};
            c->reduce_scatter({&s, 1}, DType::F32, false, "t").wait();
          }
        } catch (const Error& e) {
          EXPECT_EQ(e.rank(), i % 4);
        }
      });
    }
    while (ready < 4) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(500 * i));
    worlds[i % 4]->abort(Error(Errc::Comm, "now"));
  }
}

}  // namespace comm_group_test
}  // namespace ds
