// SPDX-License-Identifier: Apache-2.0
// The stores of parameters and gradients by themselves: the values that they publish, gather and sum, the number of
// calls, and the contents and size of their memory.

#include <gtest/gtest.h>

#include <algorithm>

#include "comm/make_communicator.h"
#include "plan/counting_device.h"
#include "zero/grad_store.h"
#include "zero/param_store.h"

namespace ds::zero {
namespace zero_store_test {

using Rows = std::vector<model::ParamRow>;
using Units = std::vector<std::span<const model::ParamRow>>;

// Matrices and vectors; the third unit has nothing, the last is large. All sums of its rows leave padding.
const std::vector<Rows>& units() {
  static const std::vector<Rows> all = {
      {{.name = "a", .shape = {7, 9}}, {.name = "b", .shape = {5}}},
      {{.name = "c", .shape = {100}}, {.name = "d", .shape = {3, 70}}, {.name = "f", .shape = {20}}},
      {},
      {{.name = "e", .shape = {40, 13}}}};
  return all;
}
Units spans() { return {units().begin(), units().end()}; }

LayoutOptions cut(int ranks, int stage) { return {ranks, stage, 100, 120, {}}; }  // stage 3 keeps a, b and f; not c

i64 key(const Layout& layout, const Segment& s, i64 at) { return (&s - layout.segments().data()) * 10000 + at; }

TEST(Buckets, AreFilledInTheOrderOfThePass) {
  const Layout layout = Layout::make(spans(), cut(2, 2));  // 256, 512, 0, 768 elements, padded
  const auto text = [&](std::vector<std::vector<i64>> passes, i64 elems, std::vector<i64> beside = {}) {
    std::string s;
    for (const Bucket& b : plan_buckets(layout, {.bucket_elems = elems, .passes = passes, .beside = beside})) {
      for (const i64 unit : b.units) s += std::to_string(unit) + " ";
      s += "(" + std::to_string(b.elems) + ") ";
    }
    return s;
  };
  EXPECT_EQ(text({{3, 2, 1, 0}}, 1), "3 (768) 2 (0) 1 (512) 0 (256) ");  // a larger one goes alone
  EXPECT_EQ(text({{3, 2, 1, 0}}, 767), "3 (768) 2 1 (512) 0 (256) ");
  EXPECT_EQ(text({{3, 2, 1, 0}}, 768), "3 2 (768) 1 0 (768) ");
  EXPECT_EQ(text({{3, 2, 1, 0}}, 1279), "3 2 (768) 1 0 (768) ");
  EXPECT_EQ(text({{3, 2, 1, 0}}, 1280), "3 2 1 (1280) 0 (256) ");
  EXPECT_EQ(text({{3, 2, 1, 0}}, 1536), "3 2 1 0 (1536) ");
  EXPECT_EQ(text({{3}, {2, 1, 0}}, 1536), "3 (768) 2 1 0 (768) ");  // none waits for a second instruction
  EXPECT_EQ(text({{3, 1, 0}}, 1, {1}), "3 1 (1280) 0 (256) ");      // what is written together is in one
}

struct Case {
  int ranks, stage;
  bool each_micro, overlap;
  DType work, wire;
};

GradOptions grad_options(const Case& c, i64 micro_batches) {
  return {.work = c.work,
          .wire = c.wire,
          .bucket_elems = 300,
          .passes = {{3, 2}, {1, 0}},
          .beside = {0},
          .overlap = c.overlap,
          .micro_batches = micro_batches,
          .reduce_each_micro = c.each_micro};
}

TEST(GradStore, TakesWhatItsStageNeeds) {
  const auto sizes = [](int stage, bool each_micro, bool overlap, DType wire) {
    const Layout layout = Layout::make(spans(), cut(2, stage));
    const GradOptions options = grad_options({2, stage, each_micro, overlap, DType::F32, wire}, 2);
    const std::vector<Bucket> buckets = plan_buckets(layout, options);  // 768 and 512 + 256
    return std::vector<i64>{grad_accum_elems(layout, options), fresh_grad_elems(layout, buckets, options),
                            staging_elems(layout, options)};
  };
  using Sizes = std::vector<i64>;
  EXPECT_EQ(sizes(0, true, true, DType::F32), (Sizes{1536, 1536, 0}));
  EXPECT_EQ(sizes(1, true, true, DType::F32), (Sizes{768, 1536, 0}));
  EXPECT_EQ(sizes(1, false, true, DType::F32), (Sizes{1536, 1536, 0}));
  EXPECT_EQ(sizes(2, true, true, DType::F32), (Sizes{768, 2 * 768, 0}));
  EXPECT_EQ(sizes(2, true, false, DType::F32), (Sizes{768, 768, 0}));
  EXPECT_EQ(sizes(2, true, false, DType::F16), (Sizes{768, 768, 768 + 256}));  // staged: the largest, and one beside
  const Layout one = Layout::make(spans(), cut(1, 2));
  const GradOptions options = grad_options({1, 2, true, true, DType::F32, DType::F32}, 1);
  const std::vector<Bucket> all = plan_buckets(one, {.bucket_elems = 1 << 20, .passes = {{3, 2, 1, 0}}});
  EXPECT_EQ(fresh_grad_elems(one, all, options), all.front().elems);  // no second slot for a second bucket
}

// Sums of small integers, which no order and no type changes, over ranks, micro-batches and steps; and zeros in the
// padding, whatever a slot held before.
TEST(GradStore, SumsOverRanksAndMicroBatches) {
  constexpr i64 kMicros = 3, kSteps = 2;
  const auto value = [](int rank, i64 micro, i64 step, i64 unit, i64 row, i64 i) {
    return static_cast<float>((i * 7 + row * 3 + unit + rank * 5 + micro * 2 + step) % 17 - 8);
  };
  std::vector<Case> cases;
  for (const int ranks : {1, 2, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      for (const bool each_micro : {true, false}) {
        if (!each_micro && stage >= 2) continue;
        cases.push_back({ranks, stage, each_micro, stage % 2 == 0, DType::F32, DType::F32});
        cases.push_back({ranks, stage, each_micro, stage % 2 == 1, DType::BF16, DType::BF16});
        cases.push_back({ranks, stage, each_micro, true, DType::F32, DType::F16});  // staged
      }
    }
  }
  for (const Case& c : cases) {
    const Layout layout = Layout::make(spans(), cut(c.ranks, c.stage));
    run_threads(c.ranks, {.timeout_s = 20, .progress_thread = c.overlap}, [&](Communicator& comm) {
      SCOPED_TRACE(fmt::format("rank {} of {}, stage {}, each {}, {} over {}", comm.rank(), c.ranks, c.stage,
                               c.each_micro, dtype_name(c.work), dtype_name(c.wire)));
      const auto device = make_cpu_device(*cpu_ops(), 1);
      MemoryLedger ledger;
      GradStore store(layout, spans(), grad_options(c, kMicros), {{comm}, *device, ledger});
      for (i64 step = 0; step < kSteps; ++step) {
        for (i64 micro = 0; micro < kMicros; ++micro) {
          // 0 is written beside 1: both are there at once.
          for (const std::vector<i64>& together : {std::vector<i64>{3}, {2}, {1, 0}}) {
            for (const i64 unit : together) {
              const Rows& rows = units()[unit];
              const std::span<const TensorView> views = store.acquire(unit);
              ASSERT_EQ(views.size(), rows.size());
              for (size_t r = 0; r < rows.size(); ++r) {
                ASSERT_EQ(views[r].numel(), rows[r].numel());
                ASSERT_EQ(views[r].rank, narrow<int>(std::ssize(rows[r].shape)));
                for (i64 i = 0; i < views[r].numel(); ++i) {
                  const float x = value(comm.rank(), micro, step, unit, static_cast<i64>(r), i);
                  if (views[r].dtype == DType::F32) views[r].as<float>()[i] = x;
                  if (views[r].dtype == DType::BF16) views[r].as<bf16>()[i] = to_bf16(x);
                }
              }
            }
            for (const i64 unit : together) store.commit(unit, micro);
          }
        }
        store.finish();
        const std::vector<i64> wanted = {0, 3};
        store.gather(wanted);
        for (const Segment& s : layout.segments()) {
          const bool whole = c.stage == 0 && s.unit != 1;
          const i64 begin = whole ? 0 : s.slice * comm.rank(), end = whole ? s.slice * c.ranks : begin + s.slice;
          std::vector<float> want(static_cast<size_t>(s.slice * c.ranks), 0.0f);
          const UnitPlace& unit = layout.units()[s.unit];
          for (size_t r = 0; r < units()[s.unit].size(); ++r) {
            const RowPlace& row = layout.rows()[static_cast<size_t>(unit.first_param) + r];
            if (&layout.segments()[row.segment] != &s) continue;
            for (i64 i = 0; i < row.numel; ++i) {
              for (int rank = 0; rank < c.ranks; ++rank) {
                for (i64 micro = 0; micro < kMicros; ++micro)
                  want[row.offset + i] += value(rank, micro, step, s.unit, static_cast<i64>(r), i);
              }
            }
          }
          for (i64 at = begin; at < end; ++at)
            ASSERT_EQ(*store.sums().lease(&s - layout.segments().data(), at, 1, LeaseTo::Read).values(), want[at])
                << "step " << step << " unit " << s.unit << " at " << at;
        }
      }
      comm.barrier("end");
    });
    if (HasFailure()) return;
  }
}

// All-gathers that publish() makes.
i64 num_publish_calls(const Units& rows, const LayoutOptions& options, i64 bucket) {
  plan::Addresses addresses;
  plan::CountingDevice device(no_ops(), nullptr, addresses);
  plan::CountingCommunicator comm(0, options.num_ranks, &addresses);
  MemoryLedger ledger;
  const Layout layout = Layout::make(rows, options);
  ParamStore(layout, rows, comm, device, ledger, {.allgather_bucket = bucket}).publish();
  return comm.counts()["dp.all_gather"].calls;
}

TEST(ParamStore, PublishesInGroupsOfItsBucket) {
  const auto calls = [](int stage, i64 bucket) {
    return num_publish_calls(spans(), cut(2, stage), bucket);  // 256, 512 and 768 elements
  };
  EXPECT_EQ(calls(0, 1), 0);
  for (const int stage : {1, 2}) {
    EXPECT_EQ(calls(stage, 1), 3);
    EXPECT_EQ(calls(stage, 767), 3);
    EXPECT_EQ(calls(stage, 768), 2);
    EXPECT_EQ(calls(stage, 1279), 2);
    EXPECT_EQ(calls(stage, 1535), 2);
    EXPECT_EQ(calls(stage, 1536), 1);
  }
  EXPECT_EQ(calls(3, 1), 2);  // the persistent ones
  EXPECT_EQ(calls(3, 512), 1);
  EXPECT_EQ(num_publish_calls(spans(), {.num_ranks = 2, .stage = 3}, 1), 0);
  // A group that follows a full one is filled anew.
  Units last_first = spans();
  std::ranges::reverse(last_first);  // 768, 512 and 256
  EXPECT_EQ(num_publish_calls(last_first, cut(2, 2), 768), 2);
}

TEST(ParamStore, HasAllThatALeaseNamesAndNothingElse) {
  for (const int ranks : {1, 2, 3}) {
    for (int stage = 0; stage <= 3; ++stage) {
      const Layout layout = Layout::make(spans(), cut(ranks, stage));
      std::vector<i64> gathered;
      for (size_t u = 0; u < units().size(); ++u) {
        gathered.push_back(0);
        for (const Segment& s : layout.segments_of(static_cast<i64>(u)))
          gathered.back() += stage == 3 && !s.persistent ? s.slice * ranks : 0;
      }
      const std::vector<Access> accesses = {{0}, {1}, {2}, {3, 1}, {1, 0}};
      const GatherPlan plan = plan_gathers(accesses, gathered, {600, 4000, 300});
      run_threads(ranks, {.timeout_s = 20}, [&](Communicator& comm) {
        SCOPED_TRACE(fmt::format("rank {} of {}, stage {}", comm.rank(), ranks, stage));
        const auto device = make_cpu_device(*cpu_ops(), 1);
        MemoryLedger ledger;
        ParamStore store(layout, spans(), comm, *device, ledger,
                         {.work = DType::F32, .allgather_bucket = 600, .pool_elems = plan.pool_elems});
        for (i64 step = 0; step < 3; ++step) {
          for (const Segment& s : layout.segments()) {
            const auto [first, count] = layout.held(s, comm.rank());
            for (i64 at = first; at < first + count; ++at)
              *store.lease(s, at, 1, LeaseTo::Write).values() = static_cast<float>(key(layout, s, at) + step);
          }
          comm.reset_counts();
          store.publish();
          EXPECT_EQ(comm.counts()["dp.all_gather"].calls, num_publish_calls(spans(), cut(ranks, stage), 600));
          store.begin(plan);
          std::vector<bool> here(units().size(), false);
          for (size_t a = 0; a < accesses.size(); ++a) {
            for (const auto& launch : plan.steps[a].launch) here[launch.unit] = true;
            ParamLease first = store.acquire();
            const ParamLease lease = std::move(first);
            for (size_t u = 0; u < units().size(); ++u) {
              const std::span<const TensorView> rows = lease.rows(static_cast<i64>(u));
              ASSERT_EQ(rows.size(), units()[u].size());
              for (size_t r = 0; r < rows.size(); ++r) {
                const RowPlace& row = layout.rows()[static_cast<size_t>(layout.units()[u].first_param) + r];
                const Segment& s = layout.segments()[row.segment];
                ASSERT_EQ(rows[r].rank, narrow<int>(std::ssize(units()[u][r].shape)));
                ASSERT_EQ(rows[r].numel(), row.numel);
                const bool whole = stage < 3 || s.persistent;
                ASSERT_EQ(rows[r].data != nullptr, whole || here[u]) << "access " << a << " unit " << u << " row " << r;
                const bool named = std::ranges::find(accesses[a], static_cast<i64>(u)) != accesses[a].end();
                for (i64 i = 0; (whole || named) && i < row.numel; ++i)
                  ASSERT_EQ(rows[r].as<float>()[i], static_cast<float>(key(layout, s, row.offset + i) + step));
              }
            }
            for (const i64 unit : plan.steps[a].release) here[unit] = false;
          }
        }
        comm.barrier("end");
      });
      if (HasFailure()) return;
    }
  }
}

}  // namespace zero_store_test
}  // namespace ds::zero
