// SPDX-License-Identifier: Apache-2.0
// Coordinates and groups of the mesh; its communicators over threads, over host memory and that of devices.

#include "mesh/mesh.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "../mesh_exercise.h"
#include "../nccl_threads/queued_device.h"
#include "../slow_set.h"
#include "comm/make_communicator.h"

namespace ds {
namespace mesh_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// body(mesh) on a thread per rank; the error of each, if it threw one.
std::vector<std::optional<Error>> run_mesh(const MeshShape& shape, const CommOptions& options,
                                           const std::function<void(Mesh&)>& body,
                                           const Mesh::OverDevice& over_device = {}) {
  auto worlds = make_thread_communicators(shape.world(), options);
  std::vector<std::optional<Error>> errors(worlds.size());
  std::vector<std::jthread> threads;
  for (size_t r = 0; r < worlds.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        const auto device = std::make_unique<test::QueuedDevice>(make_cpu_device(*cpu_ops(), 1));
        CommOptions own = options;
        own.device = device.get();
        Mesh mesh(std::move(worlds[r]), shape, own, over_device);
        mesh.use_links();
        try {
          body(mesh);
        } catch (const Error& e) {
          mesh.abort(e);
          throw;
        }
      } catch (const Error& e) {
        errors[r] = e;
      } catch (const std::exception& e) {
        errors[r] = Error(Errc::Internal, e.what());
      }
    });
  }
  threads.clear();
  return errors;
}

void expect_no_errors(const std::vector<std::optional<Error>>& errors) {
  for (size_t r = 0; r < errors.size(); ++r) EXPECT_FALSE(errors[r]) << "rank " << r << ": " << errors[r]->what();
}

TEST(MeshCoordinates, TensorIsInnermostAndPipelineOutermost) {
  const MeshShape shape{.dp = 2, .pp = 3, .tp = 4, .sp = 5};
  EXPECT_EQ(shape.world(), 120);
  EXPECT_EQ(rank_at(shape, {.tp = 1}), 1);
  EXPECT_EQ(rank_at(shape, {.sp = 1}), 4);
  EXPECT_EQ(rank_at(shape, {.dp = 1}), 20);
  EXPECT_EQ(rank_at(shape, {.pp = 1}), 40);
  EXPECT_EQ(rank_at(shape, {.dp = 1, .pp = 2, .tp = 3, .sp = 4}), 119);
  for (int rank = 0; rank < shape.world(); ++rank) EXPECT_EQ(rank_at(shape, coord_of(shape, rank)), rank);
  EXPECT_THROW(coord_of(shape, 120), Error);
  EXPECT_THROW(rank_at(shape, {.dp = 2}), Error);
}

TEST(MeshCoordinates, GroupsAreWhatDiffersInOneAxis) {
  const MeshShape shape{.dp = 2, .pp = 2, .tp = 2, .sp = 2};
  const MeshCoord c = coord_of(shape, 13);  // 1101: pp 1, dp 1, sp 0, tp 1
  EXPECT_EQ(c, (MeshCoord{.dp = 1, .pp = 1, .tp = 1, .sp = 0}));
  EXPECT_THAT(tp_ranks(shape, c), ElementsAre(12, 13));
  EXPECT_THAT(sp_ranks(shape, c), ElementsAre(13, 15));
  EXPECT_THAT(dp_ranks(shape, c), ElementsAre(9, 11, 13, 15));
  EXPECT_THAT(pp_ranks(shape, c), ElementsAre(5, 13));
}

TEST(MeshCoordinates, WorkersAreMeshesBesideEachOther) {
  const MeshShape shape{.dp = 2, .pp = 2, .tp = 2, .workers = 3};
  EXPECT_EQ(shape.world(), 24);
  EXPECT_EQ(shape.data_size(), 6);
  const MeshCoord c = coord_of(shape, 21);  // 16 + 101: worker 2, pp 1, dp 0, tp 1
  EXPECT_EQ(c, (MeshCoord{.dp = 0, .pp = 1, .tp = 1, .worker = 2}));
  EXPECT_EQ(rank_at(shape, c), 21);
  EXPECT_THAT(dp_ranks(shape, c), ElementsAre(21, 23));
  EXPECT_THAT(tp_ranks(shape, c), ElementsAre(20, 21));
  EXPECT_THAT(pp_ranks(shape, c), ElementsAre(17, 21));
  EXPECT_THAT(outer_ranks(shape, c), ElementsAre(5, 13, 21));
  EXPECT_THAT(split_ranks(shape, {.name = "near", .inner = 2, .along = DpSplit::Along::Inner}, c), ElementsAre(21, 23));
  expect_no_errors(run_mesh({.dp = 2, .workers = 2}, {}, [](Mesh& mesh) {
    EXPECT_EQ(mesh.data_rank(), mesh.rank());
    EXPECT_EQ(mesh.data_size(), 4);
    EXPECT_EQ(mesh.dp().size(), 2);
    i64 ranks[] = {i64{1} << mesh.rank(), i64{1} << mesh.rank()};
    mesh.dp().all_reduce(ranks, 1, DType::I64, ReduceOp::Sum, "dp").wait();
    mesh.outer().all_reduce(ranks + 1, 1, DType::I64, ReduceOp::Sum, "outer").wait();
    EXPECT_EQ(ranks[0], mesh.rank() < 2 ? 0b11 : 0b1100);
    EXPECT_EQ(ranks[1], mesh.rank() % 2 == 0 ? 0b101 : 0b1010);
    EXPECT_EQ(mesh.outer().rank(), mesh.coord().worker);
  }));
}

// Every rank is in one group of each axis, and all members list the same one.
TEST(MeshCoordinates, GroupsOfAnAxisPartitionTheWorld) {
  const MeshShape shape{.dp = 3, .pp = 2, .tp = 5, .sp = 2, .workers = 2};
  for (const auto ranks_of : {dp_ranks, tp_ranks, sp_ranks, pp_ranks, outer_ranks}) {
    std::set<std::vector<int>> groups;
    for (int rank = 0; rank < shape.world(); ++rank) {
      const std::vector<int> group = ranks_of(shape, coord_of(shape, rank));
      EXPECT_EQ(std::count(group.begin(), group.end(), rank), 1);
      EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      groups.insert(group);
    }
    size_t members = 0;
    for (const auto& group : groups) members += group.size();
    EXPECT_EQ(members, static_cast<size_t>(shape.world()));
  }
}

TEST(MeshMemory, SharedMemoryIsTheSumOverAllCommunicators) {
  const std::vector<i64> allocations = {5000, 3 << 20};
  EXPECT_EQ(mesh_shm_bytes({.dp = 4}, allocations, {}), shm_needed_bytes(4, allocations));
  EXPECT_EQ(mesh_shm_bytes({.dp = 2, .sp = 2}, allocations, {}),
            shm_needed_bytes(4, allocations) + 2 * shm_needed_bytes(2, {}) + 4 * shm_channel_bytes());
  EXPECT_EQ(mesh_shm_bytes({.tp = 4}, allocations, {}), 2 * shm_needed_bytes(4, {}));
  EXPECT_EQ(mesh_shm_bytes({.tp = 4}, {}, allocations), shm_needed_bytes(4, {}) + shm_needed_bytes(4, allocations));
  EXPECT_EQ(mesh_shm_bytes({.dp = 3, .pp = 2, .tp = 2}, allocations, {}),
            shm_needed_bytes(12, {}) + 4 * shm_needed_bytes(3, allocations) + 6 * shm_needed_bytes(2, {}) +
                2 * 6 * shm_needed_bytes(2, {}) + 6 * (2 + 2 + 2) * shm_channel_bytes());
  EXPECT_EQ(mesh_shm_bytes({.dp = 2, .workers = 3}, {}, {}, {}, {}, allocations),
            shm_needed_bytes(6, {}) + 3 * shm_needed_bytes(2, {}) + 2 * shm_needed_bytes(3, allocations));
}

class Meshes : public ::testing::TestWithParam<std::tuple<const char*, MeshShape>> {
 protected:
  static Mesh::OverDevice over_device() {
    const std::string_view backend = std::get<0>(GetParam());
    if (backend == "host") return {};
    if (backend == "nccl") setenv("DS_NCCL_LIBRARY", DS_TEST_NCCL, 1);
    return [backend](Communicator& host, const CommOptions& options) {
      if (host.size() == 1) return make_device_self_communicator(host, options);
      return backend == "nccl" ? make_nccl_communicator(host, options) : make_staged_communicator(host, options);
    };
  }
  static MeshShape shape() { return std::get<1>(GetParam()); }
};

// On several kinds of communicators, of which most know no difference between shapes: DS_SLOW=1 tries all.
TEST_P(Meshes, AllAxesWorkAtOnce) {
  const bool host = std::get<0>(GetParam()) == std::string_view("host");
  if (!test::in_slow_set() && shape() != MeshShape{.dp = 2, .pp = 2, .tp = 2} &&
      !(host && shape() == MeshShape{.pp = 3, .sp = 2}))
    GTEST_SKIP() << "DS_SLOW=1 tries it";
  expect_no_errors(run_mesh(
      shape(), {.timeout_s = 60},
      [](Mesh& mesh) {
        test::exercise_mesh(mesh, 3001);
        EXPECT_EQ(mesh.data_rank(), mesh.coord().dp);
        EXPECT_EQ(mesh.data_size(), mesh.shape().dp);
      },
      over_device()));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, Meshes,
    ::testing::Combine(::testing::Values("host", "staged", "nccl"),
                       ::testing::Values(MeshShape{}, MeshShape{.dp = 3, .tp = 2}, MeshShape{.pp = 3, .sp = 2},
                                         MeshShape{.dp = 2, .pp = 2, .tp = 2}, MeshShape{.tp = 4})),
    [](const auto& test) {
      const MeshShape& s = std::get<1>(test.param);
      return fmt::format("{}_dp{}_pp{}_tp{}_sp{}", std::get<0>(test.param), s.dp, s.pp, s.tp, s.sp);
    });

TEST(Mesh, OneAxisIsTheWorld) {
  expect_no_errors(run_mesh({.dp = 2}, {}, [](Mesh& mesh) {
    EXPECT_EQ(&mesh.dp(), &mesh.world());
    EXPECT_EQ(&mesh.tp(), &mesh.sp());
    EXPECT_EQ(mesh.tp().size(), 1);
    EXPECT_EQ(mesh.tp().backend(), "self");
    const i64 before = mesh.staging_bytes();
    EXPECT_EQ(before, mesh.world().staging_bytes());
    std::vector<float> x(40000);
    mesh.tp().all_reduce(x.data(), std::ssize(x), DType::F32, ReduceOp::Sum, "t").wait();
    EXPECT_EQ(mesh.staging_bytes(), before);
  }));
}

TEST(Mesh, CountsAreOfAllCommunicatorsTogether) {
  expect_no_errors(run_mesh({.dp = 2, .pp = 1, .tp = 2}, {}, [](Mesh& mesh) {
    i64 x = 0;
    mesh.world().all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "stats").wait();
    mesh.dp().all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "stats").wait();
    mesh.tp().all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "tp").wait();
    mesh.down().barrier("pp");
    mesh.up().barrier("pp");
    const auto counts = mesh.counts();
    EXPECT_EQ(counts.at("stats").calls, 2);
    EXPECT_EQ(counts.at("stats").bytes, 2 * 3 * 8 / 4 + 2 * 8 / 2);
    EXPECT_EQ(counts.at("tp").calls, 1);
    EXPECT_EQ(counts.at("pp").calls, 2);
    EXPECT_EQ(mesh.tp().counts().size(), 1u);
    EXPECT_EQ(mesh.staging_bytes(),
              mesh.world().staging_bytes() + mesh.dp().staging_bytes() + mesh.tp().staging_bytes());
    mesh.reset_counts();
    EXPECT_TRUE(mesh.counts().empty());
  }));
}

// Collectives of devices that go through host memory are not counted there a second time.
TEST(Mesh, CountsOfDevicesAreThoseOfTheHost) {
  std::vector<std::map<std::string, CommCount>> counts(2);
  const auto body = [&](std::map<std::string, CommCount>& mine) {
    return [&](Mesh& mesh) {
      std::vector<float> x(400);
      mesh.dp().all_reduce(x.data(), 400, DType::F32, ReduceOp::Sum, "dp").wait();
      mesh.tp().all_reduce(x.data(), 400, DType::F32, ReduceOp::Sum, "tp").wait();
      if (mesh.rank() == 0) mine = mesh.counts();
    };
  };
  expect_no_errors(run_mesh({.dp = 2}, {}, body(counts[0])));
  expect_no_errors(run_mesh({.dp = 2}, {}, body(counts[1]), [](Communicator& host, const CommOptions& options) {
    return host.size() == 1 ? make_device_self_communicator(host, options) : make_staged_communicator(host, options);
  }));
  for (const char* tag : {"dp", "tp"}) {
    EXPECT_EQ(counts[0].at(tag).calls, 1);
    EXPECT_EQ(counts[1].at(tag).calls, 1);
    EXPECT_EQ(counts[0].at(tag).bytes, counts[1].at(tag).bytes);
  }
}

// Each rank waits in another axis for somebody who does not come, and the one who fails is in none of most of them.
TEST_P(Meshes, AnErrorOfOneRankIsThatOfAll) {
  const int failing = shape().world() - 1;
  const auto errors = run_mesh(
      shape(), {.timeout_s = 60},
      [&](Mesh& mesh) {
        mesh.world().barrier("t");
        if (mesh.rank() == failing) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          throw Error(Errc::Io, "disk on fire");
        }
        const auto axes = test::axes_of(mesh);
        i64 x = 0;
        for (size_t i = static_cast<size_t>(mesh.rank());; ++i)
          axes[i % axes.size()].communicator.all_reduce(&x, 1, DType::I64, ReduceOp::Sum, "t").wait();
      },
      over_device());
  for (int r = 0; r < shape().world(); ++r) {
    const auto& e = errors[r];
    ASSERT_TRUE(e) << "rank " << r;
    EXPECT_EQ(e->code(), Errc::Io) << e->what();
    if (r == failing) continue;
    EXPECT_EQ(e->rank(), failing) << e->what();
    EXPECT_EQ(std::string(e->what()), fmt::format("rank {} gave up: disk on fire", failing));
  }
}

TEST(Mesh, WhatCannotBeMadeEndsTheOthersToo) {
  const auto errors = run_mesh(
      {.dp = 2, .tp = 2}, {.timeout_s = 60}, [](Mesh& mesh) { mesh.world().barrier("t"); },
      [](Communicator& host, const CommOptions& options) -> std::unique_ptr<Communicator> {
        if (host.world_rank(host.rank()) == 2) throw Error(Errc::OutOfMemory, "no memory for an axis");
        return host.size() == 1 ? make_device_self_communicator(host, options)
                                : make_staged_communicator(host, options);
      });
  for (int r : {0, 1, 3}) {
    ASSERT_TRUE(errors[r]);
    EXPECT_EQ(errors[r]->rank(), 2);
    EXPECT_THAT(errors[r]->what(), HasSubstr("rank 2 gave up: no memory for an axis"));
  }
}

}  // namespace mesh_test
}  // namespace ds
