// SPDX-License-Identifier: Apache-2.0
#include "stage/stage.h"

#include <algorithm>
#include <map>
#include <utility>

#include "comm/message_tag.h"
#include "ds/building_blocks.h"
#include "model/models.h"
#include "plan/stage.h"

namespace ds::stage {

using pipeline::Instr;
using pipeline::LayerCall;
using pipeline::Op;

Stage::Stage(const Config& config, const model::Model& model, const plan::RunPlan& plan, zero::AllShards& shards,
             Mesh& mesh, MemoryLedger& ledger, Device& device, std::unique_ptr<zero::TierArray> inputs)
    : config_(config.model),
      model_(&model),
      plan_(&plan),
      shards_(shards),
      mesh_(mesh),
      ledger_(ledger),
      device_(device),
      host_(device),
      stream_(device.stream()),
      graphs_on_(config.cuda.graphs),
      memory_(plan.activations.pass),
      inputs_(std::move(inputs)),
      positions_restart_(config.data.document_positions == DocumentPositions::Restart),
      label_smoothing_(static_cast<float>(config.loss.label_smoothing)),
      z_loss_(static_cast<float>(config.loss.z_loss)) {
  DS_ASSERT(shards_.size() <= kMostGroups);
  temporary_ = device_buffer(device_, ledger_, Tag::Workspace, plan_->activations.temporary_bytes);
  if (plan_->use != ConfigUse::Generate) take_pass_memory();
  kept_ =
      device_buffer(device_, ledger_, Tag::Activations, plan_->activations.kept.count * plan_->activations.kept_bytes);
  working_ = device_buffer(device_, ledger_, Tag::Workspace, plan_->activations.working_bytes);
  streams_ = device_buffer(device_, ledger_, Tag::Workspace, plan_->activations.stream_slots * message_bytes());
  outputs_sent_.resize(plan_->activations.kept.count);
  if (plan_->use != ConfigUse::Generate) fill_pass_memory();
  make_chunks();
}

Stage::~Stage() { drop_graphs(); }

void Stage::reshape(const model::Model& model, const plan::RunPlan& plan) {
  DS_ASSERT(plan.use != ConfigUse::Generate && plan.stage.chunks.size() == chunks_.size());
  DS_ASSERT(inputs_ == nullptr || plan.activations.inputs.bytes == plan_->activations.inputs.bytes);
  // Sends of the last step read memory that is about to be laid out anew.
  for (Ticket& sent : outputs_sent_) sent.wait();
  for (Chunk& chunk : chunks_) {
    for (Ticket& sent : chunk.grads_sent) sent.wait();
  }
  sent_.wait();
  drop_graphs();
  warm_ = false;
  model_ = &model;
  plan_ = &plan;
  memory_ = plan.activations.pass;
  fill_pass_memory();
  chunks_.clear();
  make_chunks();
}

i64 Stage::message_bytes() const noexcept {
  return align_up(plan_->activations.message_bytes, plan::ActivationPlan::kMessageAlign);
}

TensorView Stage::shared_after(const TensorView& stream) const noexcept {
  const i64 at = align_up(stream.bytes(), plan::ActivationPlan::kMessageAlign),
            bytes = plan_->activations.message_bytes - at;
  if (bytes <= 0) return {};
  return TensorView::of(stream.as<char>() + at, DType::F32, {div_exact(bytes, dtype_bytes(DType::F32))});
}

TensorView Stage::with_shared(const TensorView& stream) const noexcept {
  return TensorView::of(stream.data, DType::U8, {plan_->activations.message_bytes});
}

void Stage::copy_shared(const TensorView& to, const TensorView& from) {
  if (to) device_.copy(to.data, from.data, to.bytes());
}

// Buffers that peers write into are the communicator's memory; tokens and the like are one allocation.
void Stage::take_pass_memory() {
  memory_buffers_.push_back(
      device_buffer(device_, ledger_, Tag::Data, align_up(plan_->activations.pass.bytes(Tag::Data), 8)));
  memory_.for_each([&](Tag tag, TensorView& v) {
    if (v.rank == 0 || tag == Tag::Data) return;
    const bool of_peers = &v == &memory_.partial || &v == &memory_.gathered;
    memory_buffers_.push_back(of_peers ? mesh_.tp().allocate(ledger_, tag, v.bytes())
                                       : device_buffer(device_, ledger_, tag, v.bytes()));
  });
}

void Stage::fill_pass_memory() {
  size_t next = 1;
  i64 of_data = 0;
  memory_.for_each([&](Tag tag, TensorView& v) {
    if (v.rank == 0) return;
    if (tag == Tag::Data) {
      v.data = memory_buffers_.front().as<char>().data() + of_data;
      of_data += v.bytes();
    } else {
      const Buffer& buffer = memory_buffers_[next++];
      DS_ASSERT(v.bytes() <= buffer.bytes());
      v.data = buffer.data();
    }
  });
  DS_ASSERT(next == memory_buffers_.size() && of_data <= memory_buffers_.front().bytes());
  const model::PassSizes& sizes = memory_.sizes;
  // Packed text is one segment.
  if (memory_.token_types) device_.zero(memory_.token_types.data, memory_.token_types.bytes());
  model::upload_layout(memory_, *model_, device_);
  model::upload_rotations(memory_, *model_, 0, sizes.rope_rows, device_);
  std::vector<i32> positions;
  for (const model::TokenRange& range : model_->shard.tokens(sizes.sequence_length)) {
    for (i64 t = 0; t < range.count; ++t) positions.push_back(static_cast<i32>(range.begin + t));
  }
  DS_ASSERT(std::ssize(positions) == sizes.T);
  device_.upload(memory_.positions.data, positions.data(), memory_.positions.bytes());
  for (i64 b = 0; b < sizes.B && !memory_.documents; ++b)
    device_.upload(memory_.row_positions.as<i32>() + b * sizes.T, positions.data(), sizes.T * 4);
  tokens_.resize(sizes.B * sizes.T);
  if (memory_.documents) {
    documents_.resize(2 * sizes.micro_batches * sizes.B * sizes.sequence_length);
    document_positions_.resize(sizes.micro_batches * sizes.B * sizes.sequence_length);
  }
}

void Stage::make_chunks() {
  const i64 S = plan_->shape().stream_rows, C = model_->hidden, bytes = message_bytes();
  DS_ASSERT(plan_->activations.kept.count * plan_->activations.kept_bytes <= kept_.bytes() &&
            plan_->activations.working_bytes <= working_.bytes() &&
            plan_->activations.temporary_bytes <= temporary_.bytes() &&
            plan_->activations.stream_slots * bytes <= streams_.bytes());
  char* const kept = static_cast<char*>(kept_.data());
  char *working = static_cast<char*>(working_.data()), *stream = static_cast<char*>(streams_.data());
  const auto streams = [&](i64 n) {
    std::vector<TensorView> views;
    for (i64 i = 0; i < n; ++i)
      views.push_back(TensorView::of(std::exchange(stream, stream + bytes), plan_->work, {S, C}));
    return views;
  };
  std::vector<TensorView> turns[2];  // breadth first: buffers between this chunk and the next, and between earlier ones
  for (i64 i = 0;
       plan_->stage.breadth_first && i < std::min<i64>(2, plan_->activations.stream_slots / plan_->micro_batches); ++i)
    turns[i] = streams(plan_->micro_batches);
  for (const plan::ChunkPlan& c : plan_->stage.chunks) {
    Chunk& chunk = chunks_.emplace_back();
    if (plan_->stage.breadth_first) {
      const size_t later = plan_->stage.chunks.size() - chunks_.size();
      if (c.sends_gradient) chunk.grads_out = turns[later % 2];
      if (c.gets_gradient) chunk.grads_in = turns[(later + 1) % 2];
    } else {
      if (c.receives()) chunk.inputs = streams(c.input_slots);
      if (c.sends_gradient)
        chunk.grads_out = c.continues ? chunks_[chunks_.size() - 2].grads_in : streams(c.grad_out_slots);
      if (c.gets_gradient) chunk.grads_in = streams(c.grad_in_slots);
    }
    chunk.inputs_here.resize(c.input_slots);
    chunk.grads_here.resize(c.grad_in_slots);
    chunk.grads_sent.resize(c.grad_out_slots);
    const auto plan = [&](model::Mode mode, i64 kept_slot, i64 working_slot, TensorView input_grad) {
      model::ActivationPlanner planner({.kept = kept + kept_slot * plan_->activations.kept_bytes,
                                        .working = working + working_slot * c.working_bytes,
                                        .temporary = temporary_.data(),
                                        .away = kept_slot * plan_->activations.away_bytes});
      auto acts = plan::plan_acts(*model_, c, *plan_, planner, mode, plan_->shape(), input_grad);
      DS_ASSERT(planner.kept_bytes() <= plan_->activations.kept_bytes && planner.working_bytes() <= c.working_bytes &&
                planner.temporary_bytes() <= plan_->activations.temporary_bytes);
      return acts;
    };
    // The activations of a micro-batch depend only on its slots, and many micro-batches have the same slots.
    std::map<std::array<i64, 3>, size_t> known;
    for (i64 micro = 0; plan_->trains() && micro < plan_->micro_batches; ++micro) {
      const i64 kept_slot = plan_->activations.kept.of[chunks_.size() - 1][micro],
                working_slot = c.scratch_slots + micro % std::max<i64>(c.working_slots - c.scratch_slots, 1),
                grad_slot = micro % c.grad_out_slots;
      const auto [found, is_new] = known.try_emplace({kept_slot, working_slot, grad_slot}, known.size());
      chunk.views.push_back(found->second);
      if (!is_new) continue;
      const TensorView grad_out = c.sends_gradient ? chunk.grads_out[grad_slot] : TensorView{};
      chunk.forward.push_back(plan(model::Mode::Train, kept_slot, 0, grad_out));
      if (plan_->stage.split_backward && c.chunk.has_backward())
        chunk.backward.push_back(plan(model::Mode::Train, kept_slot, working_slot, grad_out));
    }
    if (!plan_->stage.split_backward) chunk.backward = chunk.forward;
    if (plan_->use != ConfigUse::Generate) chunk.eval = plan(model::Mode::Eval, 0, 0, {});
    if (plan_->stage.split_backward) working += c.working_slots * c.working_bytes;
  }
}

void Stage::load(i64 micro, std::span<const i32> ids, std::span<const i32> targets) {
  upload_tokens(memory_.ids, micro, ids);
  upload_tokens(memory_.targets, micro, targets);
}

void Stage::load_documents(i64 micro, std::span<const i32> begins) {
  if (!memory_.documents) return;
  const i64 T = memory_.sizes.sequence_length, B = memory_.sizes.B;
  DS_ASSERT(std::ssize(begins) == B * T);
  const DocumentSpans of = documents_of(micro);
  const std::span<i32> ends = of.borders.subspan(static_cast<size_t>(B * T));
  std::ranges::copy(begins, of.borders.begin());
  for (i64 first = 0; first < B * T; first += T) {
    for (i64 t = T - 1; t >= 0; --t) {
      const auto at = static_cast<size_t>(first + t);
      const bool is_last = t == T - 1 || begins[at + 1] == static_cast<i32>(t + 1);
      ends[at] = is_last ? static_cast<i32>(t + 1) : ends[at + 1];
      of.positions[at] = static_cast<i32>(positions_restart_ ? t - begins[at] : t);
    }
  }
  const TensorView part = memory_.documents.rows(micro * 2 * B * T, 2 * B * T);
  device_.upload(part.data, of.borders.data(), part.bytes());
  upload_tokens(memory_.row_positions, micro, of.positions);
}

Stage::DocumentSpans Stage::documents_of(i64 micro) noexcept {
  if (!memory_.documents) return {};
  const size_t n = static_cast<size_t>(memory_.sizes.B * memory_.sizes.sequence_length),
               at = static_cast<size_t>(micro) * n;
  return {std::span(documents_).subspan(2 * at, 2 * n), std::span(document_positions_).subspan(at, n)};
}

void Stage::draw(const Instr& instr, const MicroBatch& micro) {
  const std::vector<model::LayerActs>& acts = acts_of(instr);
  const model::PassSizes& s = memory_.sizes;
  const i64 begin = plan_->stage.chunks[instr.chunk].chunk.begin;
  for (size_t l = 0; l < acts.size(); ++l) {
    const TensorView to = acts[l].drawn;
    if (to.rank == 0) continue;
    const DocumentSpans documents = documents_of(instr.micro);
    drawn_.resize(static_cast<size_t>(to.numel()));
    model_->layers[begin + static_cast<i64>(l)]->draw({.rng = micro.dropout_key,
                                                       .B = s.B,
                                                       .T = s.T,
                                                       .documents = documents.borders,
                                                       .positions = documents.positions},
                                                      drawn_);
    device_.upload(to.data, drawn_.data(), to.bytes());
  }
}

void Stage::upload_tokens(const TensorView& to, i64 micro, std::span<const i32> sequences) {
  const model::PassSizes& s = memory_.sizes;
  auto at = tokens_.begin();
  for (i64 b = 0; b < s.B; ++b) {
    for (const model::TokenRange& range : model_->shard.tokens(s.sequence_length))
      at = std::copy_n(sequences.begin() + b * s.sequence_length + range.begin, range.count, at);
  }
  const TensorView part = to.rows(micro * s.B * s.T, s.B * s.T);
  device_.upload(part.data, tokens_.data(), part.bytes());
}

void Stage::begin_pass(FunctionRef<const zero::GatherPlan&(const zero::ShardsPlan&)> plan) {
  for (const auto& s : shards_) s->params().begin(plan(s->plan()));
}

Stage::Leases Stage::acquire() {
  Leases leases;
  acquire(leases);
  return leases;
}

void Stage::acquire(Leases& leases) {
  for (auto& lease : leases) lease.reset();
  for (size_t g = 0; g < shards_.size(); ++g) leases[g].emplace(shards_[g]->params().acquire());
}

// The rows of a unit, each from its group.
template <class RowsOf>
std::span<const TensorView> Stage::merge(std::span<const model::ParamRow> rows, std::vector<TensorView>& merged,
                                         RowsOf&& rows_of) {
  if (shards_.size() == 1 || rows.empty()) return rows_of(0);
  merged.resize(rows.size());
  for (size_t g = 0; g < shards_.size(); ++g) {
    const std::span<const TensorView> of_group = rows_of(g);
    for (size_t r = 0; r < of_group.size(); ++r) {
      if (rows[r].group == g) merged[r] = of_group[r];
    }
  }
  return merged;
}

// Each tile is one more access of the gather plan; the layer's own units stay gathered.
class Stage::ParamTiles final : public model::Tiles {
 public:
  ParamTiles(Stage& stage, Leases& leases, i64 layer) : stage_(stage), leases_(leases), layer_(layer) {}
  void for_each(size_t row, FunctionRef<void(i64, TensorView)> use) override {
    const size_t group = stage_.plan_->rows[plan::RunPlan::unit_of(layer_)][row].group;
    for (const zero::MatrixTile& tile : stage_.plan_->tiles_of(layer_, row)) {
      stage_.acquire(leases_);
      const TensorView rows = leases_[group]->rows(tile.unit).front();
      DS_ASSERT(rows.data != nullptr);  // else the layer's products read matrices in another order than it declares
      use(tile.first, rows);
    }
  }

 private:
  Stage& stage_;
  Leases& leases_;
  i64 layer_;
};

class Stage::GradTiles final : public model::Tiles {
 public:
  GradTiles(Stage& stage, i64 layer, i64 micro) : stage_(stage), layer_(layer), micro_(micro) {}
  void for_each(size_t row, FunctionRef<void(i64, TensorView)> use) override {
    const size_t group = stage_.plan_->rows[plan::RunPlan::unit_of(layer_)][row].group;
    zero::GradStore& grads = stage_.shards_[group]->grads();
    for (const zero::MatrixTile& tile : stage_.plan_->grad_tiles_of(layer_, row)) {
      use(tile.first, grads.acquire(tile.unit).front());
      grads.commit(tile.unit, micro_);
    }
  }

 private:
  Stage& stage_;
  i64 layer_, micro_;
};

model::RowViews Stage::param_views(const Leases& leases, i64 layer, model::Tiles& tiles) {
  const bool shared = model_->uses_shared(layer);
  const auto rows_of = [&](size_t g) { return leases[g]->rows(plan::RunPlan::unit_of(layer)); };
  return {merge(model_->layers[layer]->rows(), merged_params_, rows_of),
          shared ? leases[0]->rows(plan::RunPlan::kSharedUnit)[0] : TensorView{}, &tiles};
}

void Stage::drop_graphs() noexcept {
  for (Device::Graph& graph : graphs_) {
    if (graph != nullptr) device_.destroy_graph(std::exchange(graph, nullptr));
  }
}

void Stage::enqueue_static(size_t key, FunctionRef<void()> body) {
  if (!graphs_on_ || !warm_) return body();
  if (device_.scratch_bytes() != graphs_scratch_) {
    drop_graphs();
    graphs_scratch_ = device_.scratch_bytes();
  }
  if (graphs_.size() <= key) graphs_.resize(key + 1);
  if (graphs_[key] == nullptr) {
    graphs_[key] = device_.record_graph(body);
    DS_CHECK(graphs_[key] != nullptr, Errc::Config, "cuda.graphs: {} has none", device_.name());
  }
  device_.launch(graphs_[key]);
}

void Stage::begin_gradients(float aux_grad) {
  if (memory_.aux_grad) device_.upload(memory_.aux_grad.data, &aux_grad, sizeof aux_grad);
}

void Stage::begin_again() {
  for (const auto& s : shards_) s->params().abandon();
  begin_step();
}

void Stage::begin_step() {
  if (memory_.step_counts) device_.zero(memory_.step_counts.data, memory_.step_counts.bytes());
  begin_pass([](const zero::ShardsPlan& s) -> const zero::GatherPlan& { return s.train_gathers; });
  posted_ = next_receive_ = 0;
}

void Stage::run(size_t at, const MicroBatch& micro) {
  const Instr& instr = plan_->stage.schedule[at];
  switch (instr.op) {
    case Op::Load:
    case Op::Validate: break;
    case Op::RecvActivation:
    case Op::RecvGrad: post_receives(at + 1); break;
    case Op::SendActivation:
    case Op::SendGrad: send(instr); break;
    case Op::Forward:
    case Op::Backward:
    case Op::BackwardInput:
    case Op::BackwardWeight:
      post_next_receive(at);
      run_layers(instr, micro);
      break;
  }
}

namespace {

template <class T>
T& slot_of(std::vector<T>& slots, i64 micro) {
  return slots[static_cast<size_t>(micro) % slots.size()];
}

}  // namespace

// Posts the receives up to instruction `end` of the schedule, in order. Their slots are free, since there is one more
// than micro-batches in flight.
void Stage::post_receives(size_t end) {
  for (; posted_ < end; ++posted_) {
    const Instr& instr = plan_->stage.schedule[posted_];
    Chunk& chunk = chunks_[instr.chunk];
    if (instr.op == Op::RecvActivation) {
      slot_of(chunk.inputs_here, instr.micro) =
          receive(instr.op, instr.chunk, with_shared(slot_of(chunk.inputs, instr.micro)));
    } else if (instr.op == Op::RecvGrad) {
      slot_of(chunk.grads_here, instr.micro) =
          receive(instr.op, instr.chunk, with_shared(slot_of(chunk.grads_in, instr.micro)));
    }
  }
}

// Called before layers run: posts the next receive, so that it overlaps with them; none beyond Validate, before which
// the step may begin again.
void Stage::post_next_receive(size_t at) {
  const auto stops = [](const Instr& i) {
    return i.op == Op::RecvActivation || i.op == Op::RecvGrad || i.op == Op::Validate;
  };
  next_receive_ = std::max(next_receive_, at);
  while (next_receive_ < plan_->stage.schedule.size() && !stops(plan_->stage.schedule[next_receive_])) ++next_receive_;
  if (next_receive_ < plan_->stage.schedule.size()) post_receives(next_receive_ + 1);
}

Communicator& Stage::way_of(Op op, i64 chunk) const noexcept {
  return plan_->stage.placement.way_of(op, chunk) == pipeline::Way::Down ? mesh_.down() : mesh_.up();
}

Ticket Stage::send(Op op, i64 chunk, const TensorView& data) {
  return way_of(op, chunk).send(data.data, data.bytes(), plan_->stage.placement.peer_of(plan_->coord.pp, op, chunk),
                                message_text(Axis::Pp, Collective::Send));
}

Ticket Stage::receive(Op op, i64 chunk, const TensorView& to) {
  return way_of(op, chunk).recv(to.data, to.bytes(), plan_->stage.placement.peer_of(plan_->coord.pp, op, chunk),
                                message_text(Axis::Pp, Collective::Recv));
}

void Stage::send(const Instr& instr) {
  Chunk& chunk = chunks_[instr.chunk];
  if (instr.op == Op::SendActivation) {
    output_sent(instr) = send(instr.op, instr.chunk, with_shared(acts_of(instr).back().output));
  } else {
    slot_of(chunk.grads_sent, instr.micro) =
        send(instr.op, instr.chunk, with_shared(slot_of(chunk.grads_out, instr.micro)));
  }
}

const std::vector<model::LayerActs>& Stage::acts_of(const Instr& instr) const noexcept {
  const Chunk& chunk = chunks_[instr.chunk];
  const bool forward = instr.op == Op::Forward || instr.op == Op::SendActivation;
  return (forward ? chunk.forward : chunk.backward)[chunk.views[instr.micro]];
}

Ticket& Stage::output_sent(const Instr& instr) noexcept {
  const i64 slot = plan_->activations.kept.of[instr.chunk][instr.micro];
  return outputs_sent_[slot];
}

// The input of a chunk's first layer; it has arrived when this returns.
TensorView Stage::input_of(const Instr& instr) {
  Chunk& chunk = chunks_[instr.chunk];
  if (plan_->stage.chunks[instr.chunk].first) return {};
  if (plan_->stage.chunks[instr.chunk].continues) {
    const Chunk& before = chunks_[instr.chunk - 1];
    return before.forward[before.views[instr.micro]].back().output;
  }
  slot_of(chunk.inputs_here, instr.micro).wait();
  return slot_of(chunk.inputs, instr.micro);
}

void Stage::run_layers(const Instr& instr, const MicroBatch& micro) {
  const plan::ChunkPlan& plan = plan_->stage.chunks[instr.chunk];
  Chunk& chunk = chunks_[instr.chunk];
  const model::PassSizes& s = memory_.sizes;
  model::PassContext ctx = context(memory_, {.mode = model::Mode::Train, .B = s.B, .T = s.T, .micro = instr.micro});
  ctx.dropout_key = micro.dropout_key;
  ctx.loss_grad = micro.loss_grad;
  ctx.label_smoothing = label_smoothing_;
  ctx.z_loss = z_loss_;
  ctx.shared_stats = acts_of(instr).back().shared_stats;
  if (plan_->fused) {
    ctx.term = instr.micro == 0 ? model::GradTerm::First : model::GradTerm::Later;
    ctx.head_weight_grad = projection_sum();
  }

  // Waits for sends of the memory that this instruction overwrites.
  if (instr.op == Op::Forward) {
    output_sent(instr).wait();
    draw(instr, micro);
  }
  if (instr.op == Op::Backward || instr.op == Op::BackwardInput) {
    slot_of(chunk.grads_sent, instr.micro).wait();
    slot_of(chunk.grads_here, instr.micro).wait();
  }
  take_shared(instr);
  for (const LayerCall& call : plan.calls(instr.op)) run_call(ctx, instr, call, micro);
  pass_shared_back(instr);
}

// In the forward pass with the input, in the backward pass with the gradient of the output.
void Stage::take_shared(const Instr& instr) {
  const TensorView own = acts_of(instr).back().shared_stats;
  if (!own) return;
  const plan::ChunkPlan& plan = plan_->stage.chunks[instr.chunk];
  if (instr.op == Op::Forward) {
    plan.first ? device_.zero(own.data, own.bytes()) : copy_shared(own, shared_after(input_of(instr)));
  } else if (instr.op != Op::BackwardWeight && plan.gets_gradient) {
    copy_shared(own, shared_after(slot_of(chunks_[instr.chunk].grads_in, instr.micro)));
  }
}

void Stage::pass_shared_back(const Instr& instr) {
  const bool back = instr.op == Op::Backward || instr.op == Op::BackwardInput;
  if (!back || !plan_->stage.chunks[instr.chunk].sends_gradient) return;
  copy_shared(shared_after(slot_of(chunks_[instr.chunk].grads_out, instr.micro)), acts_of(instr).back().shared_stats);
}

// The gradient of the output projection, summed over micro-batches; none on other stages, or if it is not trained.
TensorView Stage::projection_sum() const noexcept {
  if (!plan_->projects || !model_->trains_projection()) return {};
  const i64 row = model_->projection_row();
  if (row < 0) return shards_[0]->grads().rows(plan_->head_use())[0];
  const size_t group = model_->layers.back()->rows()[row].group;
  return shards_[group]->grads().rows(plan::RunPlan::unit_of(std::ssize(model_->layers) - 1))[row];
}

void Stage::run_call(const model::PassContext& ctx, const Instr& instr, const LayerCall& call,
                     const MicroBatch& micro) {
  const plan::ChunkPlan& plan = plan_->stage.chunks[instr.chunk];
  Chunk& chunk = chunks_[instr.chunk];
  const model::Layer& layer = *model_->layers[call.layer];
  const bool head = call.layer + 1 == std::ssize(model_->layers);
  const size_t at = static_cast<size_t>(call.layer - plan.chunk.begin);
  const auto& layers = acts_of(instr);
  const model::LayerActs& acts = layers[at];
  TensorView x = at > 0 ? layers[at - 1].output : input_of(instr);
  if (at > 0 && layers[at - 1].stash.rank > 0 && instr.op != Op::Forward) {
    const model::LayerActs& before = layers[at - 1];
    if (call.restore) restore(before);
    x = before.restored.rows(0, before.output.dim(0));
  }
  const auto dy = [&] {
    if (head) return TensorView{};
    return at + 1 < layers.size() ? layers[at + 1].input_grad : slot_of(chunk.grads_in, instr.micro);
  };
  const size_t key = ((static_cast<size_t>(instr.micro) * 3 + static_cast<size_t>(call.kind)) * 2 +
                      (instr.op == Op::Forward ? 0 : 1)) *
                         model_->layers.size() +
                     static_cast<size_t>(call.layer);
  switch (call.kind) {
    case LayerCall::Kind::Forward: {
      Leases leases = acquire();
      ParamTiles tiles(*this, leases, call.layer);
      const bool again = instr.op != Op::Forward;
      const model::PassContext own = model::forward_context(ctx, *model_, call.layer, again);
      enqueue_static(key, [&] { layer.forward(own, param_views(leases, call.layer, tiles), x, acts); });
      if (call.stash && acts.stash.rank > 0) stash(acts);
      // Taken before another layer writes there; a recomputation does not count again.
      if (layer.adds_loss() && !again) {
        double* const to = micro.aux_losses + model_->aux_losses_before(call.layer);
        ctx.ops.sum(TensorView::of(to, DType::F64, {1}), ctx.aux_loss, 1, stream_);
      }
      if (const i64 n = layer.num_counts(); n > 0 && !again) {
        const TensorView counts = ctx.counts.rows(0, n);
        ctx.ops.fold(TensorView::of(micro.expert_tokens + model_->counts_before(call.layer), DType::F32, {n}),
                     {&counts, 1}, true, stream_);
      }
      break;
    }
    case LayerCall::Kind::BackwardInput: {
      Leases leases = acquire();
      ParamTiles tiles(*this, leases, call.layer);
      const auto body = [&] {
        const model::RowViews params = param_views(leases, call.layer, tiles);
        if (call.again)
          layer.recompute(model::forward_context(ctx, *model_, call.layer, true), params, x, acts,
                          plan.chunk.keep_of(call.layer));
        layer.backward_input(ctx, params, x, dy(), acts);
      };
      if (!head) {
        enqueue_static(key, body);
        break;
      }
      body();  // the loss has a different scale in every step
      ctx.ops.sum(TensorView::of(micro.loss, DType::F64, {1}), memory_.losses, micro.per_token, stream_);
      break;
    }
    case LayerCall::Kind::BackwardWeight: {
      const i64 own = plan::RunPlan::unit_of(call.layer),
                shared = head ? plan_->head_use() : plan::RunPlan::kSharedUnit;
      const bool has_shared = model_->uses_shared(call.layer) && shards_[0]->plan().has_grads(shared);
      const i64 parts = plan_->reduce_each_micro ? layer.gradient_parts() : 1;
      for (i64 part = 0; part < parts; ++part) {
        const auto takes = [&](size_t g) { return part == 0 || shards_[g]->plan().grads.parts > 1; };
        const auto rows_of = [&](size_t g) {
          zero::GradStore& grads = shards_[g]->grads();
          return takes(g) && shards_[g]->plan().has_grads(own) ? grads.acquire(own) : grads.rows(own);
        };
        GradTiles tiles(*this, call.layer, instr.micro);
        const model::RowViews views{merge(layer.rows(), merged_grads_, rows_of),
                                    has_shared && part == 0 ? shards_[0]->grads().acquire(shared)[0] : TensorView{},
                                    &tiles};
        model::PassContext of_part = ctx;
        if (parts > 1) of_part.part = part;
        enqueue_static(key, [&] { layer.backward_weight(of_part, views, x, dy(), acts); });
        for (const auto& s : shards_) {
          if (!takes(static_cast<size_t>(&s - shards_.data())) || !s->plan().has_grads(own)) continue;
          const i64 of = s->plan().grads.parts;
          s->grads().commit(own, instr.micro * of + (of > 1 ? part : 0));  // may start the reduction of its bucket
        }
      }
      if (has_shared) shards_[0]->grads().commit(shared, instr.micro);
      break;
    }
  }
}

zero::TierLease Stage::stashed(const model::LayerActs& acts, zero::LeaseTo access) {
  return inputs_->lease(acts.stash_at, plan_->activations.inputs.part_bytes, access);
}

void Stage::stash(const model::LayerActs& acts) {
  const i64 slice = acts.stash.dim(0), first = plan_->activations.partition_inputs ? plan_->coord.tp * slice : 0;
  const i64 count = std::clamp<i64>(acts.output.dim(0) - first, 0, slice);
  const TensorView rows = count > 0 ? acts.output.rows(first, count) : TensorView{};
  if (plan_->activations.offload_inputs) {
    const zero::TierLease there = stashed(acts, zero::LeaseTo::Fill);
    if (rows) device_.download(there.data(), rows.data, rows.bytes());
  } else if (rows) {
    device_.copy(acts.stash.data, rows.data, rows.bytes());
  }
}

void Stage::restore(const model::LayerActs& acts) {
  const i64 slice = acts.stash.dim(0), first = plan_->activations.partition_inputs ? plan_->coord.tp * slice : 0;
  const TensorView rows = acts.restored.rows(first, slice);
  if (plan_->activations.offload_inputs) {
    const zero::TierLease there = stashed(acts, zero::LeaseTo::Read);
    device_.upload(rows.data, there.data(), rows.bytes());
  } else {
    device_.copy(rows.data, acts.stash.data, rows.bytes());
  }
  if (!plan_->activations.partition_inputs) return;
  const AllGatherSegment all{acts.restored.data, rows.bytes()};
  mesh_.tp().all_gather({&all, 1}, message_text(Axis::Tp, Collective::AllGather)).wait();
}

TensorView Stage::forward(size_t c, model::PassContext& ctx, TensorView x, std::span<const model::LayerActs> acts,
                          FunctionRef<void(i64)> before, const LookUp& look_up) {
  for (const auto& s : shards_) {
    if (!plan_->trains()) s->params().pack();
  }
  begin_pass([c](const zero::ShardsPlan& s) -> const zero::GatherPlan& { return s.eval_gathers[c]; });
  const pipeline::Chunk& chunk = plan_->stage.chunks[c].chunk;
  for (i64 l = chunk.begin; l < chunk.end; ++l) {
    before(l);
    Leases leases = acquire();
    ParamTiles tiles(*this, leases, l);
    const model::LayerActs& layer = acts[l - chunk.begin];
    model::RowViews params = param_views(leases, l, tiles);
    const TensorView ids = ctx.ids;
    if (l == 0 && plan_->looked_up >= 0) {
      look_up_rows(look_up);
      ctx.ids = look_up.ids;
      if (model_->uses_shared(l)) {
        params.shared = look_up.table;
      } else {
        params.own = {&look_up.table, 1};
      }
    }
    model_->layers[l]->forward(ctx, params, x, layer);
    ctx.ids = ids;
    x = layer.output;
  }
  return x;
}

// Row i of the table is that of token i, whose id is thus the i'th of this rank's, or none if another rank of tp has
// its row.
void Stage::look_up_rows(const LookUp& look_up) {
  const model::Shard& shard = model_->shard;
  const i64 first = model::vocab_begin(model_->vocab, shard, shard.tp_rank),
            end = model::vocab_begin(model_->vocab, shard, shard.tp_rank + 1);
  std::vector<i64> rows;
  std::vector<i32> ids;
  for (const i32 id : look_up.tokens) {
    const bool here = id >= first && id < end;
    ids.push_back(narrow<i32>(here ? first + std::ssize(rows) : -1));
    rows.push_back(here ? id - first : -1);
  }
  device_.upload(look_up.ids.data, ids.data(), look_up.ids.bytes());
  shards_[0]->params().look_up(plan_->looked_up, rows, look_up.table);
}

void Stage::evaluate(const Instr& instr) {
  const size_t c = static_cast<size_t>(instr.chunk);
  if (instr.op == Op::RecvActivation)
    slot_of(chunks_[c].inputs_here, instr.micro) =
        receive(instr.op, instr.chunk, slot_of(chunks_[c].inputs, instr.micro));
  if (instr.op == Op::SendActivation) {
    sent_ = send(instr.op, instr.chunk, chunks_[c].eval.back().output);
  }
  if (instr.op != Op::Forward) return;
  sent_.wait();  // of the previous micro-batch: layers alternate between output buffers
  const model::PassSizes& s = memory_.sizes;
  model::PassContext ctx = context(memory_, {.mode = model::Mode::Eval, .B = s.B, .T = s.T, .micro = instr.micro});
  const TensorView x = plan_->stage.chunks[c].continues ? chunks_[c - 1].eval.back().output : input_of(instr);
  forward(c, ctx, x, chunks_[c].eval, [](i64) {});
}

void Stage::logits(TensorView out) {
  const pipeline::Chunk& last = plan_->stage.chunks.back().chunk;
  begin_pass([](const zero::ShardsPlan& s) -> const zero::GatherPlan& { return s.eval_gathers.back(); });
  for (i64 l = last.begin; l < last.end; ++l) {
    Leases leases = acquire();
    ParamTiles tiles(*this, leases, l);
    if (l + 1 < last.end) {  // visited only for the accesses of the plan
      for (const size_t row : model_->layers[l]->products(model::Products::Forward))
        tiles.for_each(row, [](i64, TensorView) {});
      continue;
    }
    const model::PassSizes& s = memory_.sizes;
    model_->layers.back()->logits(context(memory_, {.mode = model::Mode::Eval, .B = s.B, .T = s.T}),
                                  param_views(leases, l, tiles), chunks_.back().eval.back(), out);
  }
}

}  // namespace ds::stage
