// SPDX-License-Identifier: Apache-2.0
#pragma once
// Engine: one rank's model, states and memory, assembled from a RunPlan. It holds the parts; train_step.cc orders their
// work.

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/trace.h"
#include "device/device.h"
#include "ds/step_record.h"
#include "mesh/mesh.h"
#include "model/models.h"
#include "optim/lr_schedule.h"
#include "pipeline/schedule.h"
#include "plan/planned.h"
#include "precision/loss_scaler.h"
#include "stage/stage.h"
#include "update/update.h"
#include "zero/param_store.h"

namespace ds::engine {

// All micro-batches of one step of one data-parallel rank: [m, B, T] each, int32; whole sequences, the same on all
// ranks that share them. Targets of kIgnoredTarget do not count. documents: for each token the place in its sequence at
// which its document begins; ignored unless data.separate_documents.
struct StepBatch {
  std::span<const i32> ids, targets, documents = {};
};

struct Progress {
  i64 step = 0;            // steps taken, skipped ones included
  i64 optimizer_step = 0;  // updates applied
  i64 skipped_steps = 0;
  i64 consumed_samples = 0;
};

// Parts that replace those which the engine would make from its configuration.
struct EngineParts {
  std::shared_ptr<const plan::Planned> planned = {};  // this rank's plan, where it is known already
  std::function<model::Model(const Config&, const MeshShape&, const MeshCoord&)> model = {};  // a rank's part of it
  zero::Tiers tiers = {};
  int host_threads = 0;    // of updates on the host with a GPU; 0: as the environment says
  Trace* trace = nullptr;  // records tiles of offloaded states; outlives the engine
};

class Engine {
 public:
  // Collective over the mesh, whose shape is the configuration's. Takes all memory of the run; throws
  // Errc::OutOfMemory, naming its purpose.
  Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, Device& device, const EngineParts& parts = {});
  ~Engine();

  // Sets parameters and masters from the configured seed; moments and counters to zero. Collective.
  void init_weights();
  // The values that init_weights() gives elements [begin, begin + count) of the whole parameter number `param`.
  void init_values(i64 param, i64 begin, i64 count, float* out) const;
  // As init_weights(), from given values: `values(param, begin, count, out)` fills fp32 elements of parameter `param`.
  // Rows kept as codes are coded from them, or copied from `codes`, if given: rows [first, first + count) of the whole
  // parameter in the rows form of its ParamRow::codes.
  using ValueSource = std::function<void(i64 param, i64 begin, i64 count, float* out)>;
  using CodeSource = std::function<void(i64 param, i64 first, i64 count, void* out)>;
  void set_weights(const ValueSource& values, const CodeSource& codes = {});

  // The following steps take sequences of this many tokens, at most those of the plan, which evaluations always take.
  void train_at(i64 sequence_length) noexcept { step_length_ = sequence_length; }

  // Takes a step. `done` gets the record of each step whose verdict is known by then: of this one or, if steps are
  // post-validated, of the one before, at Validate, where all ranks meet. The step is then open until the next one, or
  // until finish_step(), and progress(), scaler(), states and parameters must not be looked at. The record has what the
  // engine knows of a step: of times the phases, and neither samples, memory and messages nor compression(), since it
  // does not allocate.
  using Done = FunctionRef<void(const StepRecord&)>;
  void take_step(const StepBatch& batch, Done done);
  // Makes the verdict of an open step, and undoes its update if need be. Collective.
  void finish_step(Done done);
  bool has_open_step() const noexcept { return open_.has_value(); }
  // To be called before the verdict of an open step is made.
  void before_verdict(std::function<void()> call) { before_verdict_ = std::move(call); }
  // A step and its verdict.
  StepRecord train_step(const StepBatch& batch);
  // StepRecord::compression of the last step with a verdict; those without a name are none.
  const update::Update::NamedNorms& compression() const noexcept { return compression_; }
  // Whether the following steps time their phases; the host then waits for the device at the end of each phase.
  void time_phases(bool wanted) noexcept { times_phases_ = wanted; }
  // Records the following steps; outlives them. Null: they are not recorded.
  void trace_to(Trace* trace) noexcept { trace_ = trace; }

  // Mean loss over `batches` micro-batches per rank; NaN if the loss of a token is not finite. next() fills ids and
  // targets [B,T], and documents as StepBatch has them, which is empty unless data.separate_documents. If it returns
  // false, on all ranks alike, nothing is returned. Collective.
  using NextBatch =
      std::function<bool(i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32> documents)>;
  std::optional<double> evaluate(i64 batches, const NextBatch& next);

  // Batches for which evaluate() calls next() before it waits for other ranks.
  i64 batches_at_once() const noexcept { return plan_.mesh.pp > 1 ? plan_.micro_batches : 1; }

  // The fp32 logits [B,T,V] of the last micro-batch of evaluate(), on ranks with a head that is not split; nothing on
  // others. For tests.
  void read_logits(std::vector<float>& out);

  // Finishes and publishes delayed updates. evaluate() and is_finite() do this first; call it before reading states.
  // Collective.
  void finish_updates();

  // Whether all weights and moments of all ranks are finite, and the work dtype can represent the weights. Collective.
  bool is_finite();

  // The pieces of the state that this rank saves: those that it owns and no rank before it saves; with DiLoCo, only
  // those of the first worker. And all pieces that it holds.
  const std::vector<zero::Piece>& saved_pieces() const noexcept { return saved_; }
  const std::vector<zero::Piece>& held_pieces() const noexcept { return held_; }
  // This rank's row of a parameter.
  const model::ParamRow& row_of(i64 param) const noexcept { return plan_.row_of(param); }

  // The state of a piece that this rank holds (StateStore::lease).
  zero::StateLease lease(const zero::Piece& piece, zero::LeaseTo access = zero::LeaseTo::Write) {
    return shards_of(piece).states().lease(piece, access);
  }
  bool states_in_place() const noexcept {
    return std::ranges::all_of(shards_, [](const auto& s) { return s->states().in_place(); });
  }
  // Arrays of saved state (SavedState) of this rank alone, which only a run with the same layout can resume from; none
  // if the last update left none.
  std::vector<zero::SavedArray> rank_local() {
    return update_ ? update_->rank_local(progress_.optimizer_step) : std::vector<zero::SavedArray>();
  }
  // After all of them were set from outside. Collective.
  void rank_local_was_set() {
    update_->rank_local_was_set(progress_.optimizer_step);
    zero::publish(shards_);
  }
  // Alike on all ranks, of which some may have none.
  bool has_rank_local() const noexcept { return update_ && update_->has_rank_local(progress_.optimizer_step); }
  // All state of that kind; none in a run that does not train.
  std::span<zero::SavedState* const> saved_states() const noexcept {
    return update_ ? update_->saved_states() : std::span<zero::SavedState* const>();
  }
  // With DiLoCo, makes the parameters the starting point of the first meeting, unless updates have been applied.
  void begin_outer() {
    if (update_ && update_->outer() != nullptr && progress_.optimizer_step == 0) update_->outer()->begin();
  }
  // Call this after the pieces of this rank were overwritten: ranks that hold whole parameters receive them.
  // Collective.
  void publish_params() {
    zero::publish(shards_);
    if (update_) update_->states_were_set();
  }

  const Config& config() const noexcept { return config_; }
  const plan::RunPlan& plan() const noexcept { return plan_; }
  const model::Model& model() const noexcept { return model_; }
  Mesh& mesh() const noexcept { return mesh_; }
  MemoryLedger& ledger() const noexcept { return ledger_; }
  offload::Offload& offload() noexcept { return offload_; }
  const offload::Offload& offload() const noexcept { return offload_; }
  offload::ServerLink* server() const noexcept { return offload_.server(); }
  // With a server of states: the progress that the server keeps with the states; and resumes from such a record.
  offload::ServedRecord served_record() const noexcept { return served_record(progress_, scaler_); }
  void resume_from(const offload::ServedRecord& record);
  stage::Stage& stage() noexcept { return stage_; }
  Device& device() const noexcept { return device_; }
  Progress& progress() noexcept { return progress_; }
  LossScaler& scaler() noexcept { return scaler_; }
  // The gradient of a piece that this rank holds, in the last finished step, as an fp32 sum over micro-batches and
  // ranks, still scaled and not yet divided by grad_divisor(); for tests.
  zero::TierLease gradient(const zero::Piece& piece) const {
    return shards_of(piece).gradient(piece, zero::LeaseTo::Read);
  }

 private:
  model::PassLengths whole_sequences() const noexcept { return {.sequence = config_.data.seq_length}; }
  model::Model make_model(const MeshCoord& coord, const model::PassLengths& lengths) const;
  void shape_to(model::PassLengths lengths);
  offload::ServerLink::Rank served_rank();
  zero::AllShards make_shards();
  void make_update();
  void set_codes(i64 param, const ValueSource& values, const CodeSource& codes);
  void make_pieces();
  zero::Shards& shards_of(const zero::Piece& piece) const noexcept { return *shards_[row_of(piece.param).group]; }

  // A step that is taken, or open.
  struct Step {
    StepRecord record;
    update::StepResults* results;
    update::Update::Step update = {};  // set with the rest when the step before has its verdict
    JudgeParams judge = {};
  };
  class PhaseMeter;
  Step begin_step(const StepBatch& batch);
  void begin_gradients(Step& step);
  void run_passes(Step& step, const StepBatch& batch, size_t begin, size_t end, PhaseMeter& meter);
  void update_ahead(PhaseMeter& meter);
  bool finish_step(Done done, PhaseMeter& meter);  // as close_step(); true if none is open
  bool close_step(Done done, PhaseMeter& meter);
  bool update(Step& step, zero::VerdictHandle& verdict, PhaseMeter& meter);
  bool is_as_assumed(const Step& step) const;

  std::span<const i32> part_of(std::span<const i32> tokens, i64 micro) const noexcept;  // of a step's micro-batches
  stage::MicroBatch micro_batch(const Step& step, i64 micro) const noexcept;
  void fill_in(Step& step, const GradVerdict& verdict) const;
  Progress progress_after(const GradVerdict& verdict) const noexcept;
  offload::ServedRecord served_record(const Progress& progress, const LossScaler& scaler) const noexcept;
  offload::ServedRecord served_outcome(const GradVerdict& verdict) const;
  void count_valid_tokens(const StepBatch& batch, i64* on_device);
  void share_expert_tokens(const update::StepResults& results);
  void share_losses(const update::StepResults& results);
  double fold_losses(const update::StepResults& results) const;
  double fold_aux_losses(const update::StepResults& results) const;
  void fill_in_experts(Step& step) const;
  double num_means() const noexcept;     // micro-batches of all ranks of a worker in a step
  double grad_divisor() const noexcept;  // what the sums of gradients are still to be divided by
  double per_token(i64 micro) const noexcept;
  float loss_grad(double weight) const noexcept;  // d(scaled total)/d(a loss of that weight in its micro-batch)
  i64 global_micro(i64 step, i64 micro) const noexcept;

  Config config_;
  EngineParts parts_;
  Mesh& mesh_;
  MemoryLedger& ledger_;
  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  std::shared_ptr<const plan::Planned> planned_;
  const model::Model& model_;
  const plan::RunPlan& plan_;
  offload::Offload offload_;
  zero::AllShards shards_;
  stage::Stage stage_;
  struct Shorter {
    model::PassLengths lengths;
    model::Model model;
    plan::RunPlan plan;
  };
  std::unique_ptr<Shorter> shorter_;      // than the plan's, of the last such steps
  model::PassLengths laid_out_;           // by what the stage is laid out
  i64 step_length_;                       // tokens of the sequences of a training step
  std::optional<update::Update> update_;  // of who trains
  update::StepResults results_;
  // Post-validated steps: the results of every other step, and the verdict by which steps are taken.
  std::optional<update::StepResults> other_results_, assumed_;
  std::optional<Step> open_;
  std::function<void()> before_verdict_;
  std::vector<zero::Piece> held_, counted_, saved_;
  LossScaler scaler_;
  LrSchedule lr_;
  Progress progress_;
  Step* ending_ = nullptr;         // the one whose verdict is made
  std::vector<i64> valid_tokens_;  // per micro-batch, of whole sequences
  const int uncaught_at_birth_ = std::uncaught_exceptions();
  i64 global_valid_tokens_ = 0;
  bool times_phases_ = false;
  Trace* trace_ = nullptr;
  update::Update::NamedNorms compression_{};
};

}  // namespace ds::engine
