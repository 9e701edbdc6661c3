// SPDX-License-Identifier: Apache-2.0
#pragma once
// A training run as the tools use it: its prediction, the run itself, and evaluation and generation with its weights.

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"
#include "ds/document_survey.h"
#include "ds/infer.h"
#include "ds/ranks.h"
#include "ds/step_record.h"
#include "ds/units.h"

namespace ds {

struct TagMemory {
  std::string tag;    // "params", "grads", ...; all tools use the same list
  i64 predicted = 0;  // bytes per rank
  i64 counted = 0;    // peak of this run; 0 in a prediction
  Bound bound = Bound::Exact;
};

// Contents of one pipeline stage; the numbers are per rank.
struct StagePlan {
  std::vector<int> ranks;
  std::vector<std::pair<std::string, std::string>> layers;  // first and last layer of each chunk
  i64 heads = 0, num_params = 0, memory_bytes = 0;
};

struct SamplingOptions {
  i64 max_tokens = 200;
  double temperature = 0.8;  // 0: the most likely token
  i64 top_k = 0;             // 0: no limit
  u32 seed = 0;
};

// A tokenized prompt, and how to continue it.
struct EncodedPrompt {
  std::vector<i32> ids = {};
  SamplingOptions sampling = {};
};
// Tokenizes a prompt, after the beginning-of-text token if the tokenizer adds one. Throws Errc::Unavailable for a model
// that cannot generate, Errc::Config for a prompt that is empty or too long, and Errc::Mismatch for a token outside the
// model's vocabulary.
DS_API EncodedPrompt encode_prompt(const Config& config, std::string_view text, const SamplingOptions& o);
// The sizes of a session that continues it.
DS_API SessionSizes session_sizes(const EncodedPrompt& prompt);

// The needs of a run, known before it starts.
struct RunPrediction {
  i64 num_params = 0;
  std::map<std::string, i64> matrices;  // without training: how many matrices of products are in each form
  double flops_per_token = 0;           // forward + backward, full attention
  std::vector<StagePlan> stages;        // of the pipeline
  // Idle share of the ranks' time, if a backward pass takes twice as long as a forward pass.
  double bubble_fraction = 0;
  std::vector<TagMemory> memory;  // of this rank, without the process itself
  i64 total_bytes = 0;            // of this rank
  i64 draft_bytes = 0;            // of these, for the draft of an inference
  // Memory of a CPU process beside total_bytes: constantly, and at most for a moment. Measured, not exact.
  i64 process_bytes = 0, momentary_bytes = 0;
  std::vector<TagMemory> files;           // of this rank: data offloaded to NVMe
  i64 streamed_bytes = 0;                 // that this rank reads in a pass over streamed weights (ds-infer --stream)
  std::map<std::string, i64> comm_bytes;  // sent per rank and step, by "axis.collective"
  // Average over the run, if steps differ; comm_bytes is then that of the last step. Both assume that no step is
  // skipped.
  std::map<std::string, i64> mean_comm_bytes;
  // Maximum over all steps, only for messages whose sizes the run itself decides: with sparse gradients, and where
  // optimizers average by signs and a step may be skipped.
  std::map<std::string, i64> most_comm_bytes;
  i64 host_bytes = 0;       // for runs on GPUs: host memory per rank; not in total_bytes
  std::string device;       // "cpu", "cuda"
  int sharers = 1;          // number of ranks on this node, or on this rank's GPU
  i64 needed_bytes = 0;     // by all sharers together; a run that needs more than available_bytes is refused
  i64 available_bytes = 0;  // free memory of this node within limits, or of this rank's GPU
  std::string limited_by;   // "free memory", "cgroup limit", "address space limit", "free on <GPU>"
};
// Throws the errors of a run whose model or batch cannot be built. Reads no file except the model's configuration.
// `session`: includes the memory of inference, `draft`: of a draft beside it, whose tokenizer is read and compared.
DS_API RunPrediction predict_run(const Config& config, const RankInfo& ranks,
                                 const std::optional<SessionSizes>& session = {},
                                 const std::optional<DraftModel>& draft = {});

// The pipeline plan for people: the layers and ranks of each stage, and the timeline of the schedule. Text has `width`
// columns (at least 40) and ANSI escapes if `colour`; the picture is a self-contained SVG.
DS_API std::string plan_text(const Config& config, int world_size, int width, bool colour);
DS_API std::string plan_svg(const Config& config, int world_size);

// The attention pattern by blocks over data.seq_length tokens. The text shows the first head if heads differ, the
// picture all of them. Throws Errc::Config or Errc::Io for the file of a layout.
DS_API std::string pattern_text(const Config& config, int width);
DS_API std::string pattern_svg(const Config& config);

struct RunOptions {
  std::string out_dir = {};  // run directory; empty: nothing is written
  std::string resume = {};   // empty: a new run; "latest": the latest step in out_dir; else a step or run directory
  // Initial weights, in any form that open_weights() reads; empty: those of model.path, or random ones.
  std::string weights = {};
  std::string trace = {};   // for training: file for a trace of the first steps; empty: none
  std::string config = {};  // the configuration's own file, which reports must not overwrite; empty: none
  bool read_only = false;   // for evaluation and generation: out_dir is only read, and there must be weights
  std::optional<SessionSizes> session = {};  // of inference, for the memory check
  // For infer(), beside `session`. Throws Errc::Config for another tokenizer than the model's, Errc::Unavailable on a
  // GPU.
  std::optional<DraftModel> draft = {};
};

// Throws Errc::Config, naming `option`, if a report written to `file` would replace a file of this run: an input named
// in its configuration or options, one of its own files, the checkpoint that it resumes from, or another report.
DS_API void check_report(const std::string& file, std::string_view option, const Config&, const RunOptions&);

struct TrainHooks {  // all optional; called on rank 0 only, except stop_signal, which every rank calls after each step
                     // and, in evaluations, after each batch
  std::function<int()> stop_signal = {};  // not 0: stop because of this signal
  std::function<void(const StepRecord&, i64 total_steps)> on_step = {};
  std::function<void(i64 step, double val_loss)> on_eval = {};
  // Reports that the configuration requests: wall_clock_breakdown, comms_logger, flops_profiler.
  std::function<void(std::string_view text)> on_report = {};
};

struct TrainResult {
  int stop_signal = 0;           // received by any rank; not 0: the run stopped before config.steps
  i64 step = 0, first_step = 0;  // first and last step taken by this call; none if first_step > step
  i64 skipped_steps = 0;
  double loss = 0;      // of the last step; NaN if none was taken
  double val_loss = 0;  // NaN without validation data
  i64 tokens = 0;
  double seconds = 0;               // time in steps
  std::string checkpoint{};         // the last one committed; empty: none
  std::vector<TagMemory> memory{};  // rank 0
  std::vector<TagMemory> files{};   // rank 0: data offloaded to NVMe
  OffloadTraffic offload{};         // rank 0, over all steps
  std::string offload_method{};     // how its files are read and written
};

// The documents of a run's data. Nothing where they are neither separated nor packed, or the program brings the
// samples.
struct RunDocuments {
  std::optional<DocumentSurvey> training, validation;
};

struct GenerateHooks {  // called on every rank
  // Each new token with the text that it adds, in bytes that may end inside a UTF-8 character.
  std::function<void(i32 id, std::string_view text)> token;
  // The end of the completion, with the text that was still held back.
  std::function<void(std::string_view text)> ended;
};

// Owns everything of one rank's run. All member functions are collective over the job. An error on one rank aborts the
// others, which then throw the same code and name that rank.
class DS_API TrainingRun {
 public:
  struct State;  // libds/run/run_state.h
  // Checks memory first (Errc::OutOfMemory, by tag), then connects the ranks, opens the data, builds the engine, loads
  // or initialises the weights, and finally creates or takes over the run directory, so a run that fails earlier has
  // written nothing. Throws Errc::Config (directory in use or not empty, data too short, ...).
  TrainingRun(const Config& config, const RankInfo& ranks, const RunOptions& options);
  ~TrainingRun();

  // Throws the constructor's errors for files and directories: data, checkpoint, weights, run directory. Changes
  // nothing, and needs neither the other ranks nor the memory of a run. Rank 0 reads all data in which documents are
  // separated or packed, reports them and returns them; the other ranks return none.
  static RunDocuments check(const Config& config, const RankInfo& ranks, const RunOptions& options);

  // Trains to config.steps, or until any rank requests a stop; then commits a checkpoint, if there is a run directory.
  // Throws Errc::Numeric, and saves nothing, if weights or losses are no longer finite.
  TrainResult train(const TrainHooks& hooks);
  // Returns the mean loss over the validation data (eval.batches batches). Throws Errc::Config if there is no
  // validation data, Errc::Numeric if the loss is not finite.
  double evaluate();
  // Continues a prompt, token by token.
  void generate(const EncodedPrompt& prompt, const GenerateHooks& hooks);
  // Continues and scores texts until hooks.next has no more. Each result depends only on its request. Requests must be
  // valid. sizes.draft_tokens needs RunOptions::draft. Throws Errc::Numeric if logits are not finite.
  InferCounts infer(const SessionSizes& sizes, const InferHooks& hooks);

  i64 step() const noexcept;
  std::string_view backend() const noexcept;  // "self", "shm", "mpi", "shm+mpi", "staged", "nccl"

 private:
  std::unique_ptr<State> state_;
};

}  // namespace ds
