// SPDX-License-Identifier: Apache-2.0
#pragma once
// A mesh whose axes all work at once: the program of comm_exercise.h on every axis, each driven by a thread of its own,
// with data that differ from group to group, so that a byte that strays into another group is seen; and a pipeline that
// posts its receives ahead while tensor-parallel sums run.

#include <exception>
#include <mutex>
#include <thread>

#include "comm_exercise.h"
#include "mesh/mesh.h"

namespace ds::test {

struct NamedAxis {
  Communicator& communicator;
  std::vector<int> ranks;
};

inline std::vector<NamedAxis> axes_of(const Mesh& mesh) {
  const MeshShape& s = mesh.shape();
  const MeshCoord& c = mesh.coord();
  return {{mesh.dp(), dp_ranks(s, c)},
          {mesh.tp(), tp_ranks(s, c)},
          {mesh.sp(), sp_ranks(s, c)},
          {mesh.down(), pp_ranks(s, c)},
          {mesh.up(), pp_ranks(s, c)}};
}

// Checks the members of an axis: by their world ranks, and by a number that each of them sends.
inline void require_members(Communicator& c, const std::vector<int>& ranks, int own) {
  require(c.size() == std::ssize(ranks) && ranks[c.rank()] == own, "rank and size of an axis");
  std::vector<i64> numbers(ranks.size());
  numbers[c.rank()] = own;
  const AllGatherSegment all{numbers.data(), 8};
  c.all_gather({&all, 1}, "t.members").wait();
  for (int q = 0; q < c.size(); ++q) {
    require(numbers[q] == ranks[q], "members of an axis");
    require(c.world_rank(q) == ranks[q], "world_rank");
  }
}

inline void exercise_axes(Mesh& mesh, i64 big) {
  std::vector<NamedAxis> axes = axes_of(mesh);
  for (const NamedAxis& axis : axes) require_members(axis.communicator, axis.ranks, mesh.rank());
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < axes.size(); ++i) {
    // Axes of size one share a communicator, which one thread at a time may use.
    const bool shared = std::any_of(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(i),
                                    [&](const NamedAxis& a) { return &a.communicator == &axes[i].communicator; });
    if (shared) continue;
    threads.emplace_back([&, i] {
      try {
        exercise(axes[i].communicator, big, static_cast<int>(i + 1) * 100003 + axes[i].ranks.front() * 1009);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
    });
  }
  threads.clear();
  if (error) std::rethrow_exception(error);
}

// Micro-batches go down the stages and their gradients up again, one in flight per stage and more.
inline void exercise_pipeline(Mesh& mesh, i64 elems) {
  const MeshShape& s = mesh.shape();
  const int stage = mesh.coord().pp, last = s.pp - 1, micros = 2 * s.pp + 1;
  const size_t n = static_cast<size_t>(elems);
  const auto sample = [&](int micro) { return static_cast<float>(1 + mesh.coord().dp + 16 * mesh.coord().sp + micro); };
  // A stage adds the sum over tp of (1 + tp); the way back doubles.
  const float added = static_cast<float>(s.tp * (s.tp + 1) / 2);
  std::vector<std::vector<float>> in(static_cast<size_t>(micros), std::vector<float>(n)), back = in, out = in, up = in;
  std::vector<Ticket> arrives(in.size()), returns(in.size()), sent;
  for (size_t m = 0; m < in.size(); ++m) {  // all receives first
    if (stage > 0) arrives[m] = mesh.down().recv(in[m].data(), elems * 4, stage - 1, "t.activations");
    if (stage < last) returns[m] = mesh.up().recv(back[m].data(), elems * 4, stage + 1, "t.gradients");
  }
  const auto forward = [&](int micro) {
    const size_t m = static_cast<size_t>(micro);
    arrives[m].wait();
    if (stage == 0) std::fill(in[m].begin(), in[m].end(), sample(micro));
    std::vector<float> part(n, static_cast<float>(1 + mesh.coord().tp));
    mesh.tp().all_reduce(part.data(), elems, DType::F32, ReduceOp::Sum, "t.tp").wait();
    for (size_t i = 0; i < n; ++i) out[m][i] = in[m][i] + part[i];
    if (stage < last) sent.push_back(mesh.down().send(out[m].data(), elems * 4, stage + 1, "t.activations"));
  };
  const auto backward = [&](int micro) {
    const size_t m = static_cast<size_t>(micro);
    returns[m].wait();
    if (stage == last) back[m] = out[m];
    for (size_t i = 0; i < n; ++i) up[m][i] = 2 * back[m][i];
    if (stage > 0) sent.push_back(mesh.up().send(up[m].data(), elems * 4, stage - 1, "t.gradients"));
  };
  const int ahead = std::min(micros, s.pp - stage);
  for (int m = 0; m < ahead; ++m) forward(m);
  for (int m = 0; m < micros; ++m) {
    backward(m);
    if (m + ahead < micros) forward(m + ahead);
  }
  for (Ticket& t : sent) t.wait();
  for (int m = 0; m < micros; ++m) {
    const float loss = sample(m) + static_cast<float>(s.pp) * added;
    const float expected = loss * static_cast<float>(1 << (s.pp - stage));
    for (const float x : up[m]) require(x == expected, "pipeline");
  }
}

inline void exercise_mesh(Mesh& mesh, i64 big) {
  exercise_axes(mesh, big);
  exercise_pipeline(mesh, big);
  mesh.world().barrier("t.barrier");
}

}  // namespace ds::test
