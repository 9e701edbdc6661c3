// SPDX-License-Identifier: Apache-2.0
#include "commbench/links.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "base/check.h"
#include "base/clock.h"
#include "commbench/statistics.h"

namespace ds::commbench {
namespace {

constexpr i64 kSmall = 8;          // bytes of a message whose time is the latency
constexpr int kPairsPerClass = 4;  // that stand for all

// A message there, and one back.
class TwoRanks {
 public:
  TwoRanks(Communicator& comm, Device& device, std::byte* source, std::byte* target, i64 bytes, int peer)
      : comm_(comm), device_(device), source_(source), target_(target), bytes_(bytes), peer_(peer) {}

  double latency(int n) {  // of the rank that asks first
    return timed([&] {
             for (int i = 0; i < n; ++i) exchange_small();
           }) /
           (2 * n);
  }
  void answer(int n) {
    for (int i = 0; i < n; ++i) {
      receive(kSmall);
      send(kSmall);
    }
  }
  // n messages in a row, and an answer at the end.
  double bandwidth(int n) {
    return static_cast<double>(n * bytes_) / timed([&] {
             Tickets tickets;
             for (int i = 0; i < n; ++i) tickets.push_back(comm_.send(source_, bytes_, peer_, "bench"));
             receive(kSmall);
             for (Ticket& t : tickets) t.wait();
           });
  }
  void absorb(int n) {
    Tickets tickets;
    for (int i = 0; i < n; ++i) tickets.push_back(comm_.recv(target_, bytes_, peer_, "bench"));
    for (Ticket& t : tickets) t.wait();
    send(kSmall);
  }
  // n messages in a row each way: bytes per second of both.
  double both_ways(int n) {
    return static_cast<double>(2 * n * bytes_) / timed([&] {
             Tickets tickets;
             for (int i = 0; i < n; ++i) {
               tickets.push_back(comm_.send(source_, bytes_, peer_, "bench"));
               tickets.push_back(comm_.recv(target_, bytes_, peer_, "bench"));
             }
             for (Ticket& t : tickets) t.wait();
           });
  }

 private:
  void send(i64 bytes) { comm_.send(source_, bytes, peer_, "bench").wait(); }
  void receive(i64 bytes) { comm_.recv(target_, bytes, peer_, "bench").wait(); }
  void exchange_small() {
    send(kSmall);
    receive(kSmall);
  }
  template <class F>
  double timed(F&& body) {
    const auto start = Clock::now();
    body();
    device_.synchronize();
    return seconds_since(start);
  }

  Communicator& comm_;
  Device& device_;
  std::byte *source_, *target_;
  i64 bytes_;
  int peer_;
};

}  // namespace

std::string_view link_between(const RankPlace& a, const RankPlace& b, bool over_device) {
  if (a.host != b.host) return "network";
  if (over_device) return "gpu";
  return a.numa_node >= 0 && a.numa_node == b.numa_node ? "numa" : "host";
}

std::vector<Pair> measure_pairs(const Endpoint& e, const std::vector<RankPlace>& places, const Options& options,
                                std::byte* source, std::byte* target, i64 bytes,
                                const std::function<void(std::string_view)>& progress) {
  Communicator& world = *e.world;
  const int P = world.size(), rank = world.rank(), n = options.iterations;
  std::vector<Pair> pairs;
  std::map<std::string_view, int> of_class;
  for (int i = 0; i < P; ++i) {
    for (int j = i + 1; j < P; ++j) {
      const std::string_view link = link_between(places[i], places[j], e.over_device != nullptr);
      if (!options.matrix && ++of_class[link] > kPairsPerClass) continue;
      pairs.push_back({.backend = e.backend, .from = i, .to = j, .link = std::string(link), .bytes = bytes});
    }
  }
  constexpr size_t kNumbers = 4;
  std::vector<double> numbers(pairs.size() * kNumbers);  // each where it was measured, else 0
  for (size_t k = 0; k < pairs.size(); ++k) {
    const auto [i, j] = std::pair(pairs[k].from, pairs[k].to);
    if (progress && rank == 0)
      progress(fmt::format("{} pair {} of {}: ranks {} and {}", e.backend, k + 1, pairs.size(), i, j));
    world.barrier("bench");
    if (rank != i && rank != j) continue;
    TwoRanks two(e.comm(), *e.device, source, target, bytes, rank == i ? j : i);
    double* const out = &numbers[k * kNumbers];
    const int most = std::max(1, options.warmup);
    if (rank == i) {
      two.latency(most);
      out[0] = two.latency(n);
      two.bandwidth(most);
      out[1] = two.bandwidth(n);
      two.absorb(n);
      out[3] = two.both_ways(n);
    } else {
      two.answer(most + n);
      two.absorb(most);
      two.absorb(n);
      out[2] = two.bandwidth(n);
      two.both_ways(n);
    }
  }
  world.all_reduce(numbers.data(), std::ssize(numbers), DType::F64, ReduceOp::Sum, "bench").wait();
  for (size_t k = 0; k < pairs.size(); ++k) {
    const double* const in = &numbers[k * kNumbers];
    pairs[k].latency_s = in[0];
    pairs[k].bandwidth = in[1];
    pairs[k].back_bandwidth = in[2];
    pairs[k].both_bandwidth = in[3];
  }
  return pairs;
}

std::vector<Link> summarize(std::span<const Pair> pairs) {
  std::map<std::pair<std::string, std::string>, std::pair<std::vector<double>, std::vector<double>>> classes;
  for (const Pair& p : pairs) {
    auto& [latencies, bandwidths] = classes[{p.backend, p.link}];
    latencies.push_back(p.latency_s);
    bandwidths.push_back(p.bandwidth);
    bandwidths.push_back(p.back_bandwidth);
  }
  std::vector<Link> links;
  for (const auto& [name, values] : classes)
    links.push_back({.backend = name.first,
                     .link = name.second,
                     .latency_s = median(values.first),
                     .bandwidth = median(values.second),
                     .pairs = narrow<int>(values.first.size())});
  return links;
}

std::vector<AlphaBeta> fit_models(std::span<const Row> rows, int ranks) {
  std::vector<AlphaBeta> models;
  for (const Operation& o : operation_table()) {
    std::map<std::string, std::vector<const Row*>> by_backend;
    for (const Row& r : rows)
      if (r.op == o.name) by_backend[r.backend].push_back(&r);
    for (const auto& [backend, own] : by_backend) {
      std::vector<double> bytes, seconds;
      const bool in_place = own.front()->in_place.has_value();
      for (const Row* r : own) {
        bytes.push_back(o.bus_factor(ranks) * static_cast<double>(r->size));
        seconds.push_back((in_place ? r->in_place : r->out_of_place)->seconds);
      }
      const auto [least, most] = std::ranges::minmax(bytes);
      if (least == most) continue;
      const LineFit fit = fit_line(bytes, seconds);
      models.push_back({.op = std::string(o.name),
                        .backend = backend,
                        .form = in_place ? "in_place" : "out_of_place",
                        .ranks = ranks,
                        .alpha_s = fit.alpha,
                        .beta_s_per_byte = fit.beta,
                        .error = fit.error,
                        .min_bytes = own.front()->size,
                        .max_bytes = own.back()->size});
    }
  }
  return models;
}

}  // namespace ds::commbench
