// SPDX-License-Identifier: Apache-2.0
#include "commbench/overlap.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/clock.h"

namespace ds::commbench {
namespace {

constexpr i64 kWidth = 128;  // of a matrix: a product takes microseconds

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

Computation::Computation(Device& device)
    : device_(device), memory_(device_buffer(device, ledger_, Tag::Workspace, 3 * kWidth * kWidth * 4)) {
  std::vector<float> numbers(static_cast<size_t>(3 * kWidth * kWidth));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = 1.0f / static_cast<float>(1 + i % 7);
  device.upload(memory_.data(), numbers.data(), memory_.bytes());
  run(4);  // grows scratch
  device.synchronize();
}

void Computation::run(i64 products) const {
  const auto matrix = [&](i64 i) {
    return TensorView::of(static_cast<char*>(memory_.data()) + i * kWidth * kWidth * 4, DType::F32, {kWidth, kWidth});
  };
  for (i64 i = 0; i < products; ++i)
    device_.ops().matmul(matrix(0), matrix(1), matrix(2), {}, {}, {}, {.trans_b = true}, device_.stream());
}

double Computation::seconds_of_one() const {
  double best = 1e30;
  for (int turn = 0; turn < 5; ++turn) {
    constexpr i64 kProducts = 20;
    const Clock::time_point start = Clock::now();
    run(kProducts);
    device_.synchronize();
    best = std::min(best, seconds_since(start) / kProducts);
  }
  return best;
}

Overlap measure_overlap(const Endpoint& endpoint, const Timer& timer, const Computation& computation,
                        const Operation& operation, const Task& task) {
  Overlap o{.comm_s = mean(timer.one_by_one(operation, task))};
  double one = computation.seconds_of_one();
  endpoint.world->all_reduce(&one, 1, DType::F64, ReduceOp::Max, "bench").wait();
  const i64 products = std::max<i64>(1, std::llround(o.comm_s / one));
  o.compute_s = mean(timer.one_by_one([&] {
    computation.run(products);
    endpoint.device->synchronize();
  }));
  Tickets tickets;
  o.both_s = mean(timer.one_by_one([&] {
    operation.issue(task, tickets);
    computation.run(products);
    for (Ticket& t : tickets) t.wait();
    tickets.clear();
    endpoint.device->synchronize();
  }));
  o.percent = overlap_percent(o.comm_s, o.compute_s, o.both_s);
  return o;
}

double overlap_percent(double comm_s, double compute_s, double both_s) noexcept {
  return std::clamp(100 * (comm_s + compute_s - both_s) / std::min(comm_s, compute_s), 0.0, 100.0);
}

}  // namespace ds::commbench
