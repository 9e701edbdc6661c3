// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures and checks communication: every operation of a communicator over a list of sizes, in nccl-tests' columns and
// with its formulas; every pair of ranks; and an alpha-beta model fitted to the results. Bandwidths are in GB/s
// (1e9 bytes).
//
//   algbw = size / time
//   busbw = algbw * factor, the bandwidth of each link:
//     2(P-1)/P  all_reduce, zero_step
//     (P-1)/P   reduce_scatter, all_gather, all_to_all, all_to_allv, gather, scatter, overlap
//     1         all others
//
// `size` is in bytes and that of the whole: of the buffer, or of all P slices where ranks own slices. `count` is then
// the number of elements of one slice; of all_to_allv, whose slices differ, on average.

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ds/error.h"
#include "ds/kernels/dtype.h"
#include "ds/ranks.h"

namespace ds::commbench {

enum class Average { Rank0, Mean, Min, Max };  // which time of the ranks counts
enum class Memory { Shared, Ordinary };        // Communicator::allocate, as in training; or the process's own

struct Options {
  std::vector<std::string> ops{};       // names from operations(); "all" stands for each that these ranks can run
  std::vector<std::string> backends{};  // names from backends(): one, or two that take turns; "auto"
  i64 min_bytes = i64{32} << 20, max_bytes = i64{32} << 20;
  i64 step_bytes = 0;  // 0: sizes grow by `factor`
  i64 factor = 2;
  std::string dtype = "float", redop = "sum";
  int root = 0;
  int iterations = 20, warmup = 1;
  bool check = true;
  bool blocking = false;  // waits for every iteration, each of which begins at a barrier (OSU's method)
  bool stats = false;     // also times iterations one by one
  bool only_in_place = false;
  Average average = Average::Mean;
  Memory memory = Memory::Shared;
  i64 bucket_bytes = i64{64} << 20;  // of zero_step
  bool matrix = false;               // measures every pair of ranks
  bool links = false;                // measures some pairs of every link class
  double timeout_s = 300;
  int fault_rank = -1;  // for tests: the rank in whose received data one bit is flipped before the check; -1: none
};

// Seconds, of iterations that are timed one by one.
struct Statistics {
  double min = 0, avg = 0, max = 0, p50 = 0, p95 = 0, p99 = 0, stdev = 0;
  std::vector<double> times{};
};

// One form (out of place or in place) of one row.
struct Timing {
  double seconds = 0;
  double alg_bw = 0, bus_bw = 0;   // GB/s; 0 if no data moves
  std::optional<i64> num_wrong{};  // empty: not checked
  std::optional<Statistics> stats{};
};

// Communication and computation, each alone and both at once.
struct Overlap {
  double comm_s = 0, compute_s = 0, both_s = 0;
  double percent = 0;  // of the shorter of the two, the share that was hidden, 0 to 100
};

struct Row {
  std::string op{}, backend{};
  i64 size = 0, count = 0;
  std::string type{};   // "none": no data
  std::string redop{};  // "none"
  int root = -1;
  std::optional<Timing> out_of_place{}, in_place{};
  std::optional<Overlap> overlap{};
};

// An element with a wrong value.
struct WrongElement {
  std::string op{}, form{};
  i64 size = 0;
  int rank = -1;
  i64 index = 0;
  std::string got{}, expected{};
};

// t = alpha + beta * (bytes over each link), fitted over the sizes of an operation with the least relative error.
struct AlphaBeta {
  std::string op{}, backend{}, form{};
  int ranks = 0;
  double alpha_s = 0, beta_s_per_byte = 0;
  double error = 0;  // root mean square of the relative error
  i64 min_bytes = 0, max_bytes = 0;
};

// Two ranks communicate while the others are idle. Bandwidths in B/s, with messages of `bytes`.
struct Pair {
  std::string backend{};
  int from = 0, to = 0;
  std::string link{};  // class: "numa" one NUMA node, "host" one host, "network" two hosts, "gpu" GPUs of one host
  double latency_s = 0;
  double bandwidth = 0;       // from -> to
  double back_bandwidth = 0;  // to -> from
  double both_bandwidth = 0;  // both ways at once, summed
  i64 bytes = 0;
};

// The median over the pairs of one class.
struct Link {
  std::string backend{}, link{};
  double latency_s = 0, bandwidth = 0;
  int pairs = 0;
};

struct RankPlace {
  std::string host{}, device{}, cpu{};
  i64 pid = 0;
  int numa_node = -1;  // -1: not bound to one
  int cores = 0;       // cores that it may run on
};

struct Result {
  std::string start_time{}, end_time{};       // ISO 8601, UTC
  std::string mpi_version{}, nccl_version{};  // of the libraries; empty if no backend uses them
  std::vector<std::string> backends{};        // as resolved
  std::vector<RankPlace> ranks{};
  std::vector<std::string> left_out{};  // operations of "all" that these ranks cannot run, with the reason
  std::vector<Row> rows{};
  std::vector<Pair> pairs{};
  std::vector<Link> links{};
  std::vector<AlphaBeta> models{};
  double average_bus_bw = 0;  // over all rows and forms that have a bus bandwidth
  i64 num_wrong = 0;
  std::optional<WrongElement> first_wrong{};
};

struct Hooks {                                    // all optional; called on rank 0 only
  std::function<void(const Result&)> on_start{};  // called when the header is known
  std::function<void(const Result&, const Row&)> on_row{};
  std::function<void(std::string_view)> on_progress{};
};

DS_API std::vector<std::string> operations();
DS_API std::vector<std::string> backends();  // that exist; not: that this machine has
DS_API std::vector<std::string> types();     // nccl-tests' names

// Parses "8", "4K", "1M" or "128MiB" to bytes; K, M, G are powers of 1024, as in nccl-tests. Throws Errc::Config.
DS_API i64 parse_size(std::string_view text);

// Throws what run() would throw before it connects: Errc::Config, which names the valid choices, or Errc::Unavailable
// for a backend that needs GPUs where there are none.
DS_API void validate(const Options& options, const RankInfo& ranks);

// Collective over the job; every rank returns the same result. Throws like communicators do, and Errc::Unavailable for
// a backend that this machine lacks.
DS_API Result run(const Options& options, const RankInfo& ranks, const Hooks& hooks);

// Output in nccl-tests' format; two backends share a line, with the ratio of their times.
DS_API std::string text_header(const Options& options, const Result& result);
DS_API std::string text_row(const Options& options, const Result& result, const Row& row);
DS_API std::string text_footer(const Options& options, const Result& result);
// nccl-tests' JSON (schema version 3) with additional keys. `args` and `environment` ("NAME=value") are those of the
// process.
DS_API std::string json_text(const Options& options, const Result& result, const std::vector<std::string>& args,
                             const std::vector<std::string>& environment);
// The rows as CSV; the pairs if nothing else was measured.
DS_API std::string csv_text(const Result& result);
// Schema "ds-links/1", from which ds-memreport predicts step times.
DS_API std::string links_json(const Result& result);

}  // namespace ds::commbench
