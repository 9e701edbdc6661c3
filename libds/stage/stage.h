// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stage: the layers of one rank of a pipeline with their activations. It runs them, in training, in evaluation and when
// text is written, and talks to the stages beside it. It knows neither what becomes of gradients nor optimizers.

#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "mesh/mesh.h"
#include "model/pass_memory.h"
#include "plan/run_plan.h"
#include "zero/shards.h"

namespace ds::stage {

// What a training pass of a micro-batch needs to know beside its tokens.
struct MicroBatch {
  RngKey dropout_key{};
  float loss_grad = 1;     // d(scaled total)/d(token loss)
  double per_token = 1;    // the share of a token's loss in the micro-batch's
  double* loss = nullptr;  // of the device: gets the micro-batch's loss
};

class Stage {
 public:
  // Takes its memory by the plan. All that is given outlives it. inputs: where ActivationPlan::inputs are, or null.
  Stage(const Config& config, const model::Model& model, const plan::RunPlan& plan, zero::AllShards& shards, Mesh& mesh,
        MemoryLedger& ledger, Device& device, std::unique_ptr<zero::TierArray> inputs);
  ~Stage();

  // Between steps: from now on passes are over sequences of another length, or layers see other numbers of their
  // tokens. The plan is plan::plan_of_length() of the one by which memory was taken, which has the longest, or that
  // one; `model` is of its length. Both outlive it. Takes no memory. Of another length not with inputs that are kept
  // away from the device.
  void reshape(const model::Model& model, const plan::RunPlan& plan);

  // This rank's part of the tokens of a micro-batch: B whole sequences each.
  void load(i64 micro, std::span<const i32> ids, std::span<const i32> targets);
  // Where documents of the same micro-batch begin and end, which every stage needs; nothing where sequences have none.
  void load_documents(i64 micro, std::span<const i32> ids, std::span<const i32> targets);

  // A training step: run() for each instruction of the plan's schedule in order, but for Load.
  void begin_step();
  void run(size_t instruction, const MicroBatch& micro);
  // From then on, with graphs, what is the same in every step is launched as recorded.
  void end_step() noexcept { warm_ = true; }

  // Runs an instruction of an evaluation's schedule, but for Load.
  void evaluate(const pipeline::Instr& instr);
  void end_evaluation() { sent_.wait(); }  // what comes next takes the memory
  // [R] fp32: losses of the last micro-batch, where the head is.
  TensorView losses() const noexcept { return memory_.losses; }
  // out [R,V] fp32: the logits of the micro-batch that was evaluated last, where the head is.
  void logits(TensorView out);

  // One forward pass through a chunk: x is its input (none for the first), acts by layer; returns its output.
  // `before(layer)` is called before each layer.
  TensorView forward(size_t chunk, model::PassContext& ctx, TensorView x, std::span<const model::LayerActs> acts,
                     FunctionRef<void(i64 layer)> before);

  model::PassContext context(const model::PassMemory& memory, const model::Pass& pass) const {
    return model::make_context(memory, pass, *model_, device_.ops(), stream_, &mesh_.tp(), &mesh_.sp());
  }

  const ModelConfig& model_config() const noexcept { return config_; }
  const model::Model& model() const noexcept { return *model_; }
  const plan::RunPlan& plan() const noexcept { return *plan_; }
  Mesh& mesh() const noexcept { return mesh_; }
  MemoryLedger& ledger() const noexcept { return ledger_; }
  Device& device() const noexcept { return device_; }
  int next() const noexcept { return (plan_->coord.pp + 1) % plan_->mesh.pp; }
  int previous() const noexcept { return (plan_->coord.pp + plan_->mesh.pp - 1) % plan_->mesh.pp; }

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

  void take_pass_memory();
  void fill_pass_memory();
  i64 stream_bytes() const noexcept;  // of a message of the pipeline
  void make_chunks();
  void upload_tokens(const TensorView& to, i64 micro, std::span<const i32> sequences);
  // What load_documents() has found of a micro-batch: [2, B, sequence length] and [B, sequence length]; or nothing.
  struct DocumentSpans {
    std::span<i32> borders{}, positions{};
  };
  DocumentSpans documents_of(i64 micro) noexcept;
  void draw(const pipeline::Instr& instr, const MicroBatch& micro);  // what its layers draw, before their forward pass
  // Of all groups, for one call of a layer.
  static constexpr size_t kMostGroups = 4;
  using Leases = std::array<std::optional<zero::ParamLease>, kMostGroups>;
  void begin_pass(FunctionRef<const zero::GatherPlan&(const zero::ShardsPlan&)> plan);
  Leases acquire();
  void acquire(Leases& leases);  // the next access, in the place of the one that ends
  // Brings tiles of a layer's parameters, in the order of the plan's accesses, or of its gradients.
  class ParamTiles;
  class GradTiles;
  template <class RowsOf>
  std::span<const TensorView> merge(std::span<const model::ParamRow> rows, std::vector<TensorView>& merged,
                                    RowsOf&& rows_of);
  model::RowViews param_views(const Leases& leases, i64 layer, model::Tiles& tiles);
  // Enqueues `body`, which is the same in every step; with graphs it is recorded once and launched from then on.
  void enqueue_static(size_t key, FunctionRef<void()> body);
  void drop_graphs() noexcept;

  void post_receives(size_t end);
  void post_next_receive(size_t at);
  void send(const pipeline::Instr& instr);
  void run_layers(const pipeline::Instr& instr, const MicroBatch& micro);
  void run_call(const model::PassContext& ctx, const pipeline::Instr& instr, const pipeline::LayerCall& call,
                const MicroBatch& micro);
  void receive_activation(const pipeline::Instr& instr);
  const std::vector<model::LayerActs>& acts_of(const pipeline::Instr& instr) const noexcept;
  Ticket& output_sent(const pipeline::Instr& instr) noexcept;
  TensorView input_of(const pipeline::Instr& instr);
  zero::TierLease stashed(const model::LayerActs& acts, zero::LeaseTo access);
  void stash(
      const model::LayerActs& acts);  // what plan().activations.partition_inputs and offload_inputs keep of an output
  void restore(const model::LayerActs& acts);  // acts.restored = the output

  const ModelConfig& config_;
  const model::Model* model_;
  const plan::RunPlan* plan_;
  zero::AllShards& shards_;
  Mesh& mesh_;
  MemoryLedger& ledger_;
  Device& device_;
  Stream& stream_;
  bool graphs_on_;
  model::PassMemory memory_;
  std::vector<Buffer> memory_buffers_;
  std::unique_ptr<zero::TierArray> inputs_;
  Buffer kept_, working_, temporary_, streams_;
  std::vector<Chunk> chunks_;
  std::vector<TensorView> merged_params_, merged_grads_;  // of a layer with rows of several groups
  std::vector<Ticket> outputs_sent_;                      // by the slot of plan_.activations.kept where they lie
  size_t posted_ = 0;                                     // instructions of the schedule whose receives are under way
  size_t next_receive_ = 0;            // no receive stands between the present instruction and this one
  Ticket sent_;                        // of an evaluation's last activation
  std::vector<Device::Graph> graphs_;  // by pass, micro-batch and layer
  i64 graphs_scratch_ = 0;             // of the device when they were recorded: their ops point into it
  bool warm_ = false;                  // a step has been taken: its ops have taken their scratch and chosen algorithms
  std::vector<i32> tokens_;            // of a micro-batch, on their way to the device
  i64 document_token_;
  float label_smoothing_, z_loss_;                   // of training
  std::vector<i32> documents_, document_positions_;  // of all micro-batches
  std::vector<i32> drawn_;                           // on its way to the device
};

}  // namespace ds::stage
