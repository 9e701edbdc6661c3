// SPDX-License-Identifier: Apache-2.0
#include "commbench/measure.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <ctime>

#include "base/check.h"
#include "comm/make_communicator.h"
#include "comm/nccl_api.h"
#include "commbench/check.h"
#include "commbench/links.h"
#include "commbench/overlap.h"
#include "commbench/selection.h"
#include "commbench/sizes.h"
#include "commbench/statistics.h"
#include "commbench/timing.h"

namespace ds::commbench {
namespace {

constexpr i64 kLeastBytes = 64;          // of a size of pairs
constexpr i64 kHugePage = i64{2} << 20;  // buffers have at least one: small pages slow copies between processes

// An endpoint with what measuring it needs.
class Bench {
 public:
  Bench(const Options& options, const Selection& selection, Endpoint& endpoint)
      : options_(options),
        selection_(selection),
        endpoint_(endpoint),
        timer_(endpoint, options),
        checker_(endpoint, options) {
    const i64 largest = std::max(options.max_bytes, kHugePage);
    source_ = take(source_bytes(largest));
    target_ = take(target_bytes(largest, endpoint.world->size()));
    if (std::ranges::any_of(selection.operations, &Operation::measures_overlap)) computation_.emplace(*endpoint.device);
  }

  ~Bench() { endpoint_.comm().drain(); }  // an exception may have left operations in the queue
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const Endpoint& endpoint() const noexcept { return endpoint_; }

  std::vector<Pair> measure_pairs(const std::vector<RankPlace>& places,
                                  const std::function<void(std::string_view)>& progress) const {
    return commbench::measure_pairs(endpoint_, places, options_, source(), target(),
                                    std::max(options_.max_bytes, kLeastBytes), progress);
  }

  // Counts wrong elements in `result`.
  Row measure(const Operation& o, i64 count, Result& result) {
    const int P = endpoint_.world->size();
    Row row{.op = std::string(o.name),
            .backend = endpoint_.backend,
            .size = o.size(count, selection_.dtype, P),
            .count = count,
            .type = o.has_data ? selection_.type : "none",
            .redop = o.reduces ? selection_.reduction : "none",
            .root = o.has_root ? options_.root : -1};
    for (const bool in_place : {false, true}) {
      if (!o.has_form(in_place, selection_.dtype) || (options_.only_in_place && !in_place)) continue;
      const Task task = make_task(count, in_place);
      (in_place ? row.in_place : row.out_of_place) = time(o, task, row.size, result);
      if (o.measures_overlap) row.overlap = measure_overlap(endpoint_, timer_, *computation_, o, task);
    }
    return row;
  }

 private:
  Buffer take(i64 bytes) {
    return options_.memory == Memory::Shared ? endpoint_.comm().allocate(ledger_, Tag::Buckets, bytes)
                                             : Buffer(ledger_, Tag::Buckets, bytes);
  }

  std::byte* source() const noexcept { return source_.as<std::byte>().data(); }
  std::byte* target() const noexcept { return target_.as<std::byte>().data(); }

  Task make_task(i64 count, bool in_place) const {
    Task task{
        .comm = endpoint_.comm(),
        .device = *endpoint_.device,
        .source = source(),
        .target = target(),
        .dtype = selection_.dtype,
        .redop = selection_.redop,
        .root = options_.root,
        .count = count,
        .in_place = in_place,
        .bucket_elems = slice_count(options_.bucket_bytes, dtype_bytes(selection_.dtype), endpoint_.world->size())};
    set_uneven_slices(task);
    return task;
  }

  Timing time(const Operation& o, const Task& task, i64 size, Result& result) {
    checker_.prepare(o, task);
    timer_.warm_up(o, task);
    Timing t;
    if (!options_.blocking) t.seconds = timer_.in_a_row(o, task);
    if (options_.blocking || options_.stats) t.stats = statistics_of(timer_.one_by_one(o, task));
    if (options_.blocking) t.seconds = t.stats->avg;
    t.alg_bw = static_cast<double>(size) / t.seconds / 1e9;
    t.bus_bw = t.alg_bw * o.bus_factor(task.ranks());
    if (options_.check && o.has_data) {
      const Checker::Verdict verdict = checker_.check(o, task);
      t.num_wrong = verdict.num_wrong;
      result.num_wrong += verdict.num_wrong;
      if (!result.first_wrong) result.first_wrong = verdict.first;
    }
    return t;
  }

  const Options& options_;
  const Selection& selection_;
  Endpoint& endpoint_;
  MemoryLedger ledger_;
  Buffer source_, target_;
  Timer timer_;
  Checker checker_;
  std::optional<Computation> computation_;
};

std::string nccl_version_text() {
  int v = 0;
  nccl::load().GetVersion(&v);  // 21805 is 2.18.5
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

std::string now() {
  const std::time_t t = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  ::gmtime_r(&t, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

double average_bus_bw(const std::vector<Row>& rows) {
  double sum = 0;
  i64 n = 0;
  for (const Row& r : rows) {
    for (const auto* form : {&r.out_of_place, &r.in_place}) {
      if (!*form || r.size == 0) continue;
      sum += (*form)->bus_bw;
      ++n;
    }
  }
  return n > 0 ? sum / static_cast<double>(n) : 0;
}

}  // namespace

Result measure(const Options& options, std::span<Endpoint> endpoints, const Hooks& hooks) {
  Communicator& world = *endpoints.front().world;
  const int P = world.size();
  const Selection selection = select_operations(options, P);
  const auto tell = [&](const auto& hook, auto&&... args) {
    if (hook && world.rank() == 0) hook(args...);
  };
  Result result;
  result.start_time = now();
  result.left_out = selection.left_out;
  result.ranks = gather_places(world, endpoints.front());
  for (const Endpoint& e : endpoints) {
    result.backends.push_back(e.backend);
    if (e.world->backend().find("mpi") != std::string_view::npos) result.mpi_version = mpi_library_version();
    if (e.backend == "nccl") result.nccl_version = nccl_version_text();
  }
  std::vector<std::unique_ptr<Bench>> benches;
  try {
    for (Endpoint& e : endpoints) benches.push_back(std::make_unique<Bench>(options, selection, e));
    tell(hooks.on_start, result);
    for (const Operation* o : selection.operations) {
      for (const i64 count : selection.counts(*o, options, P)) {
        for (const auto& bench : benches) {
          tell(hooks.on_progress,
               fmt::format("{} {} {} bytes", bench->endpoint().backend, o->name, o->size(count, selection.dtype, P)));
          result.rows.push_back(bench->measure(*o, count, result));
          tell(hooks.on_row, result, result.rows.back());
        }
      }
    }
    for (const auto& bench : benches) {
      if (!options.matrix && !options.links) break;
      const std::vector<Pair> pairs = bench->measure_pairs(result.ranks, hooks.on_progress);
      result.pairs.insert(result.pairs.end(), pairs.begin(), pairs.end());
    }
    world.barrier("bench");
  } catch (const Error& e) {  // or benches, which wait for what is under way, would wait for the other ranks
    for (const Endpoint& endpoint : endpoints) endpoint.comm().abort(e);
    throw;
  }
  result.links = summarize(result.pairs);
  result.models = fit_models(result.rows, P);
  result.average_bus_bw = average_bus_bw(result.rows);
  result.end_time = now();
  return result;
}

Result run(const Options& options, const RankInfo& ranks, const Hooks& hooks) {
  validate(options, ranks);
  Worlds worlds(ranks, {.timeout_s = options.timeout_s, .progress_thread = !options.blocking});
  try {
    std::vector<Endpoint> endpoints;
    const std::vector<MessageLink> links =
        message_links(select_operations(options, ranks.world_size), options, ranks.world_size);
    for (const std::string& b : options.backends) endpoints.push_back(connect(b, ranks, worlds, options, links));
    return measure(options, endpoints, hooks);
  } catch (const Error& e) {  // a rank that has not come to the same end yet must end with the same error
    worlds.abort(e);
    throw;
  }
}

}  // namespace ds::commbench
