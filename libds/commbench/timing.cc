// SPDX-License-Identifier: Apache-2.0
#include "commbench/timing.h"

#include <chrono>
#include <limits>

#include "base/clock.h"

namespace ds::commbench {
namespace {

constexpr size_t kMostUnderWay = 1024;  // operations: a queue of any length would measure memory

}  // namespace

void Timer::finish(Tickets& tickets) const {
  for (Ticket& t : tickets) t.wait();
  tickets.clear();
  endpoint_.device->synchronize();
  endpoint_.comm().throw_if_failed();
}

void Timer::warm_up(const Operation& operation, const Task& task) const {
  Tickets tickets;
  for (int i = 0; i < options_.warmup; ++i) {
    operation.issue(task, tickets);
    finish(tickets);
  }
}

double Timer::in_a_row(const Operation& operation, const Task& task) const {
  const bool serial = operation.is_serial(task.in_place);
  Tickets tickets;
  endpoint_.world->barrier("bench");
  const auto start = Clock::now();
  for (int i = 0; i < options_.iterations; ++i) {
    // In a serial one the buffers are those of the iteration before.
    const size_t ended = serial ? tickets.size() : tickets.size() < kMostUnderWay ? 0 : kMostUnderWay / 2;
    for (size_t k = 0; k < ended; ++k) tickets[k].wait();
    tickets.erase(tickets.begin(), tickets.begin() + static_cast<std::ptrdiff_t>(ended));
    operation.issue(task, tickets);
  }
  finish(tickets);
  return over_ranks(operation, {seconds_since(start) / options_.iterations}).front();
}

std::vector<double> Timer::time_each(const std::function<void()>& body) const {
  std::vector<double> seconds;
  seconds.reserve(options_.iterations);
  for (int i = 0; i < options_.iterations; ++i) {
    endpoint_.world->barrier("bench");
    const auto start = Clock::now();
    body();
    seconds.push_back(seconds_since(start));
  }
  return seconds;
}

std::vector<double> Timer::one_by_one(const Operation& operation, const Task& task) const {
  Tickets tickets;
  return over_ranks(operation, time_each([&] {
                      operation.issue(task, tickets);
                      finish(tickets);
                    }));
}

std::vector<double> Timer::one_by_one(const std::function<void()>& body) const {
  return over_ranks(time_each(body), true, endpoint_.world->size());
}

std::vector<double> Timer::over_ranks(const Operation& operation, std::vector<double> seconds) const {
  const Communicator& world = *endpoint_.world;
  // The rank that answers does not know when the message was sent.
  const bool asked = operation.is_exchange && operation.has_data;
  const auto counts = [&](int rank) { return takes_part(operation, rank, world.size()) && !(asked && rank % 2 == 1); };
  int num_active = 0;
  for (int r = 0; r < world.size(); ++r) num_active += counts(r) ? 1 : 0;
  for (double& s : seconds) s /= operation.messages;
  return over_ranks(std::move(seconds), counts(world.rank()), num_active);
}

std::vector<double> Timer::over_ranks(std::vector<double> seconds, bool active, int num_active) const {
  Communicator& world = *endpoint_.world;
  const i64 n = std::ssize(seconds);
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const auto reduce = [&](ReduceOp op, double idle) {
    if (!active) std::fill(seconds.begin(), seconds.end(), idle);
    world.all_reduce(seconds.data(), n, DType::F64, op, "bench").wait();
  };
  switch (options_.average) {
    case Average::Rank0: world.broadcast(seconds.data(), n * 8, 0, "bench").wait(); break;
    case Average::Min: reduce(ReduceOp::Min, kNever); break;
    case Average::Max: reduce(ReduceOp::Max, 0); break;
    case Average::Mean:
      reduce(ReduceOp::Sum, 0);
      for (double& s : seconds) s /= num_active;
  }
  return seconds;
}

}  // namespace ds::commbench
