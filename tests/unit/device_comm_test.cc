// SPDX-License-Identifier: Apache-2.0
// Communicators over device memory, on CPU devices: self, staged over threads, and nccl over threads with a library of
// ours in NCCL's place (tests/nccl_threads), without links and with links between neighbours.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <new>
#include <optional>
#include <thread>

#include "../comm_exercise.h"
#include "../nccl_threads/queued_device.h"
#include "../slow_set.h"
#include "comm/make_communicator.h"

// Counts what a step must not do, on threads that ask for it, outside the stand-in for NCCL. Out of line, or GCC sees
// through one half of a pair and warns.
static thread_local bool counting = false;
static std::atomic<bool (*)()> inside_nccl{nullptr};
static std::atomic<long> num_news{0};
[[gnu::noinline]] void* operator new(std::size_t n) {
  if (counting && !(inside_nccl != nullptr && inside_nccl.load()())) ++num_news;
  if (void* p = std::malloc(n)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace ds {
namespace device_comm_test {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

enum Fault : int { kNone, kNeverComes, kAsyncError, kNeverConnects, kAbortHangs };

void use_test_nccl() { setenv("DS_NCCL_LIBRARY", DS_TEST_NCCL, 1); }

template <class F>
F of_test_nccl(const char* name) {
  void* library = dlopen(DS_TEST_NCCL, RTLD_NOW);
  EXPECT_NE(library, nullptr) << dlerror();
  return reinterpret_cast<F>(dlsym(library, name));
}

// While it lives, one rank of the stand-in is broken.
class Broken {
 public:
  Broken(int rank, Fault fault) { set(rank, fault); }
  ~Broken() { set(-1, kNone); }

 private:
  static void set(int rank, Fault fault) { of_test_nccl<void (*)(int, int)>("ds_test_nccl_fault")(rank, fault); }
};

// "links": nccl with links both ways around the ring.
std::unique_ptr<Communicator> make(std::string_view backend, Communicator& world, CommOptions options) {
  if (backend == "staged") return make_staged_communicator(world, options);
  use_test_nccl();
  if (backend == "links") {
    options.links = ring_links(world.size(), 1);
    for (const MessageLink& link : ring_links(world.size(), -1)) {
      if (world.size() > 2) options.links.push_back(link);
    }
  }
  auto c = make_nccl_communicator(world, options);
  c->use_links();
  return c;
}

std::unique_ptr<Device> make_device(std::string_view backend) {
  auto cpu = make_cpu_device(*cpu_ops(), 1);
  if (backend == "links") return std::make_unique<test::QueuedDevice>(std::move(cpu));
  return cpu;
}

// body(communicator over a device's memory, its world) on `size` threads.
void run_ranks(std::string_view backend, int size, double timeout_s,
               const std::function<void(Communicator&, Communicator& world)>& body) {
  run_threads(size, {.timeout_s = timeout_s}, [&](Communicator& world) {
    const std::unique_ptr<Device> device = make_device(backend);
    const auto c = make(backend, world, {.timeout_s = timeout_s, .device = device.get()});
    body(*c, world);
  });
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

TEST(DeviceComm, SelfPassesTheExercise) {
  const auto device = make_cpu_device(*cpu_ops(), 1);
  const auto c = make_device_self_communicator({.device = device.get()});
  EXPECT_EQ(c->backend(), "self");
  EXPECT_EQ(c->staging_bytes(), 0);
  test::exercise(*c, 30001);
  c->abort(Error(Errc::Io, "enough"));
  const Error e = error_of([&] { c->barrier("t"); });
  EXPECT_EQ(e.code(), Errc::Io);
  EXPECT_STREQ(e.what(), "rank 0 gave up: enough");
}

TEST(DeviceComm, SelfComparesSizes) {
  const auto device = make_cpu_device(*cpu_ops(), 1);
  const auto c = make_device_self_communicator({.device = device.get()});
  std::array<std::byte, 8> x{}, y{};
  const AllToAllSlice out{0, 8}, in{0, 4};
  const Error e = error_of([&] { c->all_to_allv(x.data(), {&out, 1}, y.data(), {&in, 1}, "t"); });
  EXPECT_EQ(e.code(), Errc::Comm);
  EXPECT_THAT(e.what(), HasSubstr("rank 0 sends 8 bytes to rank 0, which expects 4"));
  EXPECT_EQ(error_of([&] { c->barrier("t"); }).code(), Errc::Comm);
}

class DeviceComms : public ::testing::TestWithParam<std::tuple<const char*, int>> {
 protected:
  std::string_view backend() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};

TEST_P(DeviceComms, PassTheExercise) {
  run_ranks(backend(), ranks(), 60, [&](Communicator& c, Communicator&) {
    EXPECT_EQ(c.backend(), backend() == "links" ? "nccl" : backend());
    test::exercise(c, c.size() <= 3 ? 70001 : 9001);
  });
}

TEST_P(DeviceComms, CountWhatAHostCommunicatorCounts) {
  const auto program = [](Communicator& c) {
    const int P = c.size();
    std::vector<float> x(static_cast<size_t>(P * 100)), y(x.size()), shard(100);
    MemoryLedger ledger;
    const Buffer buffer = c.allocate(ledger, Tag::Params, 64);
    const ReduceScatterSegment rs{x.data(), shard.data(), 100};
    const AllGatherSegment ag{x.data(), 400};
    c.reduce_scatter({&rs, 1}, DType::F32, false, "a").wait();
    c.reduce_scatter({&rs, 1}, DType::BF16, true, "a").wait();
    c.all_gather({&ag, 1}, "b").wait();
    c.all_reduce(x.data(), 7, DType::F32, ReduceOp::Sum, "c").wait();
    c.all_reduce(x.data(), 3, DType::F64, ReduceOp::Max, "c").wait();
    c.all_reduce(x.data(), 5, DType::I64, ReduceOp::Min, "c").wait();
    c.all_reduce(x.data(), 7, DType::BF16, ReduceOp::Sum, "c").wait();
    c.broadcast(x.data(), 400, P - 1, "d").wait();
    c.all_to_all(x.data(), y.data(), 400, "e").wait();
    std::vector<AllToAllSlice> slices;
    for (int q = 0; q < P; ++q) slices.push_back({400 * q, 40 * (c.rank() + q)});
    c.all_to_allv(x.data(), slices, y.data(), slices, "g").wait();
    if (P > 1) test::exercise_ring(c, 10, 0);
    c.barrier("f");
    return c.counts();
  };
  std::vector<std::map<std::string, CommCount>> host(static_cast<size_t>(ranks())), device(host.size());
  run_threads(ranks(), {}, [&](Communicator& c) { host[c.rank()] = program(c); });
  run_ranks(backend(), ranks(), 20, [&](Communicator& c, Communicator&) {
    device[c.rank()] = program(c);
    c.reset_counts();
    EXPECT_TRUE(c.counts().empty());
  });
  for (size_t r = 0; r < host.size(); ++r) {
    ASSERT_EQ(host[r].size(), device[r].size());
    for (const auto& [tag, count] : host[r]) {
      EXPECT_EQ(count.calls, device[r].at(tag).calls) << tag;
      EXPECT_EQ(count.bytes, device[r].at(tag).bytes) << tag;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceComms,
                         ::testing::Combine(::testing::Values("staged", "nccl", "links"),
                                            test::values_of<int>({1, 2, 3}, {4})),
                         [](const auto& test) {
                           return fmt::format("{}{}", std::get<0>(test.param), std::get<1>(test.param));
                         });

class EachDeviceComm : public ::testing::TestWithParam<const char*> {};

// More than one round of the staging, with segments that rounds cut, in place, and continued.
TEST_P(EachDeviceComm, LargeBucketsGoInRounds) {
  run_ranks(GetParam(), 3, 60, [](Communicator& c, Communicator&) {
    test::exercise_reduce_scatter(c, {}, {9'000'001, 5, 6'000'000}, DType::F32, true, false, 1);
    EXPECT_LE(c.staging_bytes(), i64{96} << 20);
    EXPECT_GE(c.staging_bytes(), i64{30} << 20);
    test::exercise_reduce_scatter(c, {}, {9'000'001}, DType::F32, false, true, 2);
    test::exercise_all_gather(c, {}, {5'000'001}, 3);
    test::exercise_all_to_allv(c, {}, 14'000'001, 5);
    test::exercise_reduction<float>(c, 5'000'003, ReduceOp::Sum, -1, 4);
  });
}

TEST_P(EachDeviceComm, NanWinsMaxAndMin) {
  run_ranks(GetParam(), 3, 20, [](Communicator& c, Communicator&) {
    for (ReduceOp op : {ReduceOp::Max, ReduceOp::Min}) {
      for (int bad = 0; bad < 3; ++bad) {
        double x = c.rank() == bad ? std::nan("") : c.rank();
        c.all_reduce(&x, 1, DType::F64, op, "t").wait();
        EXPECT_TRUE(std::isnan(x));
      }
    }
  });
}

TEST_P(EachDeviceComm, ManyTicketsRunInCallOrder) {
  run_ranks(GetParam(), 3, 20, [](Communicator& c, Communicator&) {
    std::vector<float> x(5000, 1.0f);
    std::vector<double> y(10, 1.0);
    std::vector<Ticket> tickets;
    for (int i = 0; i < 20; ++i) {
      tickets.push_back(c.all_reduce(x.data(), std::ssize(x), DType::F32, ReduceOp::Sum, "t"));
      tickets.push_back(c.all_reduce(y.data(), std::ssize(y), DType::F64, ReduceOp::Sum, "t"));
      tickets.push_back(c.broadcast(x.data(), 4, i % 3, "t"));
    }
    tickets.back().wait();
    for (Ticket& t : tickets) EXPECT_TRUE(t.done());
    EXPECT_EQ(x.front(), std::pow(3.0f, 20.0f));
    EXPECT_EQ(y.back(), std::pow(3.0, 20.0));
    tickets.front().wait();  // again
  });
}

TEST_P(EachDeviceComm, TicketsOutliveTheirCommunicator) {
  run_threads(2, {.timeout_s = 20}, [&](Communicator& world) {
    const auto device = make_cpu_device(*cpu_ops(), 1);
    i64 x = world.rank();
    Ticket t;
    {
      const auto c = make(GetParam(), world, {.device = device.get()});
      t = c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t");
    }
    t.wait();
    EXPECT_TRUE(t.done());
    EXPECT_EQ(x, 1);
  });
}

void expect_no_allocation(std::string_view backend) {
  inside_nccl = of_test_nccl<bool (*)()>("ds_test_nccl_inside");
  run_ranks(backend, 2, 20, [&](Communicator& c, Communicator&) {
    std::vector<float> x(2 * 30000), shard(30000);
    std::vector<float> y(x.size());
    std::vector<AllToAllSlice> slices(2);
    i64 verdict = 1, turn = 0;
    const std::vector<ReduceScatterSegment> rs = {{x.data(), shard.data(), 100}, {x.data() + 200, shard.data(), 29900}};
    const AllGatherSegment ag{x.data(), 30000 * 4};
    const auto step = [&] {
      for (int bucket = 0; bucket < 8; ++bucket) {
        Ticket t = c.reduce_scatter(rs, DType::F32, false, "dp.reduce_scatter");
        c.all_gather({&ag, 1}, "dp.all_gather").wait();
        t.wait();
        slices[0] = {0, 4 * (30000 - turn++ % 5)};
        slices[1] = {slices[0].bytes, slices[0].bytes};
        c.all_to_allv(x.data(), slices, y.data(), slices, "ep.all_to_allv").wait();
      }
      Ticket sent = c.send(x.data(), 30000 * 4, 1 - c.rank(), "pp.send");
      c.recv(x.data() + 30000, 30000 * 4, 1 - c.rank(), "pp.recv").wait();
      sent.wait();
      c.all_reduce(&verdict, 1, DType::I64, ReduceOp::Max, "dp.stats").wait();
    };
    for (int i = 0; i < 5; ++i) step();
    const i64 staging = c.staging_bytes();
    counting = true;
    for (int i = 0; i < 20; ++i) step();
    counting = false;
    EXPECT_EQ(num_news, 0);
    EXPECT_EQ(c.staging_bytes(), staging);
    c.barrier("t");
  });
}

TEST_P(EachDeviceComm, SteadyStateAllocatesNothing) { expect_no_allocation(GetParam()); }
TEST(NcclLinks, SteadyStateAllocatesNothing) { expect_no_allocation("links"); }

TEST_P(EachDeviceComm, AbortReachesPendingAndLaterCalls) {
  run_ranks(GetParam(), 3, 20, [](Communicator& c, Communicator&) {
    i64 x = 0;
    if (c.rank() == 1) {
      std::this_thread::sleep_for(50ms);
      c.abort(Error(Errc::Io, "out of cheese"));
    }
    for (int i = 0; i < 2; ++i) {
      const Error e = error_of([&] { c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait(); });
      EXPECT_EQ(e.code(), Errc::Io);
      EXPECT_EQ(e.rank(), 1);
      EXPECT_STREQ(e.what(), "rank 1 gave up: out of cheese");
    }
    EXPECT_EQ(error_of([&] { c.throw_if_failed(); }).code(), Errc::Io);
  });
}

TEST_P(EachDeviceComm, AnAbsentRankIsATimeoutThatNamesIt) {
  run_ranks(GetParam(), 3, 0.4, [](Communicator& c, Communicator&) {
    std::array<i64, 2> x{};
    c.broadcast(x.data(), 16, 0, "first").wait();
    if (c.rank() == 1) std::this_thread::sleep_for(1500ms);
    const Error e = error_of([&] { c.all_reduce(x.data(), 2, DType::I64, ReduceOp::Sum, "second").wait(); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1 did not arrive within 0.4 s"), HasSubstr("all_reduce")));
  });
}

TEST_P(EachDeviceComm, MismatchedKindsAreAnError) {
  run_ranks(GetParam(), 3, 5, [](Communicator& c, Communicator&) {
    std::vector<i64> x(64);
    const Error e = error_of([&] {
      if (c.rank() == 2) {
        c.broadcast(x.data(), 16, 0, "odd").wait();
      } else {
        c.all_reduce(x.data(), 64, DType::I64, ReduceOp::Sum, "even").wait();
      }
      c.barrier("behind");
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(error_of([&] { c.barrier("later"); }).code(), Errc::Comm);
  });
}

TEST_P(EachDeviceComm, MismatchedSlicesNameBothRanksAndSizesOnAllRanks) {
  run_ranks(GetParam(), 3, 5, [](Communicator& c, Communicator&) {
    std::vector<std::byte> x(3000), y(3000);
    std::vector<AllToAllSlice> out(3), in(3);
    for (int q = 0; q < 3; ++q) out[q] = in[q] = {1000 * q, 100};
    if (c.rank() == 0) in[2].bytes = 96;
    const Error e = error_of([&] { c.all_to_allv(x.data(), out, y.data(), in, "t").wait(); });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 2);
    EXPECT_THAT(e.what(), HasSubstr("rank 2 sends 100 bytes to rank 0, which expects 96, in all_to_allv \"t\""));
    EXPECT_EQ(error_of([&] { c.barrier("later"); }).code(), Errc::Comm);
  });
}

TEST_P(EachDeviceComm, AnotherExchangeIsAMismatch) {
  run_ranks(GetParam(), 3, 5, [](Communicator& c, Communicator&) {
    std::vector<std::byte> x(3000), y(3000);
    const std::vector<AllToAllSlice> slices(3, {0, 0});
    const Error e = error_of([&] {
      (c.rank() == 2 ? c.all_to_all(x.data(), y.data(), 8, "t")
                     : c.all_to_allv(x.data(), slices, y.data(), slices, "t"))
          .wait();
      c.barrier("after");
    });
    EXPECT_EQ(e.code(), Errc::Comm);
  });
}

TEST_P(EachDeviceComm, ARankThatLeftIsNotWaitedFor) {
  run_ranks(GetParam(), 2, 20, [](Communicator& c, Communicator& world) {
    i64 x = 0;
    c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
    world.barrier("t");
    if (c.rank() == 1) return;
    const auto start = std::chrono::steady_clock::now();
    const Error e = error_of([&] { c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait(); });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), HasSubstr("rank 1 has left"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  });
}

TEST_P(EachDeviceComm, AnErrorOfTheOwnerReachesThePeers) {
  struct Mine : std::runtime_error {
    using runtime_error::runtime_error;
  };
  EXPECT_THROW(run_ranks(GetParam(), 3, 20,
                         [](Communicator& c, Communicator&) {
                           if (c.rank() == 2) throw Mine("first");
                           i64 x = 0;
                           for (;;) c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
                         }),
               Mine);
}

INSTANTIATE_TEST_SUITE_P(Backends, EachDeviceComm, ::testing::Values("staged", "nccl"),
                         [](const auto& test) { return std::string(test.param); });

TEST(NcclFailure, ARankWhoseNcclIsStuckEndsTheCallOfAll) {
  const Broken broken(1, kNeverComes);
  run_ranks("nccl", 3, 0.4, [](Communicator& c, Communicator&) {
    std::vector<float> x(300);
    const ReduceScatterSegment s{x.data(), x.data() + 100 * c.rank(), 100};
    const Error e = error_of([&] { c.reduce_scatter({&s, 1}, DType::F32, false, "dp.reduce_scatter").wait(); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("reduce_scatter \"dp.reduce_scatter\" (call 1"), HasSubstr("within 0.4 s")));
  });
}

TEST(NcclFailure, AnAsynchronousErrorIsToldWithItsWords) {
  const Broken broken(1, kAsyncError);
  run_ranks("nccl", 2, 20, [](Communicator& c, Communicator&) {
    i64 x = 0;
    const Error e = error_of([&] {
      for (;;) c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1 gave up: NCCL failed in "), HasSubstr("remote process exited"),
                                HasSubstr("the last words of NCCL")));
  });
}

TEST(NcclFailure, ARankThatDoesNotConnectIsATimeout) {
  const Broken broken(1, kNeverConnects);
  const Error e = error_of([] { run_ranks("nccl", 2, 0.3, [](Communicator&, Communicator&) { FAIL(); }); });
  EXPECT_EQ(e.code(), Errc::Timeout);
  EXPECT_THAT(e.what(), HasSubstr("NCCL did not connect its 2 ranks within 0.3 s"));
}

TEST(NcclFailure, ARankThatCannotLoadNcclTellsItsPeers) {
  const Error e = error_of([] {
    run_threads(2, {.timeout_s = 20}, [](Communicator& world) {
      const auto device = make_cpu_device(*cpu_ops(), 1);
      if (world.rank() == 1) throw Error(Errc::Unavailable, "NCCL does not load");
      use_test_nccl();
      make_nccl_communicator(world, {.device = device.get()});
    });
  });
  EXPECT_EQ(e.code(), Errc::Unavailable);
}

TEST(NcclFailure, AnAbortThatHangsIsNotWaitedForLong) {
  const Broken broken(0, kAbortHangs);
  const auto start = std::chrono::steady_clock::now();
  const Error e = error_of([] {
    run_ranks("nccl", 2, 20, [](Communicator& c, Communicator&) {
      if (c.rank() == 1) throw Error(Errc::Io, "disk on fire");
      i64 x = 0;
      for (;;) c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
    });
  });
  EXPECT_EQ(e.code(), Errc::Io);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
}

// On two ranks with links.
void run_linked(double timeout_s, const std::function<void(Communicator&, Communicator& world)>& body) {
  run_ranks("links", 2, timeout_s, body);
}

TEST(NcclLinks, AReceiveDoesNotMakeTheHostWait) {
  run_linked(20, [](Communicator& c, Communicator& world) {
    std::vector<i64> x(1000, 1 + c.rank()), y(1000);
    Ticket received, sent;
    if (c.rank() == 0) {
      received = c.recv(y.data(), 8000, 1, "t");
      EXPECT_FALSE(received.done());
    }
    world.barrier("t");
    sent = c.send(x.data(), 8000, 1 - c.rank(), "t");
    if (c.rank() == 1) received = c.recv(y.data(), 8000, 0, "t");
    received.wait();
    EXPECT_TRUE(received.done());
    EXPECT_EQ(y, std::vector<i64>(1000, 2 - c.rank()));
    sent.wait();
  });
}

// The way back and collectives do not wait for a message that nobody has received yet.
TEST(NcclLinks, AMessageDelaysNoOtherWork) {
  run_linked(20, [](Communicator& c, Communicator& world) {
    i64 a = 7, b = 0, x = 1;
    Ticket first;
    if (c.rank() == 0) first = c.send(&a, 8, 1, "down");
    if (c.rank() == 1) c.send(&a, 8, 0, "up").wait();
    if (c.rank() == 0) c.recv(&b, 8, 1, "up").wait();
    c.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
    EXPECT_EQ(x, 2);
    EXPECT_EQ(first.done(), c.rank() == 1);
    world.barrier("t");
    if (c.rank() == 1) c.recv(&b, 8, 0, "down").wait();
    first.wait();
    EXPECT_EQ(b, 7);
  });
}

TEST(NcclLinks, OtherMessagesGoThroughHostMemory) {
  run_threads(3, {.timeout_s = 20}, [](Communicator& world) {
    const auto device = make_device("links");
    use_test_nccl();
    const auto c = make_nccl_communicator(world, {.timeout_s = 20, .device = device.get(), .links = ring_links(3, 1)});
    c->use_links();
    std::vector<i64> x(5000, c->rank()), y(5000);
    const auto pass = [&](int step) {
      Ticket sent = c->send(x.data(), 40000, (c->rank() + step + 3) % 3, "t");
      c->recv(y.data(), 40000, (c->rank() - step + 3) % 3, "t").wait();
      sent.wait();
      EXPECT_EQ(y.back(), (c->rank() - step + 3) % 3);
    };
    pass(1);
    EXPECT_EQ(c->staging_bytes(), 0);
    pass(-1);
    EXPECT_EQ(c->staging_bytes(), 80000);
  });
}

TEST(NcclLinks, APeerThatNeverReceivesIsATimeoutThatNamesIt) {
  run_linked(0.4, [](Communicator& c, Communicator&) {
    i64 x = 0;
    if (c.rank() == 1) {
      std::this_thread::sleep_for(1500ms);
      EXPECT_EQ(error_of([&] { c.throw_if_failed(); }).code(), Errc::Timeout);
      return;
    }
    const Error e = error_of([&] {
      c.send(&x, 8, 1, "pp.send").wait();
      c.throw_if_failed();
    });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 1 did not arrive within 0.4 s"), HasSubstr("send \"pp.send\"")));
  });
}

// Rank 0 waits for rank 1, which waits for rank 2.
TEST(NcclLinks, ARankThatWaitsIsNotTheLateOne) {
  run_ranks("links", 3, 1, [](Communicator& c, Communicator&) {
    i64 x = 0;
    if (c.rank() == 2) {
      std::this_thread::sleep_for(3s);
    } else {
      if (c.rank() == 1) std::this_thread::sleep_for(300ms);
      error_of([&] {
        c.recv(&x, 8, c.rank() + 1, "t").wait();
        c.throw_if_failed();
      });
    }
    const Error e = error_of([&] { c.throw_if_failed(); });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_EQ(e.rank(), 2);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("rank 2 did not arrive"), HasSubstr("rank 1 waits for rank 2")));
  });
}

TEST(NcclLinks, ARankThatLeftIsNotWaitedFor) {
  run_linked(20, [](Communicator& c, Communicator& world) {
    world.barrier("t");
    if (c.rank() == 1) return;
    i64 x = 0;
    const auto start = std::chrono::steady_clock::now();
    const Error e = error_of([&] {
      c.recv(&x, 8, 1, "t").wait();
      c.throw_if_failed();
    });
    EXPECT_EQ(e.code(), Errc::Comm);
    EXPECT_EQ(e.rank(), 1);
    EXPECT_THAT(e.what(), HasSubstr("rank 1 has left"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  });
}

TEST(NcclLinks, AMessageThatNobodyWaitsForDoesNotKeepARankForEver) {
  const Error e = error_of([] {
    run_threads(2, {.timeout_s = 20}, [](Communicator& world) {
      const auto device = make_device("links");
      {
        const auto c = make("links", world, {.timeout_s = 0.3, .device = device.get()});
        i64 x = 0;
        if (world.rank() == 0) {
          c->recv(&x, 8, 1, "t");
        } else {
          std::this_thread::sleep_for(1500ms);
        }
      }
      world.throw_if_failed();
    });
  });
  EXPECT_EQ(e.code(), Errc::Timeout);
  EXPECT_EQ(e.rank(), 1);
}

TEST(NcclLinks, AnErrorOfNcclEndsTheRun) {
  std::optional<Broken> broken;  // the receiver of a link, once links are made
  const Error e = error_of([&] {
    run_linked(20, [&](Communicator& c, Communicator& world) {
      world.barrier("t");
      if (c.rank() == 0) broken.emplace(1, kAsyncError);
      world.barrier("t");
      i64 x = 0;
      for (int i = 0; i < 1000; ++i) {
        Ticket sent = c.send(&x, 8, 1 - c.rank(), "pp.send");
        c.recv(&x, 8, 1 - c.rank(), "pp.recv").wait();
        sent.wait();
        c.throw_if_failed();
      }
    });
  });
  EXPECT_EQ(e.code(), Errc::Comm);
  EXPECT_THAT(e.what(), AllOf(HasSubstr("NCCL failed in "), HasSubstr("remote process exited")));
}

TEST(NcclLinks, AnErrorOfNcclInTheFirstMessageIsNotATimeout) {
  const Broken broken(1, kAsyncError);
  const Error e = error_of([] { run_linked(20, [](Communicator&, Communicator&) { FAIL(); }); });
  EXPECT_EQ(e.code(), Errc::Comm);
  EXPECT_THAT(e.what(), AllOf(HasSubstr("NCCL cannot connect"), HasSubstr("remote process exited")));
}

TEST(RingLinks, AreThoseOfEachRankOnce) {
  EXPECT_TRUE(ring_links(1, 1).empty());
  EXPECT_EQ(ring_links(2, -1), (std::vector<MessageLink>{{0, 1}, {1, 0}}));
  EXPECT_EQ(ring_links(5, 1), (std::vector<MessageLink>{{0, 1}, {2, 3}, {4, 0}, {1, 2}, {3, 4}}));
  EXPECT_EQ(ring_links(4, -1), (std::vector<MessageLink>{{0, 3}, {2, 1}, {1, 0}, {3, 2}}));
}

// A CPU whose events do not happen while it is stuck, like a GPU whose peer hangs.
class SlowDevice final : public Device {
 public:
  std::atomic<bool> stuck{false};

  DeviceKind kind() const noexcept override { return cpu_->kind(); }
  u64 id() const noexcept override { return 0; }
  std::string_view name() const noexcept override { return "slow"; }
  const OpTable& ops() const noexcept override { return cpu_->ops(); }
  Stream& stream(Queue queue) noexcept override { return cpu_->stream(queue); }
  void* native(Queue) noexcept override { return nullptr; }
  Queue make_queue() override { return Queue::Comm; }
  void destroy_queue(Queue) noexcept override {}
  void* allocate(i64 bytes) noexcept override { return cpu_->allocate(bytes); }
  void release(void* p) noexcept override { cpu_->release(p); }
  DeviceMemory memory() const override { return {}; }
  i64 scratch_bytes() const noexcept override { return 0; }
  void copy(void* to, const void* from, i64 bytes, Queue queue) override { cpu_->copy(to, from, bytes, queue); }
  void zero(void* p, i64 bytes) override { cpu_->zero(p, bytes); }
  void upload(void* to, const void* from, i64 bytes) override { cpu_->upload(to, from, bytes); }
  void download(void* to, const void* from, i64 bytes) override { cpu_->download(to, from, bytes); }
  void start_upload(void* to, const void* from, i64 bytes) override { cpu_->upload(to, from, bytes); }
  void start_download(void* to, const void* from, i64 bytes) override { cpu_->download(to, from, bytes); }
  void synchronize(Queue) override {}
  std::string pin(void*, i64) override { return {}; }
  void unpin(void*) noexcept override {}
  // Events know their queue, so that only what is on Comm hangs; each is made and destroyed once.
  Event make_event() override {
    ++events;
    return new Queue(Queue::Compute);
  }
  void destroy(Event e) noexcept override {
    --events;
    delete static_cast<Queue*>(e);
  }
  void record(Event e, Queue queue) override { *static_cast<Queue*>(e) = queue; }
  void wait(Queue queue, Event) override { ++waits[static_cast<size_t>(queue)]; }
  void await(Event) override {}
  bool reached(Event e) override { return !stuck || *static_cast<Queue*>(e) == Queue::Compute; }
  Event make_timed_event() override { return make_event(); }
  double seconds_between(Event, Event) override { return 0; }
  Graph record_graph(FunctionRef<void()>) override { return nullptr; }
  void launch(Graph) override {}
  void destroy_graph(Graph) noexcept override {}

  int events = 0;
  std::array<int, 2> waits{};

 private:
  std::unique_ptr<Device> cpu_ = make_cpu_device(*cpu_ops(), 1);
};

TEST(NcclQueues, OperationsAreOrderedByEventsAndTheHostDoesNotWait) {
  run_threads(2, {.timeout_s = 20}, [](Communicator& world) {
    SlowDevice device;
    {
      use_test_nccl();
      const auto c = make_nccl_communicator(world, {.timeout_s = 20, .device = &device});
      device.stuck = true;
      i64 x = 1;
      Ticket t = c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t");
      EXPECT_EQ(device.waits, (std::array<int, 2>{0, 1}));  // Comm after Compute
      t.wait();
      EXPECT_EQ(device.waits, (std::array<int, 2>{1, 1}));  // Compute after Comm
      EXPECT_FALSE(t.done());
      device.stuck = false;
      EXPECT_TRUE(t.done());
      const auto calm = make_nccl_communicator(world, {.timeout_s = 20, .progress_thread = false, .device = &device});
      calm->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t");
      EXPECT_EQ(device.waits, (std::array<int, 2>{2, 2}));  // without overlap at once
      const int events = device.events;
      for (int i = 0; i < 100; ++i) c->all_reduce(&x, 1, DType::I64, ReduceOp::Max, "t").wait();
      EXPECT_LE(device.events, events + 4);  // they are used again
    }
    EXPECT_EQ(device.events, 0);
  });
}

TEST(NcclQueues, AnOperationThatDoesNotEndIsATimeoutEvenIfNobodyWaits) {
  run_threads(2, {.timeout_s = 20}, [](Communicator& world) {
    SlowDevice device;
    use_test_nccl();
    const auto c = make_nccl_communicator(world, {.timeout_s = 0.3, .device = &device});
    device.stuck = true;
    i64 x = 1;
    Ticket t = c->all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "stuck");
    const Error e = error_of([&] {
      for (int i = 0; i < 200; ++i) {
        std::this_thread::sleep_for(10ms);
        c->throw_if_failed();
      }
    });
    EXPECT_EQ(e.code(), Errc::Timeout);
    EXPECT_THAT(e.what(), AllOf(HasSubstr("all_reduce \"stuck\" (call 1"), HasSubstr("within 0.3 s")));
    EXPECT_EQ(error_of([&] { t.wait(); }).code(), Errc::Timeout);
    EXPECT_TRUE(t.done());
    device.stuck = false;
  });
}

}  // namespace device_comm_test
}  // namespace ds
