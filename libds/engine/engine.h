// SPDX-License-Identifier: Apache-2.0
#pragma once
// Engine: one rank's model, states and memory, assembled from a RunPlan. It holds the parts; train_step.cc orders them.

#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "device/device.h"
#include "mesh/mesh.h"
#include "model/models.h"
#include "optim/lr_schedule.h"
#include "pipeline/schedule.h"
#include "precision/loss_scaler.h"
#include "report/run_plan.h"
#include "stage/stage.h"
#include "zero/param_store.h"

namespace ds::engine {

// All micro-batches of one step of one data-parallel rank: [m, B, T] each, int32; whole sequences, the same on all
// ranks that share them. Targets of kIgnoredTarget do not count.
struct StepBatch {
  std::span<const i32> ids, targets;
};

struct StepReport {
  i64 step = 0;           // from 1
  double loss = 0;        // mean over micro-batches and ranks ("token": over valid tokens)
  double grad_norm = 0;   // global, unscaled, before clipping; infinite or NaN when skipped
  double lr = 0;          // of this step's update
  double loss_scale = 1;  // used by this step
  bool skipped = false;   // non-finite gradients: nothing was changed
  i64 tokens = 0;         // over all ranks
};

struct Progress {
  i64 step = 0;            // steps taken, skipped ones included
  i64 optimizer_step = 0;  // updates applied
  i64 skipped_steps = 0;
  i64 consumed_samples = 0;
};

class Engine;

// The state of some pieces as host memory: on the CPU that which the engine computes with, or a copy of what this rank
// owns; beside a GPU a copy always. A copy is taken under Tag::Host for the object's life.
class HostState {
 public:
  enum class Memory { InPlace, Copy };
  HostState(const Engine& engine, std::vector<zero::Piece> pieces, Memory memory = Memory::InPlace);
  std::span<const StatePiece> pieces() const noexcept { return pieces_; }
  void download();  // from the device
  void upload();    // to the device

 private:
  const Engine& engine_;
  std::vector<zero::Piece> where_;
  std::vector<StatePiece> pieces_;
  Buffer memory_;
};

class Engine {
 public:
  // Collective over the mesh, whose shape is the configuration's. Takes all memory of the run; throws Errc::OutOfMemory
  // naming what it was for.
  Engine(const Config& config, Mesh& mesh, MemoryLedger& ledger, Device& device);
  ~Engine();

  // Sets parameters and masters from the configured seed; moments and counters to zero. Collective.
  void init_weights();
  // What it would give elements [begin, begin + count) of parameter number `param`, of the whole parameter.
  void init_values(i64 param, i64 begin, i64 count, float* out) const;
  // The same from given values: `values(param, begin, count, out)` fills fp32 elements of parameter number `param`.
  using ValueSource = std::function<void(i64 param, i64 begin, i64 count, float* out)>;
  void set_weights(const ValueSource& values);

  StepReport train_step(const StepBatch& batch);

  // Mean loss over `batches` micro-batches per rank; NaN if one token's is not finite. next() fills ids and targets
  // [B,T], or says false, alike on all ranks: then nothing is returned. Collective.
  std::optional<double> evaluate(
      i64 batches, const std::function<bool(i64 batch, std::span<i32> ids, std::span<i32> targets)>& next);

  // Batches that evaluate() asks next() for before it waits for other ranks.
  i64 batches_at_once() const noexcept { return plan_.mesh.pp > 1 ? plan_.micro_batches : 1; }

  // The logits [B,T,V] of the last micro-batch that evaluate() saw, in fp32, where the head is and not cut over ranks;
  // nothing elsewhere. For tests.
  void read_logits(std::vector<float>& out);

  // Whether all weights and moments of all ranks are numbers, and the work dtype can hold the weights. Collective.
  bool is_finite();

  // What of the state this rank saves: what it owns and no rank before it has, too. And all that it holds.
  const std::vector<zero::Piece>& saved_pieces() const noexcept { return saved_; }
  const std::vector<zero::Piece>& held_pieces() const noexcept { return held_; }
  // The row of a parameter on this rank.
  const model::ParamRow& row_of(i64 param) const noexcept { return *param_rows_[static_cast<size_t>(param)]; }

  // What this rank holds of the state of one piece of a parameter, in device memory: Param in the work dtype, all else
  // in fp32 or as `kept` says; null: what the parameter does not have.
  struct PieceState : PerState<void*> {
    PerState<KeptAs> kept;
    TensorView view(State s, i64 count) const noexcept {
      TensorView v = TensorView::of((*this)[s], kept[s].dtype, {count});
      v.scale = kept[s].scales;
      return v;
    }
    float* values(State s) const noexcept { return static_cast<float*>((*this)[s]); }
    float* exact() const noexcept { return values((*this)[State::Master] != nullptr ? State::Master : State::Param); }
  };
  PieceState state(const zero::Piece& piece) const noexcept;
  // After the pieces of this rank were overwritten from outside: other ranks get what they hold whole. Collective.
  void publish_params() { params_.publish(); }

  const Config& config() const noexcept { return config_; }
  const report::RunPlan& plan() const noexcept { return plan_; }
  const model::Model& model() const noexcept { return model_; }
  Mesh& mesh() const noexcept { return mesh_; }
  MemoryLedger& ledger() const noexcept { return ledger_; }
  stage::Stage& stage() noexcept { return stage_; }
  Device& device() const noexcept { return device_; }
  Progress& progress() noexcept { return progress_; }
  LossScaler& scaler() noexcept { return scaler_; }
  // Gradients of the last finished step, as fp32 sums over micro-batches and ranks, still scaled and not yet divided by
  // grad_divisor(): of element `first` of a segment of plan().layout; for tests.
  float* gradient(i64 segment, i64 first) const noexcept;

 private:
  // Gradients of equal copies that are parts of a sum over tp, of groups of so many ranks side by side; as many as are
  // exchanged at once.
  struct ReplicaSum {
    std::vector<TensorView> pieces;
    i64 elems = 0, copies = 1;
  };

  void make_buffers();
  void make_pieces();

  void load(const StepBatch& batch, i64 micro);
  stage::MicroBatch micro_batch(i64 micro) const noexcept;
  void count_valid_tokens(const StepBatch& batch);
  void share_losses();
  double fold_losses(std::span<const double> losses) const;
  void finish_gradients();
  void sum_shared();
  void sum_replicas(const ReplicaSum& sum);
  void judge_gradients();
  void update_params(double lr);
  void over_model_ranks(TensorView x, ReduceOp op, bool stages);
  double num_means() const noexcept;     // micro-batches of all ranks in a step
  double grad_divisor() const noexcept;  // what the sums of gradients are still to be divided by
  double per_token(i64 micro) const noexcept;
  i64 global_micro(i64 micro) const noexcept;

  Config config_;
  Mesh& mesh_;
  MemoryLedger& ledger_;
  Device& device_;
  const OpTable& ops_;
  Stream& stream_;
  model::Model model_;
  report::RunPlan plan_;
  zero::ParamStore params_;
  std::optional<zero::GradStore> grads_;  // of who trains
  stage::Stage stage_;
  PerState<Buffer> states_;  // as plan_.states says
  Buffer optimizer_workspace_, matrix_memory_;
  Buffer exchange_, data_;
  report::StepScalars* scalars_ = nullptr;  // in data_, as what follows
  double* micro_losses_ = nullptr;          // [ranks of dp, m]: our row is filled, then gathered; behind scalars_
  std::vector<const model::ParamRow*> param_rows_;  // by parameter number
  std::vector<zero::Piece> held_, saved_;
  // One for each group of parameters that is trained and has some here, and which it is.
  struct Trained {
    size_t group;
    std::unique_ptr<optim::Optimizer> optimizer;
    std::unique_ptr<optim::WholeMatrices> matrices;  // where the group needs them
  };
  class Matrices;
  std::unique_ptr<optim::WholeMatrices> make_matrices(size_t group);
  std::vector<Trained> trained_;
  std::vector<TensorView> judged_;  // gradients that count in the norm, each once over all ranks
  std::vector<ReplicaSum> sums_;
  std::vector<TensorView> shared_slices_;  // scratch
  LossScaler scaler_;
  LrSchedule lr_;
  Progress progress_;
  std::vector<i64> valid_tokens_;   // per micro-batch, of whole sequences
  std::vector<std::byte> results_;  // the step's scalars and losses, read back
  const int uncaught_at_birth_ = std::uncaught_exceptions();
  i64 global_valid_tokens_ = 0;
};

}  // namespace ds::engine
