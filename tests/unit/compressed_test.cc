// SPDX-License-Identifier: Apache-2.0
// Compressed collectives over threads, on the CPU or on the device that DS_TEST_DEVICE asks for: the bits of a serial
// oracle, bounds of their errors, error feedback over many steps, and values that are not finite.

#include "../compressed_exercise.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>

#include "counted_new.h"
#include "parity/device_ops.h"

namespace ds {
namespace compressed_test {

using test::Array;
using test::Floats;
using test::Group;
using test::Ranks;
using testing::make_test_device;
using testing::test_device;

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// body(ranks) on `size` threads, each with its device.
void run_ranks(int size, const std::function<void(const Ranks&)>& body, bool progress_thread = true) {
  run_threads(size, {.timeout_s = 120, .progress_thread = progress_thread}, [&](Communicator& c) {
    const auto device = make_test_device(1);
    Ranks ranks{c, *device};
    if (!device->is_host()) {
      ranks.over = [&](Communicator& host) {
        return testing::over_one_gpu(host, {.timeout_s = 120, .device = device.get()});
      };
    }
    body(ranks);
    c.barrier("t.end");  // nobody's device goes while others use it
  });
}

class Compressed : public ::testing::TestWithParam<int> {};

TEST_P(Compressed, PassesTheExercise) {
  run_ranks(GetParam(), [](const Ranks& r) { test::exercise_compressed(r, test_device() != nullptr ? 777 : 3001); });
}
INSTANTIATE_TEST_SUITE_P(Ranks, Compressed, ::testing::Range(1, 9));

TEST(CompressedOver, OneRankAlone) {
  const auto device = make_test_device(1);
  const auto self = make_self_communicator({});
  Ranks ranks{*self, *device};
  if (!device->is_host()) {
    ranks.over = [&](Communicator& host) { return testing::over_one_gpu(host, {.device = device.get()}); };
  }
  test::exercise_compressed(ranks);
}

TEST(CompressedOver, ThreadsThatCommunicateThemselves) {
  run_ranks(
      3, [](const Ranks& r) { test::exercise_compressed(r, 501); }, false);
}

// Over device memory, waits order a stream and not the host.
TEST(CompressedOver, TheStagedCommunicator) {
  run_ranks(4, [](const Ranks& r) {
    Ranks staged{r.host, r.device, [&](Communicator& host) {
                   return make_staged_communicator(host, {.timeout_s = 120, .device = &r.device});
                 }};
    test::exercise_compressed(staged, 501);
  });
}

// ---- quantised collectives ----

TEST(QuantizedReduceScatter, SumsOverAllRanksAndNotOverNodesAlone) {
  for (const int nodes : {1, 2, 3, 6}) {
    run_ranks(6, [&](const Ranks& r) {
      constexpr i64 n = 20;
      const int L = 6 / nodes, rank = r.rank();
      std::vector<int> local, equal;
      for (int l = 0; l < L; ++l) local.push_back(rank / L * L + l);
      for (int m = 0; m < nodes; ++m) equal.push_back(m * L + rank % L);
      const Group node(r, local, "node"), across(r, equal, "across");
      MemoryLedger ledger;
      QuantizedReduceScatter op(&*node, *across, r.device, ledger, Tag::Comm, n);
      Array source(r.device, DType::F32, 6 * n), target(r.device, DType::F32, n);
      source.set(Floats(6 * n, 7.0f));  // a scale of 1, and all sums are multiples of theirs
      op.run(source, target, false, "t");
      for (const float x : target.get()) EXPECT_EQ(x, 6 * 7.0f) << nodes << " nodes";
    });
  }
}

TEST(QuantizedReduceScatter, EachHopErrsByHalfAScalePerTerm) {
  constexpr i64 n = 512, kBlock = 64, L = 3, M = 2, P = L * M;
  for (const int bits : {4, 8}) {
    std::vector<Floats> sums(P);
    run_ranks(P, [&](const Ranks& r) {
      const int rank = r.rank();
      std::vector<int> local, equal;
      for (int l = 0; l < L; ++l) local.push_back(static_cast<int>(rank / L * L + l));
      for (int m = 0; m < M; ++m) equal.push_back(static_cast<int>(m * L + rank % L));
      const Group node(r, local, "node"), across(r, equal, "across");
      MemoryLedger ledger;
      QuantizedReduceScatter op(&*node, *across, r.device, ledger, Tag::Comm, n, {bits, kBlock});
      Array source(r.device, DType::F32, P * n), target(r.device, DType::F32, n);
      source.set(test::inputs(rank, P * n, DType::F32, 5));
      op.run(source, target, false, "t");
      sums[rank] = target.get();
    });
    const double codes = bits == 4 ? 7 : 127;
    for (i64 r = 0; r < P; ++r) {
      for (i64 block = 0; block < n; block += kBlock) {
        double bound = 0;
        for (i64 m = 0; m < M; ++m) {
          double largest_sum = 0, error = 0;
          for (i64 p = m * L; p < (m + 1) * L; ++p) {
            double largest = 0;
            for (i64 i = block; i < block + kBlock; ++i)
              largest = std::max(largest, std::abs(double{test::value(static_cast<int>(p), r * n + i, 5)}));
            error += largest / codes / 2;
            largest_sum += largest;
          }
          bound += error + (largest_sum + error) / codes / 2;
        }
        for (i64 i = block; i < block + kBlock; ++i) {
          double exact = 0;
          for (int p = 0; p < P; ++p) exact += double{test::value(p, r * n + i, 5)};
          EXPECT_LE(std::abs(double{sums[r][i]} - exact), bound * 1.00001);
        }
      }
    }
  }
}

TEST(QuantizedReduceScatter, WhatIsNotFiniteShowsInItsBlock) {
  for (const int nodes : {1, 2}) {
    for (const float bad : {kInf, kNan}) {
      std::vector<Floats> sums(4);
      run_ranks(4, [&](const Ranks& r) {
        constexpr i64 n = 40;
        const int L = 4 / nodes, rank = r.rank();
        std::vector<int> local, equal;
        for (int l = 0; l < L; ++l) local.push_back(rank / L * L + l);
        for (int m = 0; m < nodes; ++m) equal.push_back(m * L + rank % L);
        const Group node(r, local, "node"), across(r, equal, "across");
        MemoryLedger ledger;
        QuantizedReduceScatter op(&*node, *across, r.device, ledger, Tag::Comm, n, {4, 16});
        LocoErrors errors(op, ledger, Tag::GradAccum, {n});
        Array source(r.device, DType::F16, 4 * n), target(r.device, DType::F32, n);
        Floats x = test::inputs(rank, 4 * n, DType::F16, 6);
        if (rank == 1) x[2 * n + 20] = bad;  // for rank 2, in its second block
        source.set(x);
        op.run(source, target, false, "t", &errors);
        sums[rank] = target.get();
        source.set(test::inputs(rank, 4 * n, DType::F16, 7));
        op.run(source, target, false, "t", &errors);
        for (const float after : target.get()) EXPECT_TRUE(std::isfinite(after)) << "the next step";
      });
      for (size_t r = 0; r < 4; ++r) {
        for (size_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(sums[r][i]), r == 2 && i / 16 == 1) << r << " at " << i;
      }
    }
  }
}

// A gradient that 4 bits round away beside a large one gets through in time, with error feedback alone.
TEST(QuantizedReduceScatter, LocoMakesTheMeanOverStepsExact) {
  for (const bool feedback : {false, true}) {
    run_ranks(2, [&](const Ranks& r) {
      constexpr i64 n = 16;
      constexpr int kSteps = 400;
      const Group node(r, {r.rank()}, "node"), across(r, {0, 1}, "across");
      MemoryLedger ledger;
      QuantizedReduceScatter op(&*node, *across, r.device, ledger, Tag::Comm, n, {4, 8});
      LocoErrors errors(op, ledger, Tag::GradAccum, {n});
      Array source(r.device, DType::F32, 2 * n), target(r.device, DType::F32, n);
      Floats x(2 * n, 0.02f);
      for (size_t i = 0; i < x.size(); i += 8) x[i] = 1;
      source.set(x);
      for (int step = 0; step < kSteps; ++step) op.run(source, target, step > 0, "t", feedback ? &errors : nullptr);
      const double mean = double{target.get()[3]} / kSteps;
      if (feedback) {
        EXPECT_NEAR(mean, 0.04, 0.004);
      } else {
        EXPECT_EQ(mean, 0);
      }
    });
  }
}

TEST(QuantizedAllGather, WhatIsNotFiniteShowsInItsBlockOnAllRanks) {
  run_ranks(3, [&](const Ranks& r) {
    constexpr i64 n = 40;
    const Group c(r);
    MemoryLedger ledger;
    QuantizedAllGather op(*c, r.device, ledger, Tag::Comm, n, {8, 16});
    Array shard(r.device, DType::BF16, n), full(r.device, DType::BF16, 3 * n);
    Floats x = test::inputs(r.rank(), n, DType::BF16, 8);
    if (r.rank() == 1) x[5] = kInf;
    shard.set(x);
    op.start(shard, "t");
    op.finish(full);
    const Floats got = full.get();
    for (i64 i = 0; i < 3 * n; ++i)
      EXPECT_EQ(std::isnan(got[i]), i >= n && i < n + 16) << "rank " << r.rank() << " at " << i;
  });
}

TEST(Quantized, FormatsThatDoNotExistAreRefused) {
  const auto device = make_cpu_device(*cpu_ops(), 1);
  const auto self = make_self_communicator({});
  MemoryLedger ledger;
  for (const CodeFormat format : {CodeFormat{2, 64}, CodeFormat{1, 64}, CodeFormat{8, 60}, CodeFormat{8, 0}}) {
    EXPECT_THROW(QuantizedAllGather(*self, *device, ledger, Tag::Comm, 100, format), Error);
    EXPECT_THROW(QuantizedReduceScatter(&*self, *self, *device, ledger, Tag::Comm, 100, format), Error);
  }
  QuantizedReduceScatter op(&*self, *self, *device, ledger, Tag::Comm, 100);
  EXPECT_THROW(LocoErrors(op, ledger, Tag::Comm, {100}, {.decay = 1.5f}), Error);
  EXPECT_THROW(LocoErrors(op, ledger, Tag::Comm, {100}, {.reset_period = 0}), Error);
}

// ---- 1-bit ----

double norm(const Floats& x) {
  double sum = 0;
  for (const float v : x) sum += double{v} * v;
  return std::sqrt(sum);
}

// The sum of the results is the sum of the inputs, up to the errors that are kept, and these do not grow.
TEST(OneBit, TheSumOverStepsFollowsTheMeans) {
  constexpr int P = 4;
  constexpr i64 n = 1003;
  const auto input = [](int rank, i64 i, int step) {
    return test::value(rank, i, 3) * 1e-3f + test::value(rank, i, step + 1000) * 1e-2f;
  };
  std::vector<Floats> worker(P), server(P), last(P);
  std::vector<double> sum(static_cast<size_t>(n));
  for (const int steps : {20, 200}) {
    run_ranks(P, [&](const Ranks& r) {
      const Group c(r);
      MemoryLedger ledger;
      OneBitAllReduce op(*c, r.device, ledger, Tag::Optimizer, n);
      Array x(r.device, DType::F32, n);
      if (r.rank() == 0) std::fill(sum.begin(), sum.end(), 0.0);
      for (int t = 0; t < steps; ++t) {
        Floats own(static_cast<size_t>(n));
        for (i64 i = 0; i < n; ++i) own[i] = input(r.rank(), i, t);
        x.set(own);
        op.run(x, "t");
        if (r.rank() != 0) continue;
        const Floats result = x.get();
        for (size_t i = 0; i < result.size(); ++i) sum[i] += double{result[i]};
      }
      const auto at = static_cast<size_t>(r.rank());
      worker[at] = Array::floats_of(r.device, op.worker_error());
      server[at] = Array::floats_of(r.device, op.server_error());
      last[at] = x.get();
    });
    Floats server_errors;
    for (const Floats& part : server) server_errors.insert(server_errors.end(), part.begin(), part.end());
    ASSERT_EQ(server_errors.size(), sum.size());
    double one_step = 0, off = 0;
    for (i64 i = 0; i < n; ++i) {
      const auto at = static_cast<size_t>(i);
      double want = 0, left = double{server_errors[at]};
      for (int q = 0; q < P; ++q) {
        left += double{worker[q][at]} / P;
        for (int t = 0; t < steps; ++t) want += double{input(q, i, t)} / P;
      }
      EXPECT_NEAR(sum[at], want - left, 1e-5 * steps) << i;
      off += left * left;
      for (int q = 0; q < P; ++q) one_step += std::pow(double{input(q, i, 0)}, 2) / P;
    }
    EXPECT_LT(std::sqrt(off), 3 * std::sqrt(one_step)) << steps << " steps";
    for (const Floats& e : worker) EXPECT_LT(norm(e), 3 * std::sqrt(one_step)) << steps << " steps";
    for (const Floats& x : last) test::require_same(x, last[0], "the same on all ranks");
  }
}

// The sum over ranks of |A_r x - b_r|^2 / 2, by gradient steps of decreasing length.
class LeastSquares {
 public:
  static constexpr i64 kUnknowns = 37, kRows = 30;
  static constexpr int kRanks = 4, kSteps = 3000;
  static double length(int step) { return 0.04 / (1 + step / 100.0); }

  static double a(int rank, i64 row, i64 i) {
    return double{test::value(rank, row * kUnknowns + i, 21)} / 2048 / std::sqrt(double{kRows});
  }
  static double b(int rank, i64 row) { return double{test::value(rank, row, 22)} / 256; }
  static Floats gradient(int rank, const Floats& x) {
    std::vector<double> g(kUnknowns);
    for (i64 row = 0; row < kRows; ++row) {
      double residual = -b(rank, row);
      for (i64 i = 0; i < kUnknowns; ++i) residual += a(rank, row, i) * double{x[i]};
      for (i64 i = 0; i < kUnknowns; ++i) g[i] += a(rank, row, i) * residual;
    }
    return Floats(g.begin(), g.end());
  }
};

TEST(OneBit, DescentFindsTheOptimumAndDoesNotWithoutErrorFeedback) {
  if (test_device() != nullptr) GTEST_SKIP() << "many steps, whose bits other tests compare";
  using Problem = LeastSquares;
  const auto descend = [](bool compressed, bool feedback) {
    Floats found(Problem::kUnknowns);
    run_ranks(Problem::kRanks, [&](const Ranks& r) {
      const Group c(r);
      MemoryLedger ledger;
      OneBitAllReduce op(*c, r.device, ledger, Tag::Optimizer, Problem::kUnknowns);
      Array g(r.device, DType::F32, Problem::kUnknowns);
      Floats x(Problem::kUnknowns);
      for (int t = 0; t < Problem::kSteps; ++t) {
        g.set(Problem::gradient(r.rank(), x));
        if (compressed) {
          op.run(g, "t");
        } else {
          (*c).all_reduce(TensorView(g).data, Problem::kUnknowns, DType::F32, ReduceOp::Sum, "t").wait();
        }
        if (!feedback) op.reset();
        const Floats step = g.get();
        for (size_t i = 0; i < x.size(); ++i)
          x[i] -= static_cast<float>(Problem::length(t)) * step[i] / (compressed ? 1.0f : Problem::kRanks);
      }
      if (r.rank() == 0) found = x;
    });
    return found;
  };
  const Floats exact = descend(false, true), one_bit = descend(true, true), alone = descend(true, false);
  const auto away = [&](Floats x) {
    for (size_t i = 0; i < x.size(); ++i) x[i] -= exact[i];
    return norm(x) / norm(exact);
  };
  EXPECT_LT(away(one_bit), 0.01);
  EXPECT_GT(away(alone), 10 * away(one_bit));
}

TEST(OneBit, WhatIsNotFiniteShowsEverywhereAndIsForgotten) {
  for (const float bad : {kInf, kNan}) {
    run_ranks(3, [&](const Ranks& r) {
      constexpr i64 n = 100;
      const Group c(r);
      MemoryLedger ledger;
      OneBitAllReduce op(*c, r.device, ledger, Tag::Optimizer, n);
      Array x(r.device, DType::F32, n);
      Floats own = test::inputs(r.rank(), n, DType::F32, 9);
      if (r.rank() == 2) own[3] = bad;
      x.set(own);
      op.run(x, "t");
      for (const float v : x.get()) EXPECT_TRUE(std::isnan(v));
      for (const float v : Array::floats_of(r.device, op.server_error())) EXPECT_EQ(v, 0.0f);
      for (const float v : Array::floats_of(r.device, op.worker_error())) EXPECT_EQ(v == 0, r.rank() == 2);
      own[3] = 1;
      x.set(own);
      op.run(x, "t");
      for (const float v : x.get()) EXPECT_TRUE(std::isfinite(v));
    });
  }
}

TEST(OneBit, ResetForgetsTheErrors) {
  run_ranks(2, [&](const Ranks& r) {
    constexpr i64 n = 50;
    const Group c(r);
    MemoryLedger ledger;
    OneBitAllReduce op(*c, r.device, ledger, Tag::Optimizer, n);
    Array x(r.device, DType::F32, n);
    const Floats own = test::inputs(r.rank(), n, DType::F32, 10);
    x.set(own);
    op.run(x, "t");
    const Floats first = x.get();
    op.reset();
    x.set(own);
    op.run(x, "t");
    test::require_same(x.get(), first, "the first step again");
    // Errors that are put back, as from a checkpoint, continue where they were.
    const Floats worker = Array::floats_of(r.device, op.worker_error()),
                 server = Array::floats_of(r.device, op.server_error());
    x.set(own);
    op.run(x, "t");
    const Floats second = x.get();
    EXPECT_NE(second, first);
    r.device.upload(op.worker_error().data, worker.data(), op.worker_error().bytes());
    r.device.upload(op.server_error().data, server.data(), op.server_error().bytes());
    x.set(own);
    op.run(x, "t");
    test::require_same(x.get(), second, "the second step again");
  });
}

TEST(CompressedCalls, AllocateNothing) {
  if (test_device() != nullptr) GTEST_SKIP() << "the staged communicator and the simulator do";
  run_ranks(2, [](const Ranks& r) {
    constexpr i64 n = 5000;
    const Group all(r), alone(r, {r.rank()}, "alone");
    MemoryLedger ledger;
    QuantizedAllGather gather(*all, r.device, ledger, Tag::Comm, n);
    QuantizedReduceScatter reduce(&*all, *alone, r.device, ledger, Tag::Comm, n);
    LocoErrors errors(reduce, ledger, Tag::Comm, {n});
    SecondaryShard secondary(*all, r.device, ledger, Tag::Params, 2 * n, DType::F32);
    OneBitAllReduce one_bit(*all, r.device, ledger, Tag::Optimizer, 2 * n);
    constexpr i64 kBlocks = 100 * NonzeroBlocks::kBlock;
    NonzeroBlocks nonzero(*all, r.device, ledger, Tag::Buckets, kBlocks, 4, 20);
    Array mostly_zero(r.device, DType::F32, 2 * kBlocks), sums(r.device, DType::F32, kBlocks);
    Floats ones(2 * kBlocks);
    for (size_t i = 0; i < 70; ++i) ones[i * 150] = 1;
    mostly_zero.set(ones);
    Array full(r.device, DType::F32, 2 * n), part(r.device, DType::F32, n);
    const auto step = [&] {
      gather.start(part, "t");
      gather.finish(full);
      secondary.keep(full);
      secondary.gather(full, "t").wait();
      reduce.run(full, part, false, "t", &errors);
      one_bit.run(full, "t");
      ASSERT_TRUE(nonzero.saves(mostly_zero, 0, "t"));
      nonzero.reduce_scatter(mostly_zero, sums, false, "t");
    };
    for (int i = 0; i < 3; ++i) step();
    r.host.barrier("t");
    const long before = num_news;
    for (int i = 0; i < 5; ++i) step();
    r.host.barrier("t");
    EXPECT_EQ(num_news - before, 0);
    r.host.barrier("t");
  });
}

}  // namespace compressed_test
}  // namespace ds
