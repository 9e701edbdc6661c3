// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predicts the needs of a run before it starts: memory of each rank by tag, traffic, and work. The numbers come from
// the plan by which the engine allocates and communicates (plan/run_plan).

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ds/config.h"
#include "ds/mesh.h"
#include "ds/session_sizes.h"
#include "ds/train.h"

namespace ds::memreport {

struct Source {
  ConfigResult config;  // read for `ranks`
  int ranks = 1;
  std::string text, name;              // of the configuration
  std::vector<std::string> overrides;  // applied to the configuration
  ProgramParts parts = {};             // of the program
  // ExpertsConfig::loads, for all that is predicted; see take_expert_loads.
  std::vector<std::vector<i64>> expert_loads = {};
};

// Reads a configuration from `path`, which is one of: a configuration file ("-": standard input); a model (a directory
// with a config.json, or such a file), trained in bf16 with one sample per micro-batch unless `overrides` change that;
// one of our checkpoints (a run directory or a step). `overrides` are those of load_config. ranks 0: those of the
// checkpoint, else 1. Diagnostics are in the result. Throws Errc::Io for files that cannot be read, Errc::Unavailable
// for checkpoints that do not record their model, or whose model is a program's that `parts` lacks, and like
// find_checkpoint.
DS_API Source open_source(const std::string& path, std::span<const std::string> overrides, int ranks,
                          const ProgramParts& parts = {});

struct World {
  int ranks = 1;
  int nodes = 1;               // divides ranks: rank r is on node r / (ranks / nodes)
  int compute_capability = 9;  // of its GPUs: the major number
};

struct TagBytes {
  std::string tag;  // "params", "optimizer", ...; all tools use the same list
  i64 bytes = 0;
  Bound bound = Bound::Exact;
  bool operator==(const TagBytes&) const = default;
};

struct Traffic {
  std::string name;          // "axis.collective": "dp.reduce_scatter"
  i64 calls = 0, bytes = 0;  // sent by a rank in a step
  bool operator==(const Traffic&) const = default;
};

// Ranks with the same needs, or nearly the same: slices of parameters may differ between ranks, and with them their
// states and traffic. Each number is the maximum over the ranks; numbers that differ are marked as bounds.
struct RankGroup {
  std::vector<int> ranks;  // ascending
  int stage = 0;           // of the pipeline
  i64 num_params = 0;      // number of parameters that these ranks compute with
  std::vector<TagBytes> memory;
  std::vector<TagBytes> files;  // of offloaded data: files on NVMe, or with `served` the states at a server
  bool served = false;          // the states in `files` are with a server
  i64 file_read_bytes = 0, file_written_bytes = 0;  // per rank and step
  // Device memory of the rank that needs most: the sum of all tags, except "host" on GPUs. May be less than the sum of
  // the tags' maxima.
  i64 device_bytes = 0;
  i64 host_bytes = 0;  // host memory, for runs on GPUs
  // Memory of a CPU process beside device_bytes: constantly, and at most for a moment. Measured, not exact.
  i64 process_bytes = 0, momentary_bytes = 0;
  std::vector<Traffic> traffic;
  // Average bytes per step, if steps differ; `traffic` is then that of the last step.
  std::map<std::string, i64> mean_traffic;
  std::map<std::string, i64> most_traffic;  // see RunPrediction::most_comm_bytes
  std::set<std::string> uneven_traffic;     // names of messages of which some of these ranks send less
};

// Host memory that the ranks of a node need together; on the CPU that is all of their memory.
struct NodeBytes {
  int node = 0;
  i64 host_bytes = 0;
};

struct Prediction {
  World world;
  MeshShape mesh;
  i64 expert_ranks = 1;         // ranks of dp that have all experts together
  std::string device;           // "cpu", "cuda"
  i64 num_params = 0;           // of the whole model
  i64 num_active_params = 0;    // those that a token uses: fewer if there are experts
  i64 tokens_per_step = 0;      // of all ranks
  double flops_per_token = 0;   // forward and backward, without recomputation, with full attention
  bool measured_loads = false;  // of experts: take_expert_loads
  // Idle share of the ranks' time in the pipeline, if a backward pass takes as long as two forward passes.
  double bubble_fraction = 0;
  std::vector<RankGroup> groups;  // in order of stages
  size_t worst = 0;               // index of the group with the largest device_bytes
  NodeBytes fullest;              // the node that needs most

  const RankGroup& worst_group() const { return groups[worst]; }
};

// Predictions of this source, which has a model with experts, take the loads of experts that the steps of a
// metrics.jsonl (or of a run directory with one) counted: the shares of the busiest of the ranks that divide them.
// Throws Errc::Config if the counts are none of this model's, and the errors of read_metrics.
DS_API void take_expert_loads(Source& source, const std::string& metrics);

// Predicts a run of `config`, which was read for these ranks and states a model. The `device` may be missing on this
// machine; Auto is the CPU. Throws Errc::Config if the ranks do not spread evenly over the nodes, and the errors of a
// run whose model cannot be built. Reads no file.
DS_API Prediction predict(const Config& config, const World& world, DeviceKind device);

// Totals of all calls of an op. The time of each call is the longest of its computation, its memory traffic and its
// start.
struct OpTime {
  i64 calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};

// Seconds of a training step, by cause (memreport/step_time.h).
struct StepTime {
  // For the slowest stage, summed over its micro-batches.
  double compute_s = 0;                 // ops of its passes, gradients included
  double recompute_s = 0;               // part of compute_s
  double in_layer_communication_s = 0;  // of tp and sp; part of the passes
  double pipeline_s = 0;                // all passes of all stages, from the first to the last
  double bubble_fraction = 0;           // idle time of stages / all time
  std::vector<double> stage_idle_s{};   // of each pipeline stage, in pipeline_s; empty without a pipeline
  double communication_s = 0;           // exposed: of dp during the passes and after them, without the publication
  double hidden_s = 0;                  // hidden: of dp
  double optimizer_s = 0;
  double publish_s = 0;  // all-gathers of parameters
  double files_s = 0;    // exposed: reads and writes of offload files
  double copies_s = 0;   // between a GPU and its host, for offload
  // True for a GPU run that offloads, if the hardware's rates for that are unknown: the times then lack copies between
  // GPU and host, and updates on the host.
  bool lacks_offload = false;
  // Additional waiting for cores, if the threads of a node's ranks outnumber its cores.
  double cores_s = 0;
  double step_s = 0;  // pipeline + communication + optimizer + publish + files + copies + cores
  double tokens_per_s = 0;
  double mfu = 0;  // from Model::flops_per_token and Machine::matmul_flops, over all ranks
  // By "axis.collective": all of that stage's communication, hidden or not.
  std::map<std::string, double> messages_s;
  // By op, for one rank of that stage: its passes, gradients and optimizer. Sums within a reduction count as
  // communication.
  std::map<std::string, OpTime> ops;
};

// The speed of a machine's parts, measured or from data sheets. Copies share one value.
class DS_API Hardware {
 public:
  struct Peaks {
    double flops = 0;              // FLOP/s of a rank in large products
    double memory = 0;             // B/s of a rank; 0: bytes take no time
    double link = 0, network = 0;  // B/s of a rank each way: inside a node, between nodes; 0: unknown
    double host = 0;               // B/s of a GPU each way, to and from its host; 0: unknown
    double disk = 0;               // B/s of a node's disk; 0: unknown
  };
  // The data sheet's values for one GPU of gpus(): dense 16-bit products, NVLink, PCI Express, and the network that its
  // maker combines with it. Throws Errc::Config for other names.
  static Peaks gpu(const std::string& name);
  static int compute_capability(const std::string& gpu);  // its major number
  static std::vector<std::string> gpus();
  // Reads files of the schemas "ds-machine/1" (see json()) and "ds-links/1" (ds-commbench --save); `links` may be empty
  // if no rank sends anything. Throws Errc::Io, Errc::Config.
  static Hardware read(const std::string& machine, const std::string& links);
  // Ideal hardware: 16- and 32-bit products at the same rate, those of FP8 at twice that rate, ops that start in no
  // time, and messages without latency, or with the latencies of `links`.
  static Hardware of_peaks(const Peaks& peaks, int ranks_per_node, const std::string& links);
  // Measures the CPU of this machine while that many ranks, each with that many threads, work at once. Takes some
  // seconds.
  static Hardware measure(int ranks, int threads);

  // Returns a copy with the disk of a file of the schema "ds-offload/1", as its section `aio` uses it, and with the
  // rates of updates on its host, if they are in the file. Throws Errc::Io, Errc::Config.
  Hardware with_disk(const std::string& file) const;
  // The directory where the disk was measured; empty: no disk.
  const std::string& disk() const noexcept;

  std::string json() const;  // "ds-machine/1"

  struct State;
  const State& state() const noexcept { return *state_; }

 private:
  explicit Hardware(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

// Throws Errc::Config if a needed rate or link is unknown.
DS_API StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware);
DS_API std::string text(const StepTime& time);
DS_API std::string json(const StepTime& time);

// Calls of one op: how many, their FLOPs and the bytes of their operands.
struct OpWork {
  std::string op;  // as in OpTable
  i64 calls = 0;
  double flops = 0, bytes = 0;
};

// A run of ds-infer(1), as its --check predicts it for a machine that it runs on.
struct SessionPrediction {
  World world;
  MeshShape mesh;
  std::string device, dtype;  // "cpu", "cuda"; of the computation
  SessionSizes sizes;
  i64 num_params = 0;  // of the whole model
  int rank = 0;        // the rank of the rest, which needs most
  std::vector<TagBytes> memory{};
  i64 cache_bytes = 0;   // keys and values, a part of "activations"
  i64 device_bytes = 0;  // of all tags, except "host" on GPUs
  i64 process_bytes = 0, host_bytes = 0;
  // Streamed weights: the file of a rank, and the bytes that it reads in a pass.
  i64 file_bytes = 0, streamed_bytes = 0;
  double flops_per_token = 0;  // of this rank in a pass, for a token at the end of a context
  // The calls of this rank's layers in a pass over one token of each text, all at the end of their context; by op.
  std::vector<OpWork> decoding{};
  OpWork decoding_total() const;
  // Set by predict_times(). FLOP/s of large products. The least time of such a pass: that of its FLOPs or of its bytes
  // in memory, whichever is longer; 0 if the rate of memory is unknown.
  double matmul_flops = 0, decoding_s = 0;
  // With streamed weights: seconds in which a rank reads its weights once, beside the other ranks of its node; and the
  // tokens of a pass from which computing takes as long: read_s * matmul_flops / flops_per_token.
  double read_s = 0;
  i64 tokens_to_hide = 0;
  i64 largest_batch = -1;  // that of largest_batch(), if it is set
};
// `config`: of ConfigUse::Generate. Throws like predict().
DS_API SessionPrediction predict_session(const Config& config, const World& world, DeviceKind device,
                                         const SessionSizes& sizes);
// Throws Errc::Config if a rate that streaming needs is unknown.
DS_API void predict_times(SessionPrediction& prediction, const Config& config, const Hardware& hardware);
// The largest SessionSizes::at_once with which a rank needs at most so many bytes; 0: there is none. cached 0: as many
// tokens as default_cached() says.
DS_API i64 largest_batch(const Config& config, const World& world, DeviceKind device, const SessionSizes& sizes,
                         i64 memory);
DS_API std::string text(const SessionPrediction& prediction);
DS_API std::string json(const SessionPrediction& prediction);

// The data that an arrangement offloads, beside what the source offloads already: nothing; masters and optimizer
// states, to files; these and slices of parameters, to files; for GPUs, masters and optimizer states to host memory;
// these, gradients and slices of parameters to host memory.
enum class Offloaded : u8 { AsItIs, StatesToFiles, AllToFiles, StatesToHost, AllToHost };

struct Arrangement {
  std::vector<std::string> keys;  // its changes, as overrides of the source's configuration
  MeshShape mesh;
  int stage = 0;
  i64 micro = 0, accumulation = 0;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;  // meaningful with several stages
  i64 virtual_stages = 1;
  double memory_limit = 1;         // PipelineConfig::memory_limit
  bool sequence_parallel = false;  // Megatron's
  CheckpointGranularity recompute = CheckpointGranularity::None;
  Offloaded offloaded = Offloaded::AsItIs;
  i64 ep = 1;            // ranks of dp that have all experts together
  i64 device_bytes = 0;  // of the rank that needs most
  i64 host_bytes = 0;    // of the fullest node
  StepTime time;
};

struct FitOptions {
  World world;
  DeviceKind device = DeviceKind::Cuda;
  i64 memory = 0;       // bytes available to a rank
  i64 host_memory = 0;  // bytes available on a node; 0: unlimited
  size_t most = 10;     // maximum number of arrangements to return
  // A directory: also searches offload to files there, with a disk of the hardware, and on GPUs offload to host memory,
  // if the hardware has the rates for it. Empty: searches neither.
  std::string disk = {};
  // Reports progress, since a search over many ranks and layers may take a minute. Called by one thread at a time.
  std::function<void(std::string_view)> on_progress = {};
};
// The largest model of the same width that fits, with at most 2048 layers.
struct LargestModel {
  i64 layers = 0, params = 0;
  std::vector<std::string> keys;  // of an arrangement in which it fits
};
struct FitResult {
  std::optional<Arrangement> present;  // the source's own; empty if it is invalid on these ranks
  std::vector<std::string> why_not;    // the reasons, if `present` is empty
  bool present_fits = false;
  std::vector<Arrangement> fitting;  // by tokens per second, fastest first
  // If the present arrangement does not fit: the fastest of those that fit with the fewest changed settings; its keys
  // are only the changes.
  std::optional<Arrangement> nearest;
  i64 num_tried = 0, num_fitting = 0;
  // For the fastest arrangement, the largest micro-batch (with as many micro-batches as now) and the largest model that
  // fit, with everything else unchanged.
  i64 largest_micro = 0;
  LargestModel largest;
  // The same over all arrangements, with one sample per micro-batch and full recomputation.
  LargestModel largest_of_all;
};
// True if the only errors in `source` are about its arrangement over the ranks, so that fit() can suggest another.
DS_API bool can_be_rearranged(const Source& source);
// Finds the arrangements that fit: meshes of tp (inside a node), pp, sp and dp, ZeRO stages, pipeline schedules,
// micro-batches, with and without Megatron's sequence parallelism, with as little recomputation as possible. The batch
// size stays the same, so a step trains on the same samples. `source` must be valid or can_be_rearranged(). Throws like
// predict_time, and Errc::Config if the batch size is not given.
DS_API FitResult fit(const Source& source, const FitOptions& options, const Hardware& hardware);
// Returns the source's configuration in that arrangement, for ds-train.
DS_API Config arranged(const Source& source, const Arrangement& arrangement);
DS_API std::string text(const FitResult& result, const FitOptions& options);
DS_API std::string json(const FitResult& result);

// For people: the rank that needs most by tag, the others in one line each (with `all`, by tag too), traffic and work.
DS_API std::string text(const Prediction& prediction, bool all);
// As a JSON object.
DS_API std::string json(const Prediction& prediction);

// Charts of each rank's memory as stacked bars: text for a terminal with `columns` columns, or a self-contained SVG or
// HTML document. `limit`: bytes available to each rank; 0: unknown.
DS_API std::string plot_text(const Prediction& prediction, i64 limit, int columns, bool colour);
DS_API std::string plot_svg(const Prediction& prediction, i64 limit);
DS_API std::string plot_html(const Prediction& prediction, i64 limit);

// Memory that a run has used, for comparison with its prediction.
struct MeasuredRank {
  int rank = 0;
  std::vector<TagMemory> tags;
  bool counted = false;     // false: only predictions are known
  i64 resident_bytes = 0;   // host memory of the process, with its share of shared memory; 0: unknown
  i64 momentary_bytes = 0;  // additional memory for a moment, for example while writing a checkpoint
  i64 base_bytes = 0;       // part of it in use before the engine allocated anything
};
struct Measured {
  std::string name;  // of the file, or of the first rank's process
  int world_size = 0;
  MeshShape mesh;
  std::string device;
  i64 step = 0, total_steps = 0;                  // total 0: unknown
  double step_ms = 0, tokens_per_s = 0, mfu = 0;  // of the last steps in the file, or of the last step
  double age_s = 0;                               // for a running job: since the end of its last step
  std::vector<MeasuredRank> ranks;
};
// Reads a metrics.jsonl, or the one in a directory. Throws Errc::Io, Errc::Corrupt.
DS_API Measured read_measured(const std::string& path);
// Finds this user's training runs on this machine by their counters in shared memory. `directory`: only the run in that
// directory; empty: all. Throws Errc::Config if it is not a run directory.
DS_API std::vector<Measured> find_running(const std::string& directory = {});
// For people: the rank that used most, or all ranks.
DS_API std::string text(const Measured& measured, bool all);
DS_API std::string json(const Measured& measured);
DS_API std::string plot_text(const Measured& measured, i64 limit, int columns, bool colour);
DS_API std::string plot_svg(const Measured& measured, i64 limit);
DS_API std::string plot_html(const Measured& measured, i64 limit);

// Model states of one rank in the ZeRO paper's accounting: 16-bit parameters and gradients, 12 bytes of optimizer.
struct PaperStates {
  double params = 0, grads = 0, optimizer = 0;  // bytes
  double sent_elems = 0;                        // per step
};
DS_API PaperStates paper_states(double params, int stage, int ranks);

// Prints the field's formulas with these numbers, block by block with their sources, for comparison with predictions; a
// run may need other amounts. The second form starts from a number of parameters only.
DS_API std::string explain(const Config& config, const World& world);
DS_API std::string explain(double params, int stage, int ranks);

}  // namespace ds::memreport
