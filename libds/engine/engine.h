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
#include "zero/param_store.h"

namespace ds::engine {

// All micro-batches of one step of one data-parallel rank: [m, B, T] each, int32; whole sequences, the same on all
// ranks that share them. Targets of -100 do not count.
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

struct GenerateOptions {
  i64 max_tokens = 100;
  double temperature = 1;  // 0: always the most likely token
  i64 top_k = 0;           // 0: all tokens
  u32 seed = 0;
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

  // Continues `prompt`; calls token(id) as each token is known, and stops after one for which it returns false.
  // Collective: all ranks give the same arguments and answers.
  void generate(std::span<const i32> prompt, const GenerateOptions& options, const std::function<bool(i32)>& token);

  // Whether all weights and moments of all ranks are numbers, and the work dtype can hold the weights. Collective.
  bool is_finite();

  // What of the state this rank saves: what it owns and no rank before it has, too. And all that it holds.
  const std::vector<zero::Piece>& saved_pieces() const noexcept { return saved_; }
  const std::vector<zero::Piece>& held_pieces() const noexcept { return held_; }
  // The row of a parameter on this rank.
  const model::ParamRow& row_of(i64 param) const noexcept { return *param_rows_[static_cast<size_t>(param)]; }

  // What this rank holds of the state of one piece of a parameter, in device memory: Param in the work dtype, all else
  // in fp32; null: what the parameter does not have.
  struct PieceState : PerState<void*> {
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
  Device& device() const noexcept { return device_; }
  Progress& progress() noexcept { return progress_; }
  LossScaler& scaler() noexcept { return scaler_; }
  // Gradients of the last finished step, as fp32 sums over micro-batches and ranks, still scaled and not yet divided by
  // grad_divisor(): of element `first` of a segment of plan().layout; for tests.
  float* gradient(i64 segment, i64 first) const noexcept;

 private:
  // A chunk of layers, and its memory for the micro-batches that are under way.
  struct Chunk {
    // The layers' activations by where they lie: those of micro-batch k are forward[views[k]] and backward[views[k]].
    std::vector<std::vector<model::LayerActs>> forward, backward;
    std::vector<size_t> views;
    std::vector<model::LayerActs> eval;
    std::vector<TensorView> inputs, grads_in, grads_out;  // [micro-batch % size]: messages of the pipeline
    std::vector<Ticket> inputs_here, grads_here;          // of receives that have been posted
    std::vector<Ticket> grads_sent;
  };

  // Gradients of equal copies that are parts of a sum over tp, of groups of so many ranks side by side; as many as are
  // exchanged at once.
  struct ReplicaSum {
    std::vector<TensorView> pieces;
    i64 elems = 0, copies = 1;
  };

  void make_buffers();
  void make_chunks();
  void make_pieces();
  model::PassContext context(model::Mode mode);
  model::RowViews param_views(const zero::ParamLease& lease, i64 layer) const;
  // Enqueues `body`, which is the same in every step; with cuda.graphs it is recorded once and launched from then on.
  void enqueue_static(size_t key, FunctionRef<void()> body);
  void drop_graphs() noexcept;

  // The instructions of a schedule.
  void load(const StepBatch& batch, i64 micro);
  void post_receives(size_t end);
  void post_next_receive(size_t at);
  void send(const pipeline::Instr& instr);
  void run_layers(const pipeline::Instr& instr);
  void run_call(const model::PassContext& ctx, const pipeline::Instr& instr, const pipeline::LayerCall& call);
  void receive_activation(const pipeline::Instr& instr);
  void evaluate_layers(const pipeline::Instr& instr);
  void send_evaluated(const pipeline::Instr& instr);
  const std::vector<model::LayerActs>& acts_of(const pipeline::Instr& instr) const noexcept;
  Ticket& output_sent(const pipeline::Instr& instr) noexcept;
  TensorView input_of(const pipeline::Instr& instr);
  void stash(const model::LayerActs& acts);    // what plan().partition_inputs and offload_inputs keep of an output
  void restore(const model::LayerActs& acts);  // acts.restored = the output
  int next_stage() const noexcept { return (plan_.coord.pp + 1) % plan_.mesh.pp; }
  int previous_stage() const noexcept { return (plan_.coord.pp + plan_.mesh.pp - 1) % plan_.mesh.pp; }

  void upload_tokens(i32* to, std::span<const i32> sequences);  // this rank's part of each
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
  PerState<Buffer> states_;               // as plan_.states says
  Buffer optimizer_workspace_, matrix_memory_;
  Buffer kept_, host_, working_, temporary_, streams_, head_weight_grad_, logits_, data_;
  Buffer tp_partial_, tp_gathered_, tp_sum_, tp_stats_, exchange_;
  std::vector<Chunk> chunks_;
  std::vector<Ticket> outputs_sent_;  // by the slot of plan_.kept where they lie
  // In data_, as what follows.
  TensorView ids_, targets_, positions_, row_positions_, token_types_, losses_, rope_cos_, rope_sin_;
  report::StepScalars* scalars_ = nullptr;
  double* micro_losses_ = nullptr;  // [ranks of dp, m]: our row is filled, then gathered; behind scalars_
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
  size_t posted_ = 0;                      // instructions of the schedule whose receives are under way
  size_t next_receive_ = 0;                // no receive stands between the present instruction and this one
  Ticket sent_;                            // of an evaluation's last activation
  std::vector<Device::Graph> graphs_;      // by pass, micro-batch and layer
  i64 graphs_scratch_ = 0;                 // of the device when they were recorded: their ops point into it
  bool warm_ = false;  // a step has been taken: its ops have taken their scratch and chosen algorithms
  LossScaler scaler_;
  LrSchedule lr_;
  Progress progress_;
  std::vector<i64> valid_tokens_;   // per micro-batch, of whole sequences
  std::vector<i32> tokens_;         // of a micro-batch, on their way to the device
  std::vector<std::byte> results_;  // the step's scalars and losses, read back
  const int uncaught_at_birth_ = std::uncaught_exceptions();
  i64 global_valid_tokens_ = 0;
};

}  // namespace ds::engine
