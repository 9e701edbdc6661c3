// SPDX-License-Identifier: Apache-2.0
// The benchmark of communication: nccl-tests' numbers, inputs that every order reduces to the same bits, statistics and
// models, and every operation over threads, right and with a fault.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "base/json.h"
#include "comm/make_communicator.h"
#include "commbench/links.h"
#include "commbench/measure.h"
#include "commbench/overlap.h"
#include "commbench/selection.h"
#include "commbench/sizes.h"
#include "commbench/statistics.h"
#include "slow_set.h"

namespace ds::commbench {
namespace commbench_test {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Operation& operation(std::string_view name) {
  for (const Operation& o : operation_table())
    if (o.name == name) return o;
  throw std::runtime_error("no operation " + std::string(name));
}

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    return e.what();
  }
  return "nothing was thrown";
}

TEST(CommbenchSizes, AreReadAsNcclTestsReadsThem) {
  EXPECT_EQ(parse_size("8"), 8);
  EXPECT_EQ(parse_size("4K"), 4096);
  EXPECT_EQ(parse_size("1M"), 1 << 20);
  EXPECT_EQ(parse_size("128MiB"), i64{128} << 20);
  EXPECT_EQ(parse_size("2G"), i64{2} << 30);
  EXPECT_EQ(parse_size("1.5K"), 1536);
  EXPECT_EQ(parse_size("1MB"), 1000000);
  EXPECT_EQ(parse_size("8m"), 8 << 20);
  EXPECT_EQ(parse_size("1g"), 1 << 30);
  EXPECT_EQ(parse_size("4k"), 4096);
  for (const char* wrong : {"", "0", "-1", "1X", "K", "1 M", "1.3", "nan", "inf", "1e30", "0x10"})
    EXPECT_THAT(error_of([&] { parse_size(wrong); }), HasSubstr("is not a size")) << wrong;
}

TEST(CommbenchSizes, GrowByAFactorOrAStep) {
  Options o{.min_bytes = 8, .max_bytes = 100};
  EXPECT_THAT(list_sizes(o), ElementsAre(8, 16, 32, 64));
  o.factor = 10;
  EXPECT_THAT(list_sizes(o), ElementsAre(8, 80));
  o.step_bytes = 40;
  EXPECT_THAT(list_sizes(o), ElementsAre(8, 48, 88));
  EXPECT_THAT(list_sizes({.min_bytes = 1 << 20, .max_bytes = 1 << 20}), ElementsAre(1 << 20));
  EXPECT_THAT(list_sizes({.min_bytes = 8, .max_bytes = 8, .factor = 1}), ElementsAre(8));
}

TEST(CommbenchSizes, AreNotEndless) {
  EXPECT_THAT(error_of([] { list_sizes({.min_bytes = 1, .max_bytes = i64{1} << 42, .step_bytes = 1}); }),
              HasSubstr("more than 100000 sizes"));
  EXPECT_EQ(list_sizes({.min_bytes = 1, .max_bytes = i64{1} << 42, .factor = 1 << 20}).size(), 3u);
}

// Expected values are the size and count that nccl-tests prints for these arguments.
TEST(CommbenchSizes, RoundDownAsInNcclTests) {
  const auto size_and_count = [](const char* op, i64 bytes, DType t, int ranks) {
    const Operation& o = operation(op);
    const i64 count = o.count(bytes, t, ranks);
    return std::pair(o.size(count, t, ranks), count);
  };
  EXPECT_EQ(size_and_count("all_reduce", 1000, DType::F32, 3), std::pair(i64{1000}, i64{250}));
  EXPECT_EQ(size_and_count("all_reduce", 7, DType::F16, 3), std::pair(i64{6}, i64{3}));
  EXPECT_EQ(size_and_count("all_gather", 1000, DType::F32, 3), std::pair(i64{960}, i64{80}));
  EXPECT_EQ(size_and_count("reduce_scatter", 1000, DType::BF16, 2), std::pair(i64{992}, i64{248}));
  EXPECT_EQ(size_and_count("all_to_all", 1 << 20, DType::F64, 4), std::pair(i64{1} << 20, i64{32768}));
  EXPECT_EQ(size_and_count("all_to_allv", 1 << 20, DType::F64, 4), std::pair(i64{1} << 20, i64{32768}));
  EXPECT_EQ(size_and_count("gather", 100, DType::I8, 3), std::pair(i64{96}, i64{32}));
  EXPECT_EQ(size_and_count("scatter", 16, DType::F32, 2), std::pair(i64{0}, i64{0}));
  EXPECT_EQ(size_and_count("sendrecv", 1003, DType::F32, 2), std::pair(i64{1000}, i64{250}));

  const Options o{.ops = {"all_gather"}, .min_bytes = 8, .max_bytes = 128};
  EXPECT_THAT(select_operations(o, 2).counts(operation("all_gather"), o, 2),
              ElementsAre(4, 8, 16));  // 8 and 16 leave nothing
}

// A rank sends its size and receives less than a slice more than that, for which targets have room.
TEST(CommbenchSizes, UnevenSharesAreOfTheSize) {
  for (int P = 1; P <= 40; ++P) {
    const i64 count = 1000;
    for (int p = 0; p < P; ++p) {
      i64 sent = 0, received = 0, least = P * count, most = 0;
      for (int q = 0; q < P; ++q) {
        const Share out = uneven_share(P, p, q, count);
        EXPECT_EQ(out.first, sent);
        sent += out.count;
        received += uneven_share(P, q, p, count).count;
        least = std::min(least, out.count);
        most = std::max(most, out.count);
      }
      EXPECT_LE(sent, P * count);
      EXPECT_GT(sent, P * count - P);
      EXPECT_LE(received, P * count + count);
      EXPECT_LE(4 * received, target_bytes(4 * P * count, P));
      if (P >= 3) {
        EXPECT_NEAR(static_cast<double>(most) / static_cast<double>(least), 3, 0.02);
      }
    }
  }
  EXPECT_EQ(uneven_share(2, 0, 1, 300).count, 400);
  EXPECT_EQ(uneven_share(2, 1, 0, 300).count, 240);
}

TEST(CommbenchFactors, AreThoseOfNcclTests) {
  for (const int P : {1, 2, 3, 8}) {
    const double own = static_cast<double>(P - 1) / P;
    for (const auto& [name, factor] : std::vector<std::pair<const char*, double>>{{"all_reduce", 2 * own},
                                                                                  {"reduce_scatter", own},
                                                                                  {"all_gather", own},
                                                                                  {"all_to_all", own},
                                                                                  {"all_to_allv", own},
                                                                                  {"gather", own},
                                                                                  {"scatter", own},
                                                                                  {"broadcast", 1},
                                                                                  {"reduce", 1},
                                                                                  {"sendrecv", 1}})
      EXPECT_DOUBLE_EQ(operation(name).bus_factor(P), factor) << name << " of " << P;
  }
}

TEST(CommbenchStatistics, PercentilesAreByNearestRank) {
  std::vector<double> times(100);
  std::iota(times.begin(), times.end(), 1.0);
  std::shuffle(times.begin(), times.end(), std::mt19937(1));
  const Statistics s = statistics_of(times);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 100);
  EXPECT_DOUBLE_EQ(s.avg, 50.5);
  EXPECT_EQ(s.p50, 50);
  EXPECT_EQ(s.p95, 95);
  EXPECT_EQ(s.p99, 99);
  EXPECT_THAT(s.stdev, DoubleNear(28.866, 1e-3));
  EXPECT_EQ(s.times, times);
  EXPECT_EQ(statistics_of({3, 1, 2}).p99, 3);
  EXPECT_EQ(statistics_of({7}).p50, 7);
}

TEST(CommbenchModel, FindsTheLineThatTimesLieOn) {
  std::vector<double> bytes, seconds;
  for (double b = 8; b <= 1e9; b *= 4) {
    bytes.push_back(b);
    seconds.push_back(5e-6 + b / 12e9);
  }
  LineFit fit = fit_line(bytes, seconds);
  EXPECT_THAT(fit.alpha, DoubleNear(5e-6, 1e-11));
  EXPECT_THAT(fit.beta, DoubleNear(1 / 12e9, 1e-16));
  EXPECT_LT(fit.error, 1e-6);
  // Large messages weigh no more than small ones: 10 % of noise leaves both within 10 %.
  std::mt19937 random(7);
  for (double& s : seconds) s *= std::uniform_real_distribution(0.9, 1.1)(random);
  fit = fit_line(bytes, seconds);
  EXPECT_THAT(fit.alpha, DoubleNear(5e-6, 5e-7));
  EXPECT_THAT(fit.beta, DoubleNear(1 / 12e9, 1e-11));
  EXPECT_LT(fit.error, 0.1);
}

TEST(CommbenchModel, NeitherPartIsNegative) {
  const std::vector<double> bytes = {100, 200, 400};
  const LineFit falling = fit_line(bytes, std::vector<double>{3, 2, 1});
  EXPECT_EQ(falling.beta, 0);
  EXPECT_GT(falling.alpha, 0);
  const LineFit steep = fit_line(bytes, std::vector<double>{1, 4, 16});
  EXPECT_EQ(steep.alpha, 0);
  EXPECT_GT(steep.beta, 0);
}

TEST(CommbenchLinks, HaveClasses) {
  const RankPlace a{.host = "a", .numa_node = 0}, b{.host = "a", .numa_node = 1}, c{.host = "c", .numa_node = 0},
      free{.host = "a"};
  EXPECT_EQ(link_between(a, a, false), "numa");
  EXPECT_EQ(link_between(a, b, false), "host");
  EXPECT_EQ(link_between(a, free, false), "host");
  EXPECT_EQ(link_between(free, free, false), "host");
  EXPECT_EQ(link_between(a, c, false), "network");
  EXPECT_EQ(link_between(a, b, true), "gpu");
  EXPECT_EQ(link_between(a, c, true), "network");
}

TEST(CommbenchOverlap, IsPartOfTheShorter) {
  EXPECT_EQ(overlap_percent(2, 4, 4), 100);
  EXPECT_EQ(overlap_percent(2, 4, 6), 0);
  EXPECT_EQ(overlap_percent(2, 4, 5), 50);
  EXPECT_EQ(overlap_percent(2, 4, 7), 0);
  EXPECT_EQ(overlap_percent(2, 4, 3), 100);
}

// Sums of what ranks send, in several orders and in the type itself, and the reference.
class CommbenchPattern : public ::testing::TestWithParam<DType> {};

double as_number(const std::byte* p, DType t) {
  const auto as = [&]<class T>(T x) {
    std::memcpy(&x, p, sizeof x);
    return x;
  };
  switch (t) {
    case DType::F32: return as(0.0f);
    case DType::F64: return as(0.0);
    case DType::BF16: return to_float(as(bf16{}));
    case DType::F16: return to_float(as(f16{}));
    case DType::I32: return as(i32{});
    default: return static_cast<double>(as(i64{}));
  }
}

// Rounded to the type.
double rounded(double x, DType t) {
  switch (t) {
    case DType::F32: return static_cast<float>(x);
    case DType::BF16: return to_float(to_bf16(static_cast<float>(x)));
    case DType::F16: return to_float(to_f16(static_cast<float>(x)));
    default: return x;
  }
}

TEST_P(CommbenchPattern, SumsAreExactInAnyOrder) {
  constexpr i64 kElements = 300;
  const DType t = GetParam();
  const i64 width = dtype_bytes(t);
  std::mt19937 random(3);
  for (int P = 1; P <= 130; P = P < 9 ? P + 1 : P + 11) {
    for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min}) {
      const Pattern pattern{.ranks = P, .dtype = t, .reduced = true, .op = op, .salt = static_cast<u64>(P)};
      std::vector<std::vector<std::byte>> sent(static_cast<size_t>(P),
                                               std::vector<std::byte>(static_cast<size_t>(kElements * width)));
      for (int q = 0; q < P; ++q) pattern.send(q, 17, sent[q]);
      std::vector<std::byte> expected(static_cast<size_t>(kElements * width));
      pattern.reduce(17, t, expected);
      std::vector<size_t> order(static_cast<size_t>(P));
      std::iota(order.begin(), order.end(), size_t{0});
      for (int turn = 0; turn < 3; ++turn) {
        for (i64 i = 0; i < kElements; ++i) {
          double sum = as_number(sent[order[0]].data() + i * width, t);
          for (size_t k = 1; k < order.size(); ++k) {
            const double x = as_number(sent[order[k]].data() + i * width, t);
            const double exact = op == ReduceOp::Sum   ? sum + x
                                 : op == ReduceOp::Max ? std::max(sum, x)
                                                       : std::min(sum, x);
            sum = rounded(exact, t);
            ASSERT_EQ(sum, exact) << P << " ranks";
          }
          ASSERT_EQ(sum, as_number(expected.data() + i * width, t)) << P << " ranks, element " << i;
        }
        std::shuffle(order.begin(), order.end(), random);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CommbenchPattern,
                         ::testing::Values(DType::F32, DType::F64, DType::BF16, DType::F16, DType::I32, DType::I64),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

TEST(CommbenchPatternBits, DifferByRankIndexAndRound) {
  for (const bool reduced : {false, true}) {
    const auto bytes_of = [&](int rank, i64 first, u64 salt) {
      const Pattern p{.ranks = 4, .dtype = DType::F32, .reduced = reduced, .op = ReduceOp::Sum, .salt = salt};
      std::vector<std::byte> out(4000);
      p.send(rank, first, out);
      return out;
    };
    const auto same = [](const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
      i64 n = 0;
      for (size_t i = 0; i < a.size(); i += 4) n += std::memcmp(&a[i], &b[i], 4) == 0 ? 1 : 0;
      return n;
    };
    const std::vector<std::byte> base = bytes_of(1, 0, 5);
    EXPECT_EQ(base, bytes_of(1, 0, 5));
    EXPECT_LT(same(base, bytes_of(2, 0, 5)), 10);
    EXPECT_LT(same(base, bytes_of(1, 1, 5)), 10);
    EXPECT_LT(same(base, bytes_of(1, 0, 6)), 10);
    std::vector<std::byte> tail(400);  // a part equals that of the whole
    Pattern{.ranks = 4, .dtype = DType::F32, .reduced = reduced, .op = ReduceOp::Sum, .salt = 5}.send(1, 900, tail);
    EXPECT_TRUE(std::equal(tail.begin(), tail.end(), base.end() - 400));
  }
}

// Over threads.
std::vector<Result> measure_over_threads(const Options& options, int ranks) {
  std::vector<Result> results(static_cast<size_t>(ranks));
  run_threads(ranks, {.timeout_s = 60}, [&](Communicator& c) {
    Endpoint e{.backend = "threads", .device = make_cpu_device(*cpu_ops(), 1), .world = &c, .over_device = nullptr};
    results[c.rank()] = measure(options, {&e, 1}, {});
  });
  return results;
}

const std::vector<std::pair<const char*, DType>> kTypes = {
    {"float", DType::F32}, {"double", DType::F64}, {"half", DType::F16},  {"bfloat16", DType::BF16},
    {"int8", DType::I8},   {"uint8", DType::U8},   {"int32", DType::I32}, {"uint32", DType::U32},
    {"int64", DType::I64}, {"uint64", DType::U64}};

class CommbenchRun : public ::testing::TestWithParam<int> {};

TEST_P(CommbenchRun, EveryOperationIsRightInEveryTypeAndForm) {
  const int P = GetParam();
  for (const auto& [name, dtype] : kTypes) {
    for (const char* redop : {"sum", "max", "min"}) {
      for (const Memory memory : {Memory::Shared, Memory::Ordinary}) {
        Options o{.ops = {"all"},
                  .backends = {"threads"},
                  .min_bytes = 600,
                  .max_bytes = 70000,
                  .factor = 100,
                  .dtype = name,
                  .redop = redop,
                  .root = P - 1,
                  .iterations = 2,
                  .memory = memory};
        o.bucket_bytes = 20000;  // several, of which the last is shorter
        const std::vector<Result> results = measure_over_threads(o, P);
        for (const Result& r : results) {
          EXPECT_EQ(r.num_wrong, 0) << name << " " << redop;
          ASSERT_EQ(r.rows.size(), results[0].rows.size());
        }
        size_t rows = 0;
        for (const Operation& op : operation_table()) {
          const ReduceOp reduction = std::string(redop) == "sum"   ? ReduceOp::Sum
                                     : std::string(redop) == "max" ? ReduceOp::Max
                                                                   : ReduceOp::Min;
          if (op.fewest_ranks > P || !op.offers(dtype, reduction)) continue;
          rows += op.has_data ? 2 : 1;
          for (const Row& row : results[0].rows) {
            if (row.op != op.name) continue;
            EXPECT_EQ(row.out_of_place.has_value(), op.has_form(false, dtype));
            EXPECT_EQ(row.in_place.has_value(), op.has_form(true, dtype));
            for (const auto& form : {row.out_of_place, row.in_place}) {
              if (!form) continue;
              EXPECT_GT(form->seconds, 0);
              EXPECT_EQ(form->num_wrong.has_value(), op.has_data);
              EXPECT_DOUBLE_EQ(form->alg_bw, static_cast<double>(row.size) / form->seconds / 1e9);
              EXPECT_DOUBLE_EQ(form->bus_bw, form->alg_bw * op.bus_factor(P));
            }
          }
        }
        EXPECT_EQ(results[0].rows.size(), rows) << name << " " << redop;
        if (std::string(redop) != "sum") break;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommbenchRun, test::values_of<int>({1, 2, 3}, {4, 5}));

TEST(CommbenchFault, OneBitIsFoundInEveryOperation) {
  for (const Operation& op : operation_table()) {
    if (!op.has_data) continue;
    const int receiver = op.name == "bandwidth" ? 1 : 0;  // the one that has something to check
    const Options o{.ops = {std::string(op.name)},
                    .backends = {"threads"},
                    .min_bytes = 4096,
                    .max_bytes = 4096,
                    .iterations = 1,
                    .fault_rank = receiver};
    for (const Result& r : measure_over_threads(o, 3)) {
      const i64 forms = op.has_form(false, DType::F32) + op.has_form(true, DType::F32);
      EXPECT_EQ(r.num_wrong, forms) << op.name;
      ASSERT_TRUE(r.first_wrong);
      EXPECT_EQ(r.first_wrong->op, op.name);
      EXPECT_EQ(r.first_wrong->rank, receiver);
      EXPECT_NE(r.first_wrong->got, r.first_wrong->expected);
    }
  }
}

TEST(CommbenchRuns, BlockingAndStatisticsHaveATimePerIteration) {
  Options o{.ops = {"all_reduce"},
            .backends = {"threads"},
            .min_bytes = 1024,
            .max_bytes = 1024,
            .iterations = 7,
            .blocking = true};
  Result r = measure_over_threads(o, 2)[1];
  const Timing& t = *r.rows[0].in_place;
  ASSERT_TRUE(t.stats);
  EXPECT_EQ(t.stats->times.size(), 7u);
  EXPECT_DOUBLE_EQ(t.seconds, t.stats->avg);
  o.blocking = false;
  o.stats = true;
  r = measure_over_threads(o, 2)[1];
  EXPECT_EQ(r.rows[0].in_place->stats->times.size(), 7u);
  o.stats = false;
  EXPECT_FALSE(measure_over_threads(o, 2)[1].rows[0].in_place->stats);
}

TEST(CommbenchRuns, TheTimeOfTheRanksIsTheSameOnAll) {
  Options o{
      .ops = {"all_gather", "latency"}, .backends = {"threads"}, .min_bytes = 4096, .max_bytes = 4096, .iterations = 3};
  for (const Average average : {Average::Rank0, Average::Mean, Average::Min, Average::Max}) {
    o.average = average;
    const std::vector<Result> results = measure_over_threads(o, 3);  // in pairs, the third is idle
    for (const Result& r : results) {
      for (size_t k = 0; k < r.rows.size(); ++k) {
        EXPECT_EQ(r.rows[k].out_of_place->seconds, results[0].rows[k].out_of_place->seconds);
        EXPECT_GT(r.rows[k].out_of_place->seconds, 0);
        EXPECT_LT(r.rows[k].out_of_place->seconds, 10);
      }
    }
  }
}

TEST(CommbenchRuns, TheMatrixHasEveryPairAndLinksAFew) {
  Options o{.backends = {"threads"}, .min_bytes = 4096, .max_bytes = 4096, .iterations = 2, .matrix = true};
  for (const Result& r : measure_over_threads(o, 4)) {
    ASSERT_EQ(r.pairs.size(), 6u);
    for (const Pair& p : r.pairs) {
      EXPECT_LT(p.from, p.to);
      for (const double x : {p.latency_s, p.bandwidth, p.back_bandwidth, p.both_bandwidth}) EXPECT_GT(x, 0);
    }
    ASSERT_EQ(r.links.size(), 1u);
    EXPECT_EQ(r.links[0].pairs, 6);
  }
  o.matrix = false;
  o.links = true;
  EXPECT_EQ(measure_over_threads(o, 4)[3].links.at(0).pairs, 4);
}

TEST(CommbenchRuns, ModelsAreFittedInPlaceWhereThereIsSuchAForm) {
  const Options o{.ops = {"all_gather", "all_to_all", "barrier"},
                  .backends = {"threads"},
                  .min_bytes = 1024,
                  .max_bytes = 65536,
                  .factor = 8,
                  .iterations = 3};
  const Result r = measure_over_threads(o, 2)[0];
  ASSERT_EQ(r.models.size(), 2u);
  EXPECT_EQ(r.models[0].op, "all_gather");
  EXPECT_EQ(r.models[0].form, "in_place");
  EXPECT_EQ(r.models[1].form, "out_of_place");
  EXPECT_EQ(r.models[0].min_bytes, 1024);
  EXPECT_EQ(r.models[0].max_bytes, 65536);
  EXPECT_GE(r.models[0].alpha_s, 0);
  EXPECT_TRUE(
      measure_over_threads(
          {.ops = {"all_gather"}, .backends = {"threads"}, .min_bytes = 1024, .max_bytes = 1024, .iterations = 1}, 2)[0]
          .models.empty());
}

// The same over the memory of a device, which every call passes on through host memory.
TEST(CommbenchRuns, OverADevice) {
  run_threads(3, {.timeout_s = 60}, [](Communicator& world) {
    Endpoint e{.backend = "staged", .device = make_cpu_device(*cpu_ops(), 1), .world = &world, .over_device = nullptr};
    e.over_device = make_staged_communicator(world, {.timeout_s = 60, .device = e.device.get()});
    const Options o{.ops = {"all"},
                    .backends = {"staged"},
                    .min_bytes = 5000,
                    .max_bytes = 5000,
                    .iterations = 2,
                    .stats = true,
                    .matrix = true};
    const Result r = measure(o, {&e, 1}, {});
    EXPECT_EQ(r.num_wrong, 0);
    EXPECT_EQ(r.rows.size(), operation_table().size());
    EXPECT_EQ(r.pairs.at(0).link, "gpu");
  });
}

TEST(CommbenchRuns, ARankThatFailsEndsTheRunOfAll) {
  try {
    run_threads(3, {.timeout_s = 20}, [](Communicator& c) {
      Endpoint e{.backend = "threads", .device = make_cpu_device(*cpu_ops(), 1), .world = &c, .over_device = nullptr};
      const Options o{.ops = {"all_reduce"}, .backends = {"threads"}, .iterations = 1000000};
      Hooks hooks;
      hooks.on_start = [](const Result&) { throw Error(Errc::Io, "the disk is full"); };
      measure(o, {&e, 1}, hooks);
    });
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Io);
  }
}

TEST(CommbenchOptions, WhatMakesNoSenseIsRefusedInWords) {
  const auto refusal = [](Options o, int ranks = 2) {
    if (o.backends.empty()) o.backends = {"mpi"};
    return error_of([&] { validate(o, {.world_size = ranks, .local_world_size = ranks, .job = ""}); });
  };
  EXPECT_THAT(refusal({.ops = {"all_reduces"}}), HasSubstr("did you mean 'all_reduce'?"));
  EXPECT_THAT(refusal({.ops = {"zzz"}}), HasSubstr("there is no operation 'zzz'; there are all, all_reduce"));
  EXPECT_THAT(refusal({}), HasSubstr("nothing to measure"));
  EXPECT_THAT(refusal({.ops = {"all_reduce"}, .dtype = "int8"}),
              HasSubstr("all_reduce does not offer sum of int8; it offers sum of float, double, half"));
  EXPECT_THAT(refusal({.ops = {"reduce_scatter"}, .redop = "max"}),
              HasSubstr("reduce_scatter does not offer max of float; it offers sum of float, half, bfloat16"));
  EXPECT_THAT(refusal({.ops = {"all_to_all"}, .only_in_place = true}), HasSubstr("all_to_all does not work in place"));
  EXPECT_THAT(refusal({.ops = {"reduce_scatter"}, .dtype = "half", .only_in_place = true}),
              HasSubstr("does not work in place in half"));
  EXPECT_THAT(refusal({.ops = {"sendrecv"}}, 1), HasSubstr("sendrecv needs 2 ranks"));
  EXPECT_THAT(refusal({.ops = {"all_gather"}, .min_bytes = 8, .max_bytes = 31}), HasSubstr("leave no 16 bytes"));
  EXPECT_THAT(refusal({.ops = {"broadcast"}, .root = 2}), HasSubstr("root 2 is not one of 2 ranks"));
  EXPECT_THAT(refusal({.ops = {"broadcast"}, .min_bytes = 9, .max_bytes = 8}), HasSubstr("sizes from 9 to 8"));
  EXPECT_THAT(refusal({.matrix = true}, 1), HasSubstr("pairs need 2 ranks"));
  EXPECT_THAT(refusal({.ops = {"all"}, .backends = {"mpi", "mpi"}}), HasSubstr("compared with itself"));
  EXPECT_THAT(refusal({.ops = {"all"}, .backends = {"shm"}}), HasSubstr("needs a job name"));
  EXPECT_THAT(refusal({.ops = {"all"}, .backends = {"self"}}), HasSubstr("works with one rank"));
  EXPECT_THAT(refusal({.ops = {"all"}, .backends = {"ncll"}}), HasSubstr("did you mean 'nccl'?"));
  EXPECT_THAT(refusal({.ops = {"all"}, .backends = {"nccl"}, .memory = Memory::Ordinary}),
              HasSubstr("--memory ordinary"));
  EXPECT_THAT(refusal({.ops = {"all"}, .check = false, .fault_rank = 0}), HasSubstr("a fault"));
  EXPECT_EQ(refusal({.ops = {"all"}}), "nothing was thrown");
}

TEST(CommbenchOptions, AllLeavesOutWhatCannotBeAndSaysWhy) {
  const Selection selection = select_operations({.ops = {"all"}, .dtype = "int8"}, 1);
  for (const Operation* o : selection.operations) EXPECT_FALSE(o->reduces || o->fewest_ranks > 1) << o->name;
  EXPECT_THAT(selection.left_out, ::testing::Contains(HasSubstr("all_reduce does not offer sum of int8")));
  EXPECT_THAT(selection.left_out, ::testing::Contains(HasSubstr("sendrecv needs 2 ranks")));
}

// Text and documents of one result.
Result example() {
  Result r;
  r.backends = {"shm"};
  r.ranks = {{.host = "a", .device = "cpu.avx2", .cpu = "CPU", .pid = 1},
             {.host = "a", .device = "cpu.avx2", .cpu = "CPU", .pid = 2}};
  r.rows = {{.op = "all_reduce",
             .backend = "shm",
             .size = 33554432,
             .count = 8388608,
             .type = "float",
             .redop = "sum",
             .out_of_place = Timing{.seconds = 12345.6e-6, .alg_bw = 2.718, .bus_bw = 2.718, .num_wrong = 0},
             .in_place = Timing{.seconds = 123.456e-6, .alg_bw = 271.8, .bus_bw = 271.8, .num_wrong = 3}}};
  return r;
}

TEST(CommbenchText, HasNcclTestsColumns) {
  const Result r = example();
  const std::string text = text_row({}, r, r.rows[0]);
  EXPECT_THAT(text,
              HasSubstr("#       size         count      type   redop    root     time   algbw   busbw  #wrong     "
                        "time   algbw   busbw  #wrong\n"));
  EXPECT_THAT(text,
              HasSubstr("\n    33554432       8388608     float     sum      -1  12345.6    2.72    2.72       0   "
                        "123.46  271.80  271.80       3\n"));
}

TEST(CommbenchDocuments, NumbersRoundTripUnderNcclTestsNames) {
  Result r = example();
  r.rows[0].in_place->stats = statistics_of({1e-6, 2e-6, 4e-6});
  r.num_wrong = 3;
  const Json j = Json::parse(json_text({}, r, {"ds-commbench", "--op", "all_reduce"}, {"DS_ISA=avx2"}));
  EXPECT_EQ(j.at("version"), 3);
  const Json& row = j.at("results").at(0);
  EXPECT_EQ(row.at("size"), 33554432);
  EXPECT_EQ(row.at("count"), 8388608);
  EXPECT_EQ(row.at("type"), "float");
  EXPECT_EQ(row.at("redop"), "sum");
  EXPECT_EQ(row.at("root"), -1);
  EXPECT_EQ(row.at("out_of_place").at("time").get<double>(), 12345.6e-6 * 1e6);
  EXPECT_EQ(row.at("in_place").at("bus_bw").get<double>(), 271.8);
  EXPECT_EQ(row.at("in_place").at("nwrong"), 3);
  EXPECT_EQ(row.at("in_place_per_iter").at("times_us").size(), 3u);
  EXPECT_EQ(row.at("in_place_per_iter").at("p99_us").get<double>(), 4e-6 * 1e6);
  EXPECT_FALSE(row.contains("out_of_place_per_iter"));
  EXPECT_EQ(j.at("out_of_bounds").at("count"), 3);
  EXPECT_EQ(j.at("out_of_bounds").at("okay"), false);
  EXPECT_EQ(j.at("devices").size(), 2u);
  EXPECT_EQ(j.at("config").at("step_factor"), 2);
  EXPECT_FALSE(j.at("config").contains("step_bytes"));

  const std::string csv = csv_text(r);
  EXPECT_EQ(std::count(csv.begin(), csv.end(), '\n'), 3);
  for (size_t at = 0, end; (end = csv.find('\n', at)) != std::string::npos; at = end + 1)
    EXPECT_EQ(
        std::count(csv.begin() + static_cast<std::ptrdiff_t>(at), csv.begin() + static_cast<std::ptrdiff_t>(end), ','),
        16);
}

TEST(CommbenchDocuments, LinksHaveASchema) {
  Result r = example();
  r.links = {{.backend = "shm", .link = "numa", .latency_s = 1.25e-6, .bandwidth = 9.5e9, .pairs = 1}};
  r.models = {{.op = "all_reduce",
               .backend = "shm",
               .form = "in_place",
               .ranks = 2,
               .alpha_s = 1e-5,
               .beta_s_per_byte = 1e-10}};
  const Json j = Json::parse(links_json(r));
  EXPECT_EQ(j.begin().key(), "schema");
  EXPECT_EQ(j.at("schema"), "ds-links/1");
  EXPECT_EQ(j.at("hosts").at("a"), 2);
  EXPECT_EQ(j.at("links").at(0).at("latency_s").get<double>(), 1.25e-6);
  EXPECT_EQ(j.at("links").at(0).at("bandwidth_bytes_per_s").get<double>(), 9.5e9);
  EXPECT_EQ(j.at("operations").at(0).at("beta_s_per_byte").get<double>(), 1e-10);
}

}  // namespace commbench_test
}  // namespace ds::commbench
