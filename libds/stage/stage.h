// SPDX-License-Identifier: Apache-2.0
#pragma once
// Stage: the layers of one pipeline rank and their activations. It runs them in training, evaluation and generation,
// and communicates with the neighbouring stages. It knows neither optimizers nor the further use of gradients.

#include <array>
#include <exception>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "mesh/mesh.h"
#include "model/pass_memory.h"
#include "plan/run_plan.h"
#include "zero/shards.h"

namespace ds::stage {

// Inputs of a training pass of a micro-batch besides its tokens.
struct MicroBatch {
  RngKey dropout_key{};
  float loss_grad = 1;             // d(scaled total)/d(token loss)
  double per_token = 1;            // weight of one token's loss in the micro-batch's loss
  double* loss = nullptr;          // in device memory; receives the micro-batch's loss
  double* aux_losses = nullptr;    // likewise; those of the model's layers that add one (Layer::adds_loss)
  float* expert_tokens = nullptr;  // likewise; those of all layers, to which the micro-batch's are added
};

class DeviceLink final : public model::HostLink {
 public:
  explicit DeviceLink(Device& device) : device_(device) {}
  void download(void* to, const void* from, i64 bytes) override { device_.download(to, from, bytes); }
  void upload(void* to, const void* from, i64 bytes) override { device_.upload(to, from, bytes); }
  void add_rounds(i64 more) override { rounds_ += more; }
  i64 take_rounds() noexcept { return std::exchange(rounds_, 0); }

 private:
  Device& device_;
  i64 rounds_ = 0;
};

// Where RunPlan::looked_up names a table, the first layer is given a table of the rows of these tokens alone: memory
// for it, [R, row], and for its ids, I32 [R].
struct LookUp {
  std::span<const i32> tokens{};
  TensorView table{}, ids{};
};

class Stage {
 public:
  // Allocates memory by the plan. All arguments must outlive it. inputs: the array for ActivationPlan::inputs, or null.
  Stage(const Config& config, const model::Model& model, const plan::RunPlan& plan, zero::AllShards& shards, Mesh& mesh,
        MemoryLedger& ledger, Device& device, std::unique_ptr<zero::TierArray> inputs);
  ~Stage();

  // Call between steps to change the sequence length of later passes, or the numbers of tokens that layers process. The
  // plan must be the one by which memory was allocated, which has the longest sequences, or the result of
  // plan::plan_of_length() for it; `model` must have its length. Both must outlive it. Allocates nothing. Inputs kept
  // away from the device do not support other lengths.
  void reshape(const model::Model& model, const plan::RunPlan& plan);

  // Sets this rank's part of a micro-batch's tokens; the arguments contain B whole sequences.
  void load(i64 micro, std::span<const i32> ids, std::span<const i32> targets);
  bool has_documents() const noexcept { return static_cast<bool>(memory_.documents); }
  // Sets where the documents of the micro-batch begin, which every stage needs: for each token of B whole sequences the
  // place in its sequence at which its document begins. Does nothing without documents.
  void load_documents(i64 micro, std::span<const i32> begins);

  // A training step: call run() for each instruction of the plan's schedule in order, except Load and Validate, and
  // begin_gradients() before the first backward pass. aux_grad: d(scaled total)/d(a layer's own loss of a micro-batch).
  void begin_step();
  void begin_gradients(float aux_grad);
  void run(size_t instruction, const MicroBatch& micro);
  // At Validate: parameters have changed, and the step begins again. All gathers and messages so far have ended.
  void begin_again();
  // From then on, with graphs, work that is the same in every step is launched as recorded.
  void end_step() noexcept { warm_ = true; }

  // Runs an instruction of an evaluation's schedule, except Load.
  void evaluate(const pipeline::Instr& instr);
  // The rounds beyond one of layers of experts since the last call.
  i64 take_expert_rounds() noexcept { return host_.take_rounds(); }
  void end_evaluation() { sent_.wait(); }  // later work reuses the memory
  // [R] fp32: losses of the last micro-batch, on the stage with the head.
  TensorView losses() const noexcept { return memory_.losses; }
  // out [R,V] fp32: the logits of the last micro-batch evaluated, on the stage with the head.
  void logits(TensorView out);

  // One forward pass through a chunk: x is its input (none for the first), acts are by layer; returns its output. Calls
  // before(layer) before each layer.
  TensorView forward(size_t chunk, model::PassContext& ctx, TensorView x, std::span<const model::LayerActs> acts,
                     FunctionRef<void(i64 layer)> before, const LookUp& look_up = {});

  model::PassContext context(const model::PassMemory& memory, const model::Pass& pass) const {
    model::PassContext ctx = model::make_context(memory, pass, *model_, device_.ops(), stream_, mesh_.by_axis());
    ctx.host = &host_;
    ctx.alone = plan_->invariant;
    return ctx;
  }

  const ModelConfig& model_config() const noexcept { return config_; }
  const model::Model& model() const noexcept { return *model_; }
  const plan::RunPlan& plan() const noexcept { return *plan_; }
  Mesh& mesh() const noexcept { return mesh_; }
  MemoryLedger& ledger() const noexcept { return ledger_; }
  Device& device() const noexcept { return device_; }
  // Starts a message of the pipeline to or from a neighbouring stage.
  Ticket send(pipeline::Op op, i64 chunk, const TensorView& data);
  Ticket receive(pipeline::Op op, i64 chunk, const TensorView& to);

 private:
  // A chunk of layers, and its memory for the micro-batches in flight.
  struct Chunk {
    // Activations of the layers, by slots: those of micro-batch k are forward[views[k]] and backward[views[k]].
    std::vector<std::vector<model::LayerActs>> forward, backward;
    std::vector<size_t> views;
    std::vector<model::LayerActs> eval;
    std::vector<TensorView> inputs, grads_in, grads_out;  // [micro-batch % size]: messages, or between two chunks
    std::vector<Ticket> inputs_here, grads_here;          // of posted receives
    std::vector<Ticket> grads_sent;
  };

  void take_pass_memory();
  void fill_pass_memory();
  i64 message_bytes() const noexcept;  // memory of a message of the pipeline
  // The part of a message that is after its stream: the numbers that layers share; none if they share none.
  TensorView shared_after(const TensorView& stream) const noexcept;
  // A message of a training step, whose stream this is.
  TensorView with_shared(const TensorView& stream) const noexcept;
  void copy_shared(const TensorView& to, const TensorView& from);
  // Takes the numbers that layers share before they run, and passes them on.
  void take_shared(const pipeline::Instr& instr);
  void pass_shared_back(const pipeline::Instr& instr);
  Communicator& way_of(pipeline::Op op, i64 chunk) const noexcept;
  void make_chunks();
  void upload_tokens(const TensorView& to, i64 micro, std::span<const i32> sequences);
  // The documents of a micro-batch, set by load_documents(): [2, B, sequence length] and [B, sequence length]; or
  // none.
  struct DocumentSpans {
    std::span<i32> borders{}, positions{};
  };
  DocumentSpans documents_of(i64 micro) noexcept;
  void draw(const pipeline::Instr& instr, const MicroBatch& micro);  // for its layers, before their forward pass
  // The leases of all groups for one call of a layer.
  static constexpr size_t kMostGroups = 4;
  using Leases = std::array<std::optional<zero::ParamLease>, kMostGroups>;
  void look_up_rows(const LookUp& look_up);
  void begin_pass(FunctionRef<const zero::GatherPlan&(const zero::ShardsPlan&)> plan);
  Leases acquire();
  void acquire(Leases& leases);  // the next access, replacing the previous one
  // Provides tiles of a layer's parameters, in the order of the plan's accesses, or of its gradients.
  class ParamTiles;
  class GradTiles;
  template <class RowsOf>
  std::span<const TensorView> merge(std::span<const model::ParamRow> rows, std::vector<TensorView>& merged,
                                    RowsOf&& rows_of);
  model::RowViews param_views(const Leases& leases, i64 layer, model::Tiles& tiles);
  // Enqueues `body`, whose work is the same in every step; with graphs it is recorded once and launched from then on.
  void enqueue_static(size_t key, FunctionRef<void()> body);
  void drop_graphs() noexcept;

  void post_receives(size_t end);
  void post_next_receive(size_t at);
  void send(const pipeline::Instr& instr);
  void run_layers(const pipeline::Instr& instr, const MicroBatch& micro);
  void run_call(const model::PassContext& ctx, const pipeline::Instr& instr, const pipeline::LayerCall& call,
                const MicroBatch& micro);
  const std::vector<model::LayerActs>& acts_of(const pipeline::Instr& instr) const noexcept;
  Ticket& output_sent(const pipeline::Instr& instr) noexcept;
  TensorView input_of(const pipeline::Instr& instr);
  TensorView projection_sum() const noexcept;
  zero::TierLease stashed(const model::LayerActs& acts, zero::LeaseTo access);
  // Stores the part of an output that plan().partition_inputs and offload_inputs keep.
  void stash(const model::LayerActs& acts);
  void restore(const model::LayerActs& acts);  // acts.restored = the output

  const ModelConfig& config_;
  const model::Model* model_;
  const plan::RunPlan* plan_;
  zero::AllShards& shards_;
  Mesh& mesh_;
  MemoryLedger& ledger_;
  Device& device_;
  mutable DeviceLink host_;
  Stream& stream_;
  bool graphs_on_;
  model::PassMemory memory_;
  std::vector<Buffer> memory_buffers_;
  std::unique_ptr<zero::TierArray> inputs_;
  Buffer kept_, working_, temporary_, streams_;
  std::vector<Chunk> chunks_;
  std::vector<TensorView> merged_params_, merged_grads_;  // for a layer with rows of several groups
  std::vector<Ticket> outputs_sent_;                      // by slot in plan_.kept of the outputs
  size_t posted_ = 0;                  // number of the schedule's instructions whose receives have been posted
  size_t next_receive_ = 0;            // no receive is between the current instruction and this one
  Ticket sent_;                        // of an evaluation's last activation
  std::vector<Device::Graph> graphs_;  // by pass, micro-batch and layer
  i64 graphs_scratch_ = 0;             // of the device when they were recorded: their ops refer to it
  bool warm_ = false;                  // a step has run, so its ops have allocated scratch and chosen algorithms
  std::vector<i32> tokens_;            // of a micro-batch, for upload
  bool positions_restart_;             // in each document
  float label_smoothing_, z_loss_;     // of training
  std::vector<i32> documents_, document_positions_;  // of all micro-batches
  std::vector<i32> drawn_;                           // for upload
};

}  // namespace ds::stage
