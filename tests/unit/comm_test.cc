// SPDX-License-Identifier: Apache-2.0
// Communicators within one process: self and threads.

#include "comm/make_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <new>
#include <thread>

#include "../comm_exercise.h"
#include "../counted_new.h"

namespace ds {
namespace comm_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

CommOptions options(double timeout_s = 20, bool progress_thread = true) {
  return {.timeout_s = timeout_s, .progress_thread = progress_thread};
}

// The error of `f`, which must throw one.
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

TEST(CommSelf, PassesTheExercise) {
  auto c = make_self_communicator(options());
  EXPECT_EQ(c->backend(), "self");
  test::exercise(*c);
}

class CommThreads : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(CommThreads, PassTheExercise) {
  const auto [size, progress_thread] = GetParam();
  run_threads(size, options(60, progress_thread),
              [](Communicator& c) { test::exercise(c, c.size() <= 3 ? 70001 : 9001); });
}

INSTANTIATE_TEST_SUITE_P(Sizes, CommThreads, ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Bool()),
                         [](const auto& test) {
                           return fmt::format("{}Ranks{}", std::get<0>(test.param),
                                              std::get<1>(test.param) ? "" : "Inline");
                         });

TEST(Comm, SumsFoldInRankOrder) {
  run_threads(3, options(), [](Communicator& c) {
    const std::array<float, 3> addend = {1e8f, 1.0f, -1e8f};  // any other order gives 1
    for (i64 n : {i64{3}, i64{30000}}) {                      // gathered and folded; reduce-scattered
      std::vector<float> x(static_cast<size_t>(n), addend[c.rank()]);
      c.all_reduce(x.data(), n, DType::F32, ReduceOp::Sum, "t").wait();
      EXPECT_EQ(x.front(), 0.0f);
      EXPECT_EQ(x.back(), 0.0f);
    }
  });
}

// In bf16 256 + 1 is 256: a sum that is rounded on its way stays there.
TEST(Comm, SumsIn16BitsAreRoundedOnce) {
  run_threads(5, options(), [](Communicator& c) {
    for (i64 n : {i64{3}, i64{100003}}) {
      std::vector<bf16> x(static_cast<size_t>(n), to_bf16(c.rank() == 0 ? 256.0f : 1.0f));
      c.all_reduce(x.data(), n, DType::BF16, ReduceOp::Sum, "t").wait();
      EXPECT_EQ(to_float(x.front()), 260.0f);
      EXPECT_EQ(to_float(x.back()), 260.0f);
    }
    u16 y = 1;
    EXPECT_THROW(c.all_reduce(&y, 1, DType::U16, ReduceOp::Max, "t"), Error);
  });
}

TEST(Comm, NanWinsMaxAndMin) {
  run_threads(3, options(), [](Communicator& c) {
    for (ReduceOp op : {ReduceOp::Max, ReduceOp::Min}) {
      for (int bad = 0; bad < 3; ++bad) {
        double x = c.rank() == bad ? std::nan("") : c.rank();
        c.all_reduce(&x, 1, DType::F64, op, "t").wait();
        EXPECT_TRUE(std::isnan(x));
        bf16 y = to_bf16(c.rank() == bad ? std::nanf("") : static_cast<float>(c.rank()));
        c.all_reduce(&y, 1, DType::BF16, op, "t").wait();
        EXPECT_TRUE(std::isnan(to_float(y)));
      }
    }
  });
}

TEST(Comm, CountsWhatTheFormulasSay) {
  run_threads(4, options(), [](Communicator& c) {
    std::vector<float> x(4 * 100), shard(100);
    const ReduceScatterSegment rs{x.data(), shard.data(), 100};
    const AllGatherSegment ag{x.data(), 400};
    c.reduce_scatter({&rs, 1}, DType::F32, false, "dp.reduce_scatter").wait();
    c.reduce_scatter({&rs, 1}, DType::BF16, false, "dp.reduce_scatter").wait();
    c.all_gather({&ag, 1}, "dp.all_gather").wait();
    c.all_reduce(x.data(), 400, DType::F32, ReduceOp::Sum, "dp.all_reduce").wait();
    c.all_reduce(x.data(), 799, DType::BF16, ReduceOp::Sum, "tp.all_reduce").wait();
    c.broadcast(x.data(), 1600, 1, "dp.broadcast").wait();
    std::vector<float> y(400);
    c.all_to_all(x.data(), y.data(), 400, "dp.all_to_all").wait();
    std::vector<AllToAllSlice> out, in;  // 4 (p + q) bytes from p to q
    for (int q = 0; q < 4; ++q) out.push_back({100 * q, 4 * (c.rank() + q)});
    in = out;
    c.all_to_allv(x.data(), out, y.data(), in, "ep.all_to_allv").wait();
    c.reduce(x.data(), 400, DType::F32, ReduceOp::Sum, 2, "dp.reduce").wait();
    c.gather(x.data(), y.data(), 400, 3, "dp.gather").wait();
    c.scatter(x.data(), y.data(), 400, 3, "dp.scatter").wait();
    c.barrier("dp.barrier");
    const auto counts = c.counts();
    EXPECT_EQ(counts.at("dp.reduce_scatter").calls, 2);
    EXPECT_EQ(counts.at("dp.reduce_scatter").bytes, 3 * 400 + 3 * 200);
    EXPECT_EQ(counts.at("dp.all_gather").bytes, 3 * 400);
    EXPECT_EQ(counts.at("dp.all_reduce").bytes, 2 * 3 * 400);
    EXPECT_EQ(counts.at("tp.all_reduce").bytes, 2 * 3 * 2 * 799 / 4);
    EXPECT_EQ(counts.at("dp.broadcast").bytes, c.rank() == 1 ? 3 * 1600 : 0);
    EXPECT_EQ(counts.at("dp.all_to_all").bytes, 3 * 400);
    EXPECT_EQ(counts.at("ep.all_to_allv").bytes, 4 * (4 * c.rank() + 6) - 8 * c.rank());  // without its own
    EXPECT_EQ(counts.at("dp.reduce").bytes, c.rank() == 2 ? 3 * 400 : 1600);
    EXPECT_EQ(counts.at("dp.gather").bytes, c.rank() == 3 ? 0 : 400);
    EXPECT_EQ(counts.at("dp.scatter").bytes, c.rank() == 3 ? 3 * 400 : 0);
    EXPECT_EQ(counts.at("dp.barrier").calls, 1);
    EXPECT_EQ(counts.at("dp.barrier").bytes, 0);
    c.reset_counts();
    EXPECT_TRUE(c.counts().empty());
  });
}

TEST(Comm, ManyTicketsRunInCallOrder) {
  run_threads(3, options(), [](Communicator& c) {
    std::vector<float> x(5000, 1.0f);
    std::vector<Ticket> tickets;
    for (int i = 0; i < 20; ++i) {
      tickets.push_back(c.all_reduce(x.data(), std::ssize(x), DType::F32, ReduceOp::Sum, "t"));
      tickets.push_back(c.broadcast(x.data(), 4, i % 3, "t"));
    }
    tickets.back().wait();
    for (Ticket& t : tickets) EXPECT_TRUE(t.done());
    EXPECT_EQ(x.front(), std::pow(3.0f, 20.0f));
    EXPECT_EQ(x.back(), std::pow(3.0f, 20.0f));
    tickets.front().wait();  // again
  });
}

TEST(Comm, SteadyStateAllocatesNothing) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<float> x(2 * 30000), shard(30000);
    double verdict = 1;
    const std::vector<ReduceScatterSegment> rs = {{x.data(), shard.data(), 100}, {x.data() + 200, shard.data(), 29900}};
    const AllGatherSegment ag{x.data(), 30000 * 4};
    std::vector<float> y(x.size());
    std::vector<AllToAllSlice> slices(2);
    i64 turn = 0;
    const auto step = [&] {
      for (int bucket = 0; bucket < 8; ++bucket) {
        Ticket t = c.reduce_scatter(rs, DType::F32, false, "dp.reduce_scatter");
        c.all_gather({&ag, 1}, "dp.all_gather").wait();
        t.wait();
        slices[0] = {0, 4 * (++turn * 7919 % 20000)};
        slices[1] = {slices[0].bytes, slices[0].bytes};
        c.all_to_allv(x.data(), slices, y.data(), slices, "ep.all_to_allv").wait();
      }
      c.all_reduce(&verdict, 1, DType::F64, ReduceOp::Max, "dp.all_reduce").wait();
      c.barrier("dp.barrier");
    };
    for (int i = 0; i < 5; ++i) step();
    const long before = num_news;
    for (int i = 0; i < 20; ++i) step();
    EXPECT_EQ(num_news - before, 0);
    c.barrier("dp.barrier");
  });
}

TEST(Comm, TicketsOutliveTheirCommunicator) {
  auto communicators = make_thread_communicators(2, options());
  double x = 1, y = 2;
  Ticket a = communicators[0]->all_reduce(&x, 1, DType::F64, ReduceOp::Sum, "t");
  Ticket b = communicators[1]->all_reduce(&y, 1, DType::F64, ReduceOp::Sum, "t");
  communicators.clear();  // works off what is queued
  a.wait();
  b.wait();
  EXPECT_EQ(x, 3);
  EXPECT_EQ(y, 3);
}

// Small messages go in the caller's thread, large ones in the sender's; in the order of the calls all the same.
TEST(Comm, MessagesOfAllSizesKeepTheirOrder) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<Ticket> tickets;
    std::vector<std::vector<i32>> messages;
    for (i32 i = 0; i < 60; ++i) {
      const size_t elems = i % 7 == 3 ? 400'000 : i % 5 == 1 ? 70'001 : static_cast<size_t>(i);
      messages.emplace_back(elems, c.rank() == 0 ? i : -1);
      const i64 bytes = std::ssize(messages.back()) * 4;
      tickets.push_back(c.rank() == 0 ? c.send(messages.back().data(), bytes, 1, "t")
                                      : c.recv(messages.back().data(), bytes, 0, "t"));
    }
    for (Ticket& t : tickets) t.wait();
    for (i32 i = 0; i < 60; ++i) {
      for (const i32 x : messages[i]) ASSERT_EQ(x, i);
    }
  });
}

// Tickets may be lost to an exception; the memory of their operations is freed after this.
TEST(Comm, DrainWaitsForWhatIsUnderWay) {
  std::atomic<bool> came = false;
  run_threads(2, options(), [&](Communicator& c) {
    std::vector<std::byte> message(size_t{32} << 20);
    if (c.rank() == 0) {
      c.send(message.data(), std::ssize(message), 1, "t");
      c.drain();
      EXPECT_TRUE(came);
    } else {
      std::this_thread::sleep_for(100ms);
      came = true;
      c.recv(message.data(), std::ssize(message), 0, "t");
      c.drain();
    }
    c.drain();
  });
}

TEST(CommFailure, MismatchedKindsNameBothCalls) {
  run_threads(3, options(), [](Communicator& c) {
    c.barrier("first");
    std::vector<float> x(64);
    const Error e = error_of([&] {
      if (c.rank() == 2) {
        c.broadcast(x.data(), 16, 0, "odd").wait();
      } else {
        c.all_reduce(x.data(), 64, DType::F32, ReduceOp::Sum, "even").wait();
      }
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 2);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 0 calls all_reduce \"even\" (call 2"),
                                HasSubstr("rank 2 calls broadcast \"odd\" (call 2")));
  });
}

TEST(CommFailure, MismatchedSizesAreAnError) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<float> x(64);
    const std::vector<AllGatherSegment> segments = {{x.data(), c.rank() == 0 ? 8 : 16},
                                                    {x.data() + 32, c.rank() == 0 ? 16 : 8}};
    EXPECT_EQ(error_of([&] { c.all_gather(segments, "t").wait(); }).code(), Errc::Comm);
    EXPECT_EQ(error_of([&] { c.barrier("later"); }).code(), Errc::Comm);
  });
}

TEST(CommFailure, MismatchedMessageLengthIsAnError) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<float> x(64);
    if (c.rank() == 0) {
      c.send(x.data(), 100, 1, "t").wait();
    } else {
      const Error e = error_of([&] { c.recv(x.data(), 96, 0, "t").wait(); });
      EXPECT_EQ(e.rank(), 0);
      EXPECT_THAT(e.what(), HasSubstr("sends 100 bytes where rank 1 receives 96"));
    }
  });
}

// From each rank to each other, and to itself, in staging and in place.
TEST(CommFailure, MismatchedSlicesNameBothRanksAndSizesOnAllRanks) {
  for (const i64 bytes : {i64{40}, i64{300'000}}) {
    for (int from = 0; from < 3; ++from) {
      for (int to = 0; to < 3; ++to) {
        run_threads(3, options(), [&](Communicator& c) {
          c.barrier("first");
          std::vector<std::byte> x(1'000'000), y(x.size());
          std::vector<AllToAllSlice> out(3), in(3);
          for (int q = 0; q < 3; ++q) out[q] = in[q] = {q * bytes, bytes};
          if (c.rank() == to) --in[from].bytes;
          const Error e = error_of([&] { c.all_to_allv(x.data(), out, y.data(), in, "ep.all_to_allv").wait(); });
          EXPECT_EQ(e.code(), Errc::Comm);
          EXPECT_EQ(e.rank(), from);
          EXPECT_EQ(std::string(e.what()),
                    fmt::format("sizes do not match: rank {} sends {} bytes to rank {}, which expects {}, in "
                                "all_to_allv \"ep.all_to_allv\"",
                                from, bytes, to, bytes - 1));
          EXPECT_EQ(error_of([&] { c.barrier("later"); }).code(), Errc::Comm);
        });
      }
    }
  }
}

// Sizes that are only exchanged between pairs, so that sums of sizes agree.
TEST(CommFailure, SlicesInTheWrongOrderAreAMismatch) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<std::byte> x(100), y(100);
    const std::vector<AllToAllSlice> out = {{0, 8}, {8, 16}}, in = {{0, 16}, {16, 8}};
    const Error e = error_of([&] { c.all_to_allv(x.data(), out, y.data(), in, "t").wait(); });
    EXPECT_THAT(e.what(), HasSubstr("rank 0 sends 8 bytes to rank 0, which expects 16"));
  });
}

TEST(CommFailure, AnotherExchangeIsAMismatch) {
  run_threads(2, options(), [](Communicator& c) {
    std::vector<std::byte> x(100), y(100);
    const std::vector<AllToAllSlice> even = {{0, 8}, {8, 8}};
    const Error e = error_of([&] {
      (c.rank() == 0 ? c.all_to_all(x.data(), y.data(), 8, "t") : c.all_to_allv(x.data(), even, y.data(), even, "t"))
          .wait();
    });
    EXPECT_THAT(e.what(), HasSubstr("rank 0 calls all_to_all \"t\" (call 1, 1 segments, 8 bytes per slice, u8), rank 1 "
                                    "calls all_to_allv \"t\" (call 1)"));
  });
}

TEST(CommFailure, AbortReachesPendingAndLaterCalls) {
  run_threads(3, options(), [](Communicator& c) {
    double x = 0;
    if (c.rank() == 1) {
      std::this_thread::sleep_for(50ms);
      c.abort(Error(Errc::Io, "out of cheese"));
    }
    for (int i = 0; i < 2; ++i) {
      const Error e = error_of([&] { c.all_reduce(&x, 1, DType::F64, ReduceOp::Sum, "t").wait(); });
      EXPECT_EQ(e.code(), Errc::Io);
      EXPECT_EQ(e.rank(), 1);
      EXPECT_STREQ(e.what(), "rank 1 gave up: out of cheese");
    }
  });
}

TEST(CommFailure, WhoLooksHearsOfAFailureWithoutACall) {
  auto communicators = make_thread_communicators(2, options());
  communicators[0]->look_for_failures();
  communicators[1]->abort(Error(Errc::Io, "out of cheese"));
  communicators[0]->throw_if_failed();  // it has not been informed
  EXPECT_STREQ(error_of([&] { communicators[0]->look_for_failures(); }).what(), "rank 1 gave up: out of cheese");
  EXPECT_EQ(error_of([&] { communicators[0]->throw_if_failed(); }).rank(), 1);
}

TEST(Comm, RanksSeeWhatPeersShowAndThatTheyLeft) {
  auto communicators = make_thread_communicators(2, options());
  EXPECT_EQ(communicators[0]->shown(1), 0u);
  communicators[1]->show(17);
  EXPECT_EQ(communicators[0]->shown(1), 17u);
  EXPECT_FALSE(communicators[0]->has_left(1));
  communicators[1].reset();
  EXPECT_TRUE(communicators[0]->has_left(1));
  communicators[0]->look_for_failures();  // it left in peace
}

TEST(CommFailure, RunThreadsRethrowsTheFirstError) {
  struct Mine : std::runtime_error {
    using runtime_error::runtime_error;
  };
  for (int i = 0; i < 20; ++i) {
    EXPECT_THROW(run_threads(4, options(),
                             [](Communicator& c) {
                               if (c.rank() == 3) throw Mine("first");
                               for (;;) c.barrier("t");
                             }),
                 Mine);
  }
}

TEST(CommFailure, AnAbsentRankIsATimeoutThatNamesIt) {
  run_threads(3, options(0.2), [](Communicator& c) {
    if (c.rank() == 1) std::this_thread::sleep_for(1s);
    const Error e = error_of([&] { c.barrier("meeting"); });  // throws on the late rank too
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1 did not arrive within 0.2 s"), HasSubstr("is in barrier (call 1)"),
                                HasSubstr("rank 1 is outside any call after 0 calls")));
  });
}

TEST(CommFailure, AChainOfWaitsLeadsToTheRankAtFault) {
  run_threads(3, options(0.3), [](Communicator& c) {
    double x = 0;
    if (c.rank() == 2) return std::this_thread::sleep_for(1s);
    const Error e = error_of([&] {
      if (c.rank() == 1) {
        std::this_thread::sleep_for(50ms);  // so that rank 0 is the first whose time is up
        c.recv(&x, 8, 2, "from the absent").wait();
      }
      c.broadcast(&x, 8, 1, "t").wait();
    });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 2);
  });
}

TEST(CommFailure, ARankThatLeftIsNotWaitedFor) {
  run_threads(2, options(), [](Communicator& c) {
    c.barrier("t");
    if (c.rank() == 1) return;
    const auto start = std::chrono::steady_clock::now();
    const Error e = error_of([&] { c.barrier("t"); });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), HasSubstr("rank 1 has left"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  });
}

TEST(CommFailure, UnwindingPastACommunicatorTellsThePeers) {
  auto communicators = make_thread_communicators(2, options());
  std::jthread peer([&] {
    const Error e = error_of([&] { communicators[0]->barrier("t"); });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 1);
  });
  try {
    const auto mine = std::move(communicators[1]);
    throw std::runtime_error("the caller's own error");
  } catch (const std::runtime_error&) {
  }
}

TEST(CommFailure, DirectReadersLeaveBeforeTheOwnerIsTold) {
  // Aborts at random moments of large exchanges; the owner frees its buffer at once. The address sanitizer watches.
  for (int i = 0; i < 20; ++i) {
    auto communicators = make_thread_communicators(2, options());
    std::vector<std::jthread> threads;
    for (auto& c : communicators) {
      threads.emplace_back([&, i] {
        try {
          for (;;) {
            std::vector<float> x(400000), shard(200000);
            const ReduceScatterSegment s{x.data(), shard.data(), 200000};
            c->reduce_scatter({&s, 1}, DType::F32, false, "t").wait();
            const std::vector<AllToAllSlice> halves = {{0, 400000}, {400000, 400000}};
            std::vector<float> sent(200000), received(200000);
            c->all_to_allv(sent.data(), halves, received.data(), halves, "t").wait();
          }
        } catch (const Error& e) {
          EXPECT_EQ(e.rank(), i % 2);
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 * i));
    communicators[i % 2]->abort(Error(Errc::Comm, "now"));
  }
}

}  // namespace comm_test
}  // namespace ds
