// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a run needs, before it starts: memory of each rank by tag, traffic, work. The numbers are those of the plan that
// the engine allocates and communicates by (plan/run_plan).

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
#include "ds/train.h"

namespace ds::memreport {

struct Source {
  ConfigResult config;  // read for `ranks`
  int ranks = 1;
  std::string text, name;              // of the configuration
  std::vector<std::string> overrides;  // of it
};

// The configuration that `path` is, or is of: a configuration ("-": standard input); a model (a directory with a
// config.json, or such a file), which is trained in bf16 with one sample per micro-batch where `overrides` say nothing
// else; one of our checkpoints (a run directory, or a step of one). `overrides` as of load_config. ranks 0: those of
// the checkpoint, else 1. Diagnostics are in the result. Throws Errc::Io for what cannot be read, Errc::Unavailable for
// checkpoints that do not say their model, and as find_checkpoint.
DS_API Source open_source(const std::string& path, std::span<const std::string> overrides, int ranks);

struct World {
  int ranks = 1;
  int nodes = 1;  // divides ranks: rank r is on node r / (ranks / nodes)
};

struct TagBytes {
  std::string tag;  // "params", "optimizer", ...: one list for all tools
  i64 bytes = 0;
  Bound bound = Bound::Exact;
  bool operator==(const TagBytes&) const = default;
};

struct Traffic {
  std::string name;          // "axis.collective": "dp.reduce_scatter"
  i64 calls = 0, bytes = 0;  // sent by a rank in a step
  bool operator==(const Traffic&) const = default;
};

// Ranks that hold and send the same, or nearly: where slices of parameters differ, so do their states and what is sent
// for them. Each number is that of the rank with most of it; those that differ are named as bounds.
struct RankGroup {
  std::vector<int> ranks;  // ascending
  int stage = 0;           // of the pipeline
  i64 num_params = 0;      // that they compute with
  std::vector<TagBytes> memory;
  std::vector<TagBytes> files;                      // of what is offloaded to NVMe
  bool served = false;                              // no: of what a server has
  i64 file_read_bytes = 0, file_written_bytes = 0;  // between a rank and them in a step
  // Device memory of the rank that has most: all tags, except "host" beside a GPU. Perhaps less than the sum of the
  // tags' maxima.
  i64 device_bytes = 0;
  i64 host_bytes = 0;  // beside a GPU
  // Beside device_bytes, of a process on a CPU: all the time, and at most for a moment. Measured, not exact.
  i64 process_bytes = 0, momentary_bytes = 0;
  std::vector<Traffic> traffic;
  std::map<std::string, i64> mean_traffic;  // bytes in a step on average, where steps differ; the last one is above
  std::map<std::string, i64> most_traffic;  // as RunPrediction::most_comm_bytes
  std::set<std::string> uneven_traffic;     // names of messages of which some of these ranks send less
};

// What a node's ranks take together, of host memory; on the CPU that is all of theirs.
struct NodeBytes {
  int node = 0;
  i64 host_bytes = 0;
};

struct Prediction {
  World world;
  MeshShape mesh;
  std::string device;             // "cpu", "cuda"
  i64 num_params = 0;             // of the whole model
  i64 tokens_per_step = 0;        // of all ranks
  double flops_per_token = 0;     // forward and backward, without what is computed again; full attention
  double bubble_fraction = 0;     // of the ranks' time in the pipeline, where a backward pass takes two forward ones
  std::vector<RankGroup> groups;  // stage by stage
  size_t worst = 0;               // group whose device_bytes are the most
  NodeBytes fullest;              // node

  const RankGroup& worst_group() const { return groups[worst]; }
};

// `config`: read for these ranks; with a model. `device`: where it is to run, which need not be here; Auto is the CPU.
// Throws Errc::Config for ranks that do not spread over the nodes evenly, and what a run would throw for a model that
// cannot be built. Reads no file.
DS_API Prediction predict(const Config& config, const World& world, DeviceKind device);

// What the calls of an op take together, each the longest of its FLOPs, its bytes and its start.
struct OpTime {
  i64 calls = 0;
  double flops = 0, bytes = 0, seconds = 0;
};

// Seconds of a training step, by what takes them (memreport/step_time.h).
struct StepTime {
  // Of the stage that takes longest, summed over its micro-batches.
  double compute_s = 0;                 // ops of its passes, of gradients too
  double recompute_s = 0;               // part of it
  double in_layer_communication_s = 0;  // of tp and sp: part of the passes
  double pipeline_s = 0;                // all passes of all stages, from the first to the last
  double bubble_fraction = 0;           // idle time of stages / all time
  double communication_s = 0;           // exposed: of dp beside the passes, and behind them but for the publication
  double hidden_s = 0;                  // of dp
  double optimizer_s = 0;
  double publish_s = 0;  // all-gathers of parameters
  double files_s = 0;    // exposed: to and from files of what is offloaded
  double copies_s = 0;   // between a GPU and its host, of what is offloaded
  // A GPU's, with something offloaded, where the rates of that are not known: what is copied between it and the host,
  // and updates there, are not in it.
  bool lacks_offload = false;
  // What ranks wait beyond that for cores that others of their node use, where their threads are more than its cores.
  double cores_s = 0;
  double step_s = 0;  // pipeline + communication + optimizer + publish + files + copies + cores
  double tokens_per_s = 0;
  double mfu = 0;  // by Model::flops_per_token and Machine::matmul_flops, over all ranks
  // By "axis.collective", all of it of that stage, hidden or not.
  std::map<std::string, double> messages_s;
  // By the name of an op, of one rank of that stage: its passes, its gradients and its optimizer. What is summed on the
  // way of a reduction is communication.
  std::map<std::string, OpTime> ops;
};

// How fast the parts of a machine are: as measured, or as data sheets have it. Copies share one value.
class DS_API Hardware {
 public:
  struct Peaks {
    double flops = 0;              // FLOP/s of a rank's large products
    double memory = 0;             // B/s of a rank; 0: bytes take no time
    double link = 0, network = 0;  // B/s of a rank each way: inside a node, between nodes; 0: not known
    double host = 0;               // B/s of a GPU each way: to and from its host; 0: not known
  };
  // Of one GPU of that name by its data sheet, with dense products in 16 bit, NVLink, PCI Express, and the network that
  // its maker puts beside it; the names are gpus(). Throws Errc::Config for another.
  static Peaks gpu(const std::string& name);
  static std::vector<std::string> gpus();
  // Files of the schemas "ds-machine/1", which measure() writes, and "ds-links/1", of ds-commbench --save; `links` may
  // be empty, where no rank sends anything. Throws Errc::Io, Errc::Config.
  static Hardware read(const std::string& machine, const std::string& links);
  // Products of 16 and of 32 bits at the same rate, ops that start in no time, messages without latency; or with those
  // of `links`.
  static Hardware of_peaks(const Peaks& peaks, int ranks_per_node, const std::string& links);
  // What the CPU of this machine does when so many ranks of so many threads work at once; some seconds.
  static Hardware measure(int ranks, int threads);

  // The same with the disk of a file of the schema "ds-offload/1", as its section aio uses it, and with the updates of
  // its host, if they are in it. Throws Errc::Io, Errc::Config.
  Hardware with_disk(const std::string& file) const;
  // The directory that this was measured in; empty: no disk.
  const std::string& disk() const noexcept;

  std::string json() const;  // "ds-machine/1"

  struct State;
  const State& state() const noexcept { return *state_; }

 private:
  explicit Hardware(std::shared_ptr<const State> state) : state_(std::move(state)) {}
  std::shared_ptr<const State> state_;
};

// Throws Errc::Config for rates or links that are not known.
DS_API StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware);
DS_API std::string text(const StepTime& time);
DS_API std::string json(const StepTime& time);

// An arrangement of a run over its ranks.
// What a search offloads: nothing beside what the source has offloaded; masters and states of optimizers, to files of a
// disk; slices of parameters as well; beside a GPU, the states to host memory; that, and gradients and slices of
// parameters.
enum class Offloaded : u8 { AsItIs, StatesToFiles, AllToFiles, StatesToHost, AllToHost };

struct Arrangement {
  std::vector<std::string> keys;  // what it changes, as overrides of the source's
  MeshShape mesh;
  int stage = 0;
  i64 micro = 0, accumulation = 0;
  PipelineSchedule schedule = PipelineSchedule::OneFOneB;  // where there are stages
  i64 virtual_stages = 1;
  bool sequence_parallel = false;  // Megatron's
  CheckpointGranularity recompute = CheckpointGranularity::None;
  Offloaded offloaded = Offloaded::AsItIs;
  i64 device_bytes = 0;  // of the rank that needs most
  i64 host_bytes = 0;    // of the fullest node
  StepTime time;
};

struct FitOptions {
  World world;
  DeviceKind device = DeviceKind::Cuda;
  i64 memory = 0;       // bytes that a rank has
  i64 host_memory = 0;  // bytes that a node has; 0: enough
  size_t most = 10;     // arrangements
  // A directory: what is offloaded to files there is searched as well, with a disk of the hardware, and beside GPUs
  // what is offloaded to host memory, where the hardware has the rates for that; else empty.
  std::string disk = {};
  // What is being looked at, as a search of many ranks and layers may take a minute; by one thread at a time.
  std::function<void(std::string_view)> on_progress = {};
};
// A model of more layers of the same width, 2048 at most.
struct LargestModel {
  i64 layers = 0, params = 0;
  std::vector<std::string> keys;  // of an arrangement in which it fits
};
struct FitResult {
  std::optional<Arrangement> present;  // the source's own; none where it cannot be on these ranks,
  std::vector<std::string> why_not;    // which is for these reasons
  bool present_fits = false;
  std::vector<Arrangement> fitting;  // by tokens per second, the fastest first
  // Where the present one does not fit: what fits with the fewest of its settings changed, the fastest of those; its
  // keys are the changes alone.
  std::optional<Arrangement> nearest;
  i64 num_tried = 0, num_fitting = 0;
  // Of the fastest one with what else is as large as fits: samples of a micro-batch, with as many micro-batches as now;
  // layers.
  i64 largest_micro = 0;
  LargestModel largest;
  // In whichever arrangement takes most layers, with one sample in a micro-batch and all layers computed again.
  LargestModel largest_of_all;
};
// Whether what is wrong with `source` is only how it is arranged over its ranks, so that fit() can tell what is not.
DS_API bool can_be_rearranged(const Source& source);
// The arrangements of these ranks that fit: every mesh of tp (inside a node), pp, sp and dp, ZeRO stage, schedule of
// the pipeline, micro-batch, with and without Megatron's sequence parallelism, and as little as possible computed
// again. The batch stays: the same samples are trained in a step. `source` is sound, or can be rearranged. Throws as
// predict_time, and Errc::Config where nothing says how large the batch is.
DS_API FitResult fit(const Source& source, const FitOptions& options, const Hardware& hardware);
// The source's configuration arranged so, for ds-train.
DS_API Config arranged(const Source& source, const Arrangement& arrangement);
DS_API std::string text(const FitResult& result, const FitOptions& options);
DS_API std::string json(const FitResult& result);

// For people: the rank that needs most by tag, the others in a line each (`all`: by tag too), traffic, work.
DS_API std::string text(const Prediction& prediction, bool all);
// As a JSON object.
DS_API std::string json(const Prediction& prediction);

// The memory of each rank as stacked bars. `limit`: bytes that each rank has; 0: not told. As text for a terminal of so
// many columns; the others need nothing else to be shown.
DS_API std::string plot_text(const Prediction& prediction, i64 limit, int columns, bool colour);
DS_API std::string plot_svg(const Prediction& prediction, i64 limit);
DS_API std::string plot_html(const Prediction& prediction, i64 limit);

// What a run has taken, beside what was predicted.
struct MeasuredRank {
  int rank = 0;
  std::vector<TagMemory> tags;
  bool counted = false;     // else only what is predicted is known
  i64 resident_bytes = 0;   // host memory of the process, its share of what is shared; 0: not known
  i64 momentary_bytes = 0;  // beside it for a moment, as while a checkpoint was written
  i64 base_bytes = 0;       // of it before the engine took anything
};
struct Measured {
  std::string name;  // of the file, or of the process of the first rank
  int world_size = 0;
  MeshShape mesh;
  std::string device;
  i64 step = 0, total_steps = 0;                  // total 0: not told
  double step_ms = 0, tokens_per_s = 0, mfu = 0;  // of the file's last steps, or of the last one
  double age_s = 0;                               // of a running one: since its last step ended
  std::vector<MeasuredRank> ranks;
};
// A metrics.jsonl, or a directory with one. Throws Errc::Io, Errc::Corrupt.
DS_API Measured read_measured(const std::string& path);
// The runs of this user that train on this machine now, by the counters that they show in shared memory.
// `directory`: of that run alone; empty: all. Throws Errc::Config where it is none.
DS_API std::vector<Measured> find_running(const std::string& directory = {});
// For people: the rank that took most, or all.
DS_API std::string text(const Measured& measured, bool all);
DS_API std::string json(const Measured& measured);
DS_API std::string plot_text(const Measured& measured, i64 limit, int columns, bool colour);
DS_API std::string plot_svg(const Measured& measured, i64 limit);
DS_API std::string plot_html(const Measured& measured, i64 limit);

// Model states of one rank in the ZeRO paper's accounting: 16-bit parameters and gradients, 12 bytes of optimizer.
struct PaperStates {
  double params = 0, grads = 0, optimizer = 0;  // bytes
  double sent_elems = 0;                        // in a step
};
DS_API PaperStates paper_states(double params, int stage, int ranks);

// The formulas of the field with these numbers in them, block by block with their sources; what they are compared with,
// not what a run takes. The second of a number of parameters alone.
DS_API std::string explain(const Config& config, const World& world);
DS_API std::string explain(double params, int stage, int ranks);

}  // namespace ds::memreport
