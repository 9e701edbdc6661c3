// SPDX-License-Identifier: Apache-2.0
#pragma once
// A training run as tools see it: what it will need, the run itself, evaluation and generation from its weights.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ds/config.h"
#include "ds/prompts.h"
#include "ds/ranks.h"
#include "ds/step_record.h"
#include "ds/units.h"

namespace ds {

struct TagMemory {
  std::string tag;    // "params", "grads", ...: one list for all tools
  i64 predicted = 0;  // bytes per rank
  i64 counted = 0;    // peak of this run; 0 in a prediction
  Bound bound = Bound::Exact;
};

// What one pipeline stage holds; the numbers are those of each of its ranks.
struct StagePlan {
  std::vector<int> ranks;
  std::vector<std::pair<std::string, std::string>> layers;  // first and last, per chunk
  i64 heads = 0, num_params = 0, memory_bytes = 0;
};

struct SamplingOptions {
  i64 max_tokens = 200;
  double temperature = 0.8;  // 0: the most likely token
  i64 top_k = 0;             // 0: all
  u32 seed = 0;
  i64 at_once = 64;  // prompts under way at most
};

// Prompts as tokens, and how they are to be continued.
struct EncodedPrompts {
  std::vector<std::vector<i32>> ids = {};
  SamplingOptions sampling = {};
};
// Opens the tokenizer. Throws Errc::Unavailable for a model that continues nothing; with a line for each of the first
// prompts that cannot be continued, Errc::Config (empty, too long) or Errc::Mismatch (a token outside the model's
// vocabulary).
DS_API EncodedPrompts encode_prompts(const Config& config, std::span<const Prompt> prompts, const SamplingOptions& o);

// What is known before a run starts.
struct RunPrediction {
  i64 num_params = 0;
  double flops_per_token = 0;     // forward + backward, full attention
  std::vector<StagePlan> stages;  // of the pipeline
  double bubble_fraction = 0;     // of its ranks' time, where a backward pass takes twice as long as a forward one
  std::vector<TagMemory> memory;  // of this rank, without the process itself
  i64 total_bytes = 0;            // of this rank
  // Beside it, of a process on a CPU: all the time, and at most for a moment. Measured, not exact.
  i64 process_bytes = 0, momentary_bytes = 0;
  std::vector<TagMemory> files;           // of this rank, of what is offloaded to NVMe
  std::map<std::string, i64> comm_bytes;  // sent per rank and step, by "axis.collective"
  // The same on average over the run, where steps differ; comm_bytes is then of its last one. Both are of a run that
  // skips no step.
  std::map<std::string, i64> mean_comm_bytes;
  // In any step at most, of those alone that the run may send less or more of than comm_bytes and mean_comm_bytes say:
  // with sparse gradients, and where optimizers average by signs and a step may be skipped.
  std::map<std::string, i64> most_comm_bytes;
  i64 host_bytes = 0;       // beside a GPU: of the node's memory, per rank; not in total_bytes
  std::string device;       // "cpu", "cuda"
  int sharers = 1;          // ranks of this node, or on this rank's GPU
  i64 needed_bytes = 0;     // of all of them; a run that needs more than available_bytes is refused
  i64 available_bytes = 0;  // of this node: free memory within limits; or of this rank's GPU
  std::string limited_by;   // "free memory", "cgroup limit", "address space limit", "free on <GPU>"
};
// Throws what a run would throw for a model or batch that cannot be built. Touches no file but the model's
// configuration. `writing`: with the memory of what is written, at most.
DS_API RunPrediction predict_run(const Config& config, const RankInfo& ranks, const EncodedPrompts* writing = nullptr);

// The plan for people: which stage holds which layers on which ranks, and who does what when. `width`: columns, from 40
// on; colour: ANSI escapes. The second as a picture that needs nothing else.
DS_API std::string plan_text(const Config& config, int world_size, int width, bool colour);
DS_API std::string plan_svg(const Config& config, int world_size);

// Which keys each query attends to, by blocks of data.seq_length tokens; as text that of the first head where heads
// differ, as a picture those of all. Errc::Config, Errc::Io: of a file that has the layout.
DS_API std::string pattern_text(const Config& config, int width);
DS_API std::string pattern_svg(const Config& config);

struct RunOptions {
  std::string out_dir;     // run directory; empty: nothing is written
  std::string resume;      // "": start; "latest": of out_dir; else a step or run directory
  std::string weights;     // initial weights: whatever open_weights() reads; empty: model.path's, or random ones
  std::string trace;       // of a run that trains: a file that gets what its first steps do; empty: none
  std::string config;      // the configuration's own file, which no report is written over; empty: there is none
  bool read_only = false;  // for evaluation and generation: out_dir is only read, and random weights are an error
  const EncodedPrompts* writing = nullptr;  // what is to be written, which outlives the run: its memory is checked, too
};

// Throws Errc::Config, naming `option`, if a report in `file` would replace something of this run: what its
// configuration or options name as an input, its own files, the checkpoint that it resumes from, another report.
DS_API void check_report(const std::string& file, std::string_view option, const Config&, const RunOptions&);

struct TrainHooks {  // all optional; called on rank 0 only, but stop_signal on every rank: after each step, and in
                     // evaluations after each batch
  std::function<int()> stop_signal;  // not 0: stop, because of this signal
  std::function<void(const StepRecord&, i64 total_steps)> on_step;
  std::function<void(i64 step, double val_loss)> on_eval;
  // What the configuration asks to be told of the run: wall_clock_breakdown, comms_logger, flops_profiler.
  std::function<void(std::string_view text)> on_report;
};

struct TrainResult {
  int stop_signal = 0;           // of any rank; not 0: stopped before config.steps
  i64 step = 0, first_step = 0;  // last and first step taken by this call; none if first_step > step
  i64 skipped_steps = 0;
  double loss = 0;      // of the last step; NaN if none was taken
  double val_loss = 0;  // NaN without validation data
  i64 tokens = 0;
  double seconds = 0;               // in steps
  std::string checkpoint{};         // the last one committed; empty: none
  std::vector<TagMemory> memory{};  // rank 0
  std::vector<TagMemory> files{};   // likewise, of what is offloaded to NVMe
  OffloadTraffic offload{};         // of rank 0, in all steps
  std::string offload_method{};     // how its files are read and written
};

struct GenerateHooks {  // called on every rank
  // Each new token and what it adds to the text (bytes: perhaps not whole UTF-8).
  std::function<void(size_t prompt, i32 id, std::string_view text)> token;
  // A text has ended, with what it has still held back.
  std::function<void(size_t prompt, std::string_view text)> ended;
};

// Owns everything of one rank's run. All member functions are collective over the job; an error on one rank aborts the
// others, which then throw the same code, naming it.
class DS_API TrainingRun {
 public:
  struct State;  // libds/run/run_state.h
  // Checks memory first (Errc::OutOfMemory, by tag), then connects the ranks, opens the data, builds the engine, loads
  // or initialises the weights, and last makes or takes over the directory: a run that fails before that has written
  // nothing. Throws Errc::Config (directory in use or not empty, data too short, ...).
  TrainingRun(const Config& config, const RankInfo& ranks, const RunOptions& options);
  ~TrainingRun();

  // Throws what the constructor would throw for files and directories: data, checkpoint, weights, run directory.
  // Touches nothing, and needs neither ranks nor the memory of a run.
  static void check(const Config& config, const RankInfo& ranks, const RunOptions& options);

  // Trains to config.steps, or until any rank asks to stop: then commits a checkpoint (if there is a directory). A run
  // whose weights or losses are no longer finite is Errc::Numeric, and saves nothing.
  TrainResult train(const TrainHooks& hooks);
  // Mean loss over the validation data (eval.batches batches). Throws Errc::Config without any, Errc::Numeric if it is
  // not finite.
  double evaluate();
  // Continues prompts. What is written for one does not depend on the others.
  void generate(const EncodedPrompts& prompts, const GenerateHooks& hooks);

  i64 step() const noexcept;
  std::string_view backend() const noexcept;  // "self", "shm", "mpi", "shm+mpi", "staged", "nccl"

 private:
  std::unique_ptr<State> state_;
};

}  // namespace ds
