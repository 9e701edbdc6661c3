// SPDX-License-Identifier: Apache-2.0
#pragma once
// Communication measured and checked: every operation of a communicator over a list of sizes, in nccl-tests' columns
// and by its formulas; every pair of ranks; the alpha-beta model that these fit. Bandwidths are in GB/s, 1e9 bytes.
//
//   algbw = size / time        busbw = algbw * factor of the operation, what each link carries:
//
//   all_reduce, zero_step 2(P-1)/P | reduce_scatter, all_gather, all_to_all, gather, scatter, overlap (P-1)/P | others
//   1
//
// `size` is that of the whole: of the buffer, or of all P slices where ranks own slices, then count is of one slice.

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
  std::vector<std::string> ops{};       // names of operations(); "all" stands for each that these ranks can run
  std::vector<std::string> backends{};  // of backends(): one, or two that take turns; "auto"
  i64 min_bytes = i64{32} << 20, max_bytes = i64{32} << 20;
  i64 step_bytes = 0;  // 0: sizes grow by `factor`
  i64 factor = 2;
  std::string dtype = "float", redop = "sum";
  int root = 0;
  int iterations = 20, warmup = 1;
  bool check = true;
  bool blocking = false;  // every iteration is waited for, and begins at a barrier: OSU's method
  bool stats = false;     // beside the time of iterations in a row, times of single ones
  bool only_in_place = false;
  Average average = Average::Mean;
  Memory memory = Memory::Shared;
  i64 bucket_bytes = i64{64} << 20;  // of zero_step
  bool matrix = false;               // every pair of ranks
  bool links = false;                // some pairs of every link class
  double timeout_s = 300;
  int fault_rank = -1;  // for tests: one bit of what this rank received is changed before it is checked
};

// Seconds; of iterations that are timed one by one.
struct Statistics {
  double min = 0, avg = 0, max = 0, p50 = 0, p95 = 0, p99 = 0, stdev = 0;
  std::vector<double> times{};
};

// One form (out of place, in place) of one row.
struct Timing {
  double seconds = 0;
  double alg_bw = 0, bus_bw = 0;   // GB/s; 0 where no data moves
  std::optional<i64> num_wrong{};  // nothing: not checked
  std::optional<Statistics> stats{};
};

// What communication cost beside computation.
struct Overlap {
  double comm_s = 0, compute_s = 0, both_s = 0;
  double percent = 0;  // of the shorter of the two that was hidden, 0 to 100
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

// An element that was not what it should be.
struct WrongElement {
  std::string op{}, form{};
  i64 size = 0;
  int rank = -1;
  i64 index = 0;
  std::string got{}, expected{};
};

// t = alpha + beta * (bytes that each link carries), fitted over the sizes of an operation by least relative error.
struct AlphaBeta {
  std::string op{}, backend{}, form{};
  int ranks = 0;
  double alpha_s = 0, beta_s_per_byte = 0;
  double error = 0;  // root mean square of the relative error
  i64 min_bytes = 0, max_bytes = 0;
};

// Two ranks, the others idle. Bandwidth of messages of `bytes` in B/s.
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

// The median of the pairs of a class.
struct Link {
  std::string backend{}, link{};
  double latency_s = 0, bandwidth = 0;
  int pairs = 0;
};

struct RankPlace {
  std::string host{}, device{}, cpu{};
  i64 pid = 0;
  int numa_node = -1;  // -1: not bound to one
  int cores = 0;       // that it may run on
};

struct Result {
  std::string start_time{}, end_time{};       // ISO 8601, UTC
  std::string mpi_version{}, nccl_version{};  // of the libraries, where a backend uses them; empty: none does
  std::vector<std::string> backends{};        // as resolved
  std::vector<RankPlace> ranks{};
  std::vector<std::string> left_out{};  // operations of "all" that these ranks cannot run, and why
  std::vector<Row> rows{};
  std::vector<Pair> pairs{};
  std::vector<Link> links{};
  std::vector<AlphaBeta> models{};
  double average_bus_bw = 0;  // over all forms of all rows that have one
  i64 num_wrong = 0;
  std::optional<WrongElement> first_wrong{};
};

struct Hooks {                                    // all optional; called on rank 0 only
  std::function<void(const Result&)> on_start{};  // the header is known
  std::function<void(const Result&, const Row&)> on_row{};
  std::function<void(std::string_view)> on_progress{};
};

DS_API std::vector<std::string> operations();
DS_API std::vector<std::string> backends();  // that exist; not: that this machine has
DS_API std::vector<std::string> types();     // nccl-tests' names

// "8", "4K", "1M", "128MiB": K, M, G are powers of 1024, as in nccl-tests. Throws Errc::Config.
DS_API i64 parse_size(std::string_view text);

// Throws what run() would throw before it connects: Errc::Config naming what is offered, Errc::Unavailable without GPUs
// for a backend that wants them.
DS_API void validate(const Options& options, const RankInfo& ranks);

// Collective over the job. Every rank returns the same. Throws as communicators do; Errc::Unavailable for a backend
// that this machine lacks.
DS_API Result run(const Options& options, const RankInfo& ranks, const Hooks& hooks);

// nccl-tests' lines; with two backends both stand in one line, with the ratio of their times.
DS_API std::string text_header(const Options& options, const Result& result);
DS_API std::string text_row(const Options& options, const Result& result, const Row& row);
DS_API std::string text_footer(const Options& options, const Result& result);
// nccl-tests' JSON, schema version 3, with more keys. `args`, `environment` ("NAME=value"): of the process.
DS_API std::string json_text(const Options& options, const Result& result, const std::vector<std::string>& args,
                             const std::vector<std::string>& environment);
// Of the rows; of the pairs, where nothing else was measured.
DS_API std::string csv_text(const Result& result);
// "ds-links/1": what ds-memreport predicts the times of steps from.
DS_API std::string links_json(const Result& result);

}  // namespace ds::commbench
