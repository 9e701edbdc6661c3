// SPDX-License-Identifier: Apache-2.0
#include "update/update.h"

#include "comm/message_tag.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "update/meetings.h"

namespace ds::update {

// Sends an optimizer's passes to the stores of its parameters' states.
class Update::States final : public optim::GroupStates {
 public:
  States(zero::AllShards& shards, GroupPieces pieces) : shards_(shards), pieces_(std::move(pieces)) {}
  // For the passes of a step.
  void set_verdict(zero::VerdictHandle& verdict) noexcept { verdict_ = &verdict; }
  void update(const UpdateSpec& spec) override {
    for (size_t g = 0; g < pieces_.of.size(); ++g) {
      if (!pieces_.of[g].held.empty()) shards_[g]->states().update(pieces_.of[g].held, spec, *verdict_);
    }
  }
  void for_each_counted(FunctionRef<void(i64, TensorView, TensorView)> visit) override {
    for (size_t g = 0; g < pieces_.of.size(); ++g) {
      const auto with_direction = [&](const zero::TilePiece& p, TensorView master) {
        const zero::TierLease direction = shards_[g]->gradient(p.piece, zero::LeaseTo::Read);
        visit(p.index, master, TensorView::of(direction.data(), DType::F32, {p.piece.count}));
      };
      shards_[g]->states().for_each_master(pieces_.of[g].counted, with_direction);
    }
  }

 private:
  zero::AllShards& shards_;
  GroupPieces pieces_;
  zero::VerdictHandle* verdict_ = nullptr;
};

// Those of one group of parameters in each reduction group, one after the other.
class Update::Matrices final : public optim::WholeMatrices {
 public:
  Matrices(Update& update, size_t group, const SlicesOf& slices_of) : update_(update) {
    const UpdatePlan& plan = update.plan_;
    std::vector<std::vector<model::ParamSlice>> of_ranks;
    for (int r = 0; r < plan.mesh.tp && plan.mesh.tp > 1; ++r) of_ranks.push_back(slices_of(r));
    float* const memory = update.matrix_memory_.as<float>().data();
    size_t most = 0;
    exchanges_.reserve(plan.shards.size());
    for (size_t s = 0; s < plan.shards.size(); ++s) {
      const std::vector<zero::MatrixPlace>& places = plan.matrices[group][s];
      std::vector<std::vector<model::ParamSlice>> slices(places.size());
      for (size_t i = 0; i < places.size(); ++i) {
        for (const auto& of_rank : of_ranks) slices[i].push_back(of_rank[places[i].param]);
      }
      exchanges_.emplace_back(places, slices, update.shards_[s]->comm(), plan.shards[s].axis, update.axes_.tp, memory,
                              memory + plan.matrix_memory.whole);
      std::vector<zero::Piece>& pieces = pieces_.emplace_back();
      for (const zero::Piece& piece : plan.shards[s].layout.held_pieces(plan.shards[s].rank)) {
        if (std::ranges::find(places, piece.param, &zero::MatrixPlace::param) != places.end()) pieces.push_back(piece);
      }
      std::ranges::sort(pieces, {}, place_of);
      most = std::max(most, pieces.size());
    }
    leases_.reserve(most);
  }

  void for_each(FunctionRef<void(TensorView)> body) override {
    for (size_t s = 0; s < exchanges_.size(); ++s) {
      const std::vector<zero::Piece>& pieces = pieces_[s];
      for (const zero::Piece& piece : pieces) leases_.push_back(update_.combine_.gradient(piece, zero::LeaseTo::Write));
      exchanges_[s].for_each(
          [&](i64 param, i64 begin) {
            const auto after = std::ranges::upper_bound(pieces, std::pair(param, begin), {}, place_of);
            const i64 i = after - pieces.begin() - 1;
            return leases_[i].values() + (begin - pieces[i].begin);
          },
          [&](void* to, const void* from, i64 bytes) { update_.device_.copy(to, from, bytes); }, body);
      leases_.clear();
    }
  }

 private:
  static std::pair<i64, i64> place_of(const zero::Piece& p) { return {p.param, p.begin}; }

  Update& update_;
  std::vector<zero::MatrixExchange> exchanges_;   // by shards
  std::vector<std::vector<zero::Piece>> pieces_;  // likewise: this rank's pieces of the matrices, by place
  std::vector<zero::TierLease> leases_;           // of the pieces, while matrices are exchanged
};

// Numbers that optimizers keep of whole parameters (optim::Optimizer::numbers).
class Update::OptimizerNumbers final : public zero::SavedState {
 public:
  explicit OptimizerNumbers(const Update& update) : plan_(update.plan_), trained_(update.trained_) {}
  std::string_view numbers_key() const noexcept override { return "optimizer_numbers"; }
  i64 num_numbers(i64 param) const noexcept override { return plan_.groups.of(param).numbers_per_param(); }
  std::vector<std::span<double>> numbers() override {
    std::vector<std::span<double>> all(plan_.params.size());
    for (const Trained& t : trained_) {
      std::span<double> of_group = t.optimizer->numbers();
      for (const i64 param : plan_.params_of(t.group)) {
        const auto each = static_cast<size_t>(num_numbers(param));
        if (each == 0) break;
        all[param] = of_group.first(each);
        of_group = of_group.subspan(each);
      }
    }
    return all;
  }

 private:
  const UpdatePlan& plan_;
  const std::vector<Trained>& trained_;
};

Update::Update(const UpdatePlan& plan, zero::AllShards& shards, const Axes& axes, Device& device, MemoryLedger& ledger,
               const SlicesOf& slices_of)
    : plan_(plan),
      shards_(shards),
      axes_(axes),
      device_(device),
      combine_(plan, shards, axes, ledger, device),
      workspace_(device_buffer(device, ledger, Tag::Workspace, plan.optimizer_workspace)),
      matrix_memory_(
          device_buffer(device, ledger, Tag::Workspace, (plan.matrix_memory.whole + plan.matrix_memory.slices) * 4)) {
  if (plan.diloco.enabled) outer_.emplace(plan, shards, combine_, axes.outer, device, ledger);
  char* workspace = static_cast<char*>(workspace_.data());
  for (size_t g = 0; g < plan.groups.groups.size(); ++g) {
    const optim::ParamGroup& group = plan.groups.groups[g];
    if (group.frozen) continue;
    GroupPieces pieces = plan.pieces_of(g);
    if (pieces.size.num_params == 0) continue;
    Trained& t = trained_.emplace_back();
    t.group = g;
    t.optimizer = optim::make_optimizer(group, pieces.size, workspace);
    if (workspace != nullptr) workspace += optim::workspace_bytes(group, pieces.size);
    t.states = std::make_unique<States>(shards, std::move(pieces));
    if (group.needs_matrices()) t.matrices = std::make_unique<Matrices>(*this, g, slices_of);
    if (group.averages_by_signs()) t.average = std::make_unique<SignAverage>(plan, g, shards, combine_, device, ledger);
  }
  list_saved_states();
  i64 elems = 0;
  for (const BalancedRouter& router : plan.balances) elems += router.bias.count;
  if (plan.dp().undoes) kept_balances_ = device_buffer(device, ledger, Tag::Params, elems * 4);
  if (!saved_.empty()) norm_numbers_ = device_buffer(device, ledger, Tag::Workspace, 3 * kNorms * 8);
}

// The one list of all kinds: a new kind is added here. Ranks of a pipeline's stages have the same kinds.
void Update::list_saved_states() {
  const auto any = [&](auto&& of_group) { return std::ranges::any_of(plan_.groups.groups, of_group); };
  if (outer_) saved_.push_back(&*outer_);
  for (const auto& s : shards_) std::ranges::copy(s->grads().saved_states(), std::back_inserter(saved_));
  if (any(&optim::ParamGroup::averages_by_signs)) {
    saved_.push_back(&signs_.emplace(plan_, axes_.dp.size()));
    for (const Trained& t : trained_) {
      if (t.average) signs_->add(*t.average);
    }
  }
  if (any([](const optim::ParamGroup& g) { return g.numbers_per_param() > 0; })) {
    numbers_ = std::make_unique<OptimizerNumbers>(*this);
    saved_.push_back(numbers_.get());
  }
}

Update::~Update() = default;

void Update::begin(i64 number, double loss_scale) {
  apart_ = keeps_gradients_apart(number);
  for (const auto& s : shards_) s->grads().begin({.reduces = !apart_, .loss_scale = static_cast<float>(loss_scale)});
}

void Update::finish_gradients() {
  for (const auto& s : shards_) s->grads().finish();
  combine_.run(apart_);
  if (apart_) return;
  for (const auto& s : shards_) s->grads().gather(s->plan().gathered_grads);
}

void Update::judge(StepScalars& numbers, JudgeParams params) {
  combine_.finish();
  if (apart_) {  // each rank's gradient is a term of the mean, and no rank knows the norm of the mean
    params.divisor /= static_cast<double>(axes_.dp.size());
    params.clip = 0;
  }
  const OpTable& ops = device_.ops();
  Stream& stream = device_.stream();
  const TensorView max_abs = TensorView::of(&numbers.max_abs, DType::I64, {1}),
                   sum = TensorView::of(&numbers.sum, DType::I64, {2});
  const auto for_each_gradient = [&](auto&& visit) {
    for (const zero::Piece& p : (apart_ ? plan_.combine_own : plan_.combine).judged) {
      zero::for_each_part(p, combine_.most_leased(p), [&](const zero::Piece& part) {
        const zero::TierLease lease = combine_.gradient(part, zero::LeaseTo::Read);
        visit(TensorView::of(lease.data(), DType::F32, {part.count}));
      });
    }
  };
  for_each_gradient([&](TensorView g) { ops.max_abs(max_abs, g, stream); });
  over_model_ranks(max_abs, ReduceOp::Max, true);
  for_each_gradient([&](TensorView g) { ops.sum_squares(sum, g, max_abs, stream); });
  over_model_ranks(sum, ReduceOp::Sum, true);
  ops.judge(&numbers.verdict, max_abs, sum, params, stream);
}

void Update::assume(StepScalars& numbers, JudgeParams params) {
  params.clip = 0;
  device_.ops().judge(&numbers.verdict, TensorView::of(&numbers.max_abs, DType::I64, {1}),
                      TensorView::of(&numbers.sum, DType::I64, {2}), params, device_.stream());
}

double Update::grad_norm(const GradVerdict& verdict) const noexcept {
  return apart_ ? verdict.norm / std::sqrt(static_cast<double>(axes_.dp.size())) : verdict.norm;
}

// Reduces integers over all ranks that hold parts of the same parameters; stages: also over the other stages.
void Update::over_model_ranks(TensorView x, ReduceOp op, bool stages) {
  for (Communicator* axis : {&axes_.dp, &axes_.tp, &axes_.pp}) {
    if (axis == &axes_.pp && !stages) continue;
    if (axis->size() > 1 || axis == &axes_.dp) axis->all_reduce(x.data, x.numel(), DType::I64, op, kStatsText).wait();
  }
}

void Update::keep() {
  for (const auto& s : shards_) s->states().keep();
  float* to = kept_balances_.as<float>().data();
  for (const BalancedRouter& router : plan_.balances) {
    device_.copy(to, balance_of(router).data, router.bias.count * 4);
    to += router.bias.count;
  }
}

void Update::undo() {
  for (const auto& s : shards_) s->states().undo();
  const float* from = kept_balances_.as<float>().data();
  for (const BalancedRouter& router : plan_.balances) {
    device_.copy(balance_of(router).data, from, router.bias.count * 4);
    from += router.bias.count;
  }
}

// All ranks have all elements, and move them alike.
TensorView Update::balance_of(const BalancedRouter& router) const {
  const zero::TierLease lease = shards_.back()->params().lease(router.bias, zero::LeaseTo::Write);
  return TensorView::of(lease.data(), DType::F32, {router.bias.count});
}

void Update::move_balances(const Step& step, const GradVerdict* verdict) {
  for (const BalancedRouter& router : plan_.balances) {
    const TensorView counts = TensorView::of(step.expert_tokens + router.counts, DType::F32, {router.bias.count});
    device_.ops().balance_experts(balance_of(router), counts, plan_.router_bias_rate, verdict, device_.stream());
  }
}

void Update::update_params(const Step& step, zero::VerdictHandle& verdict) {
  DS_ASSERT(apart_ == keeps_gradients_apart(step.number));
  const bool host_knows =
      apart_ || std::ranges::any_of(plan_.groups.groups, [](const auto& g) { return g.numbers_per_param() > 0; });
  const bool send = !host_knows || verdict.resolve().finite;
  if (apart_ && send) make_momentum_whole();
  momentum_is_whole_ = apart_ && (send || momentum_is_whole_);
  for (const Trained& t : trained_) {
    if (!send) break;
    t.states->set_verdict(verdict);
    if (t.average) t.average->set_verdict(verdict);
    t.optimizer->update({.ops = device_.ops(),
                         .stream = device_.stream(),
                         .lr = step.lr * plan_.groups.groups[t.group].lr_ratio,
                         .step = step.number,
                         .seed = step.seed,
                         .stochastic_masters = plan_.stochastic_masters,
                         .betas = step.betas,
                         .reduce = [&](TensorView x, ReduceOp op) { over_model_ranks(x, op, false); },
                         .zero = [&](TensorView x) { device_.zero(x.data, x.bytes()); },
                         .download = [&](void* to, const void* from, i64 bytes) { device_.download(to, from, bytes); },
                         .upload = [&](void* to, const void* from, i64 bytes) { device_.upload(to, from, bytes); },
                         .states = *t.states,
                         .matrices = t.matrices.get(),
                         .average = t.average.get()});
  }
  for (const auto& s : shards_) s->states().settle(verdict, step.number);
  move_balances(step, verdict.on_device());
}

// After ranks have updated only their own slices: gathers the slices of all ranks.
void Update::make_momentum_whole() {
  if (momentum_is_whole_) return;
  for (const auto& shards : shards_) {
    const zero::ShardsPlan& plan = shards->plan();
    if (!plan.layout.states().shard_optimizer || plan.layout.segments().empty()) continue;
    const TensorView all = shards->states().whole(State::ExpAvg);
    std::vector<AllGatherSegment> segments;
    i64 at = 0;
    for (const zero::Segment& s : plan.layout.segments()) {
      if (!s.trained) continue;
      segments.push_back({all.as<float>() + at, s.slice * 4});
      at += s.slice * plan.layout.num_ranks();
    }
    if (!segments.empty()) shards->comm().all_gather(segments, message_text(plan.axis, Collective::AllGather)).wait();
  }
}

void Update::states_were_set() {
  momentum_is_whole_ = false;
  for (zero::SavedState* const state : saved_) state->forget();
}

bool Update::outer_step(i64 step) {
  bool any = false;
  const auto land = [&] {
    for (i64 f = 0; f < plan_.diloco.fragments; ++f) {
      if (lands(plan_.diloco, f, step)) any |= outer_->land(f);
    }
  };
  if (!outer_) return any;
  if (plan_.diloco.overlap_steps > 0) land();  // before another one is sent
  for (i64 f = 0; f < plan_.diloco.fragments; ++f) {
    if (meets(plan_.diloco, f, step)) outer_->send(f);
  }
  if (plan_.diloco.overlap_steps == 0) land();
  return any;
}

bool Update::has_rank_local(i64 number) const noexcept {
  return std::ranges::any_of(saved_, [&](const zero::SavedState* state) { return state->has_arrays(number); });
}

std::vector<zero::SavedArray> Update::rank_local(i64 number) {
  // The elements that this rank holds, and the groups that they are of.
  std::vector<i64> here;
  for (const auto& s : shards_) {
    for (const zero::Piece& p : s->plan().layout.held_pieces(s->plan().rank)) {
      const i64 group = narrow<i64>(plan_.groups.of_params[static_cast<size_t>(p.param)]);
      here.insert(here.end(), {p.param, p.begin, p.count, group});
    }
  }
  const std::string elements =
      fmt::format("{:08x}", static_cast<u32>(XXH3_64bits(here.data(), here.size() * sizeof(i64))));
  std::vector<zero::SavedArray> arrays;
  for (zero::SavedState* const state : saved_) state->read(number, elements, arrays);
  return arrays;
}

void Update::rank_local_was_set(i64 number) {
  for (zero::SavedState* const state : saved_) state->was_set(number);
}

// Like judge(), for several norms at once, because small messages cost by their number.
std::array<double, Update::kNorms> Update::norms_of(
    FunctionRef<void(FunctionRef<void(i64 norm, const TensorView&)>)> for_each) {
  i64* const numbers = norm_numbers_.as<i64>().data();
  const auto largest = [&](i64 norm) { return TensorView::of(numbers + norm, DType::I64, {1}); };
  const auto sum = [&](i64 norm) { return TensorView::of(numbers + kNorms + 2 * norm, DType::I64, {2}); };
  const OpTable& ops = device_.ops();
  device_.zero(numbers, norm_numbers_.bytes());
  for_each([&](i64 norm, const TensorView& x) { ops.max_abs(largest(norm), x, device_.stream()); });
  over_model_ranks(TensorView::of(numbers, DType::I64, {kNorms}), ReduceOp::Max, true);
  for_each([&](i64 norm, const TensorView& x) { ops.sum_squares(sum(norm), x, largest(norm), device_.stream()); });
  over_model_ranks(TensorView::of(numbers + kNorms, DType::I64, {2 * kNorms}), ReduceOp::Sum, true);

  i64 host[3 * kNorms] = {};
  device_.download(host, numbers, sizeof host);
  std::array<double, kNorms> norms;
  for (i64 k = 0; k < kNorms; ++k) {
    const u32 bits = static_cast<u32>(host[k]);
    const ExactSum squares{host[kNorms + 2 * k], host[kNorms + 2 * k + 1]};
    norms[k] = bits >= 0x7F800000u ? std::numeric_limits<double>::quiet_NaN()
                                   : std::sqrt(squares.value(ExactSum::exponent_of(bits)));
  }
  return norms;
}

Update::NamedNorms Update::compression_norms(i64 number) {
  NamedNorms named;
  std::array<double, kNorms> divisors{};
  i64 n = 0;
  for (zero::SavedState* const state : saved_) {
    for (const zero::SavedState::Norm& norm : state->norms(number)) {
      DS_ASSERT(n < kNorms);
      named[n].name = norm.name;
      divisors[n++] = norm.divisor;
    }
  }
  if (n == 0) return {};
  const std::array<double, kNorms> norms = norms_of([&](FunctionRef<void(i64, const TensorView&)> visit) {
    i64 first = 0;
    for (zero::SavedState* const state : saved_) {
      const i64 num = std::ssize(state->norms(number));
      if (num == 0) continue;
      state->for_each_norm([&](size_t norm, const TensorView& x) { visit(first + narrow<i64>(norm), x); });
      first += num;
    }
  });
  for (i64 k = 0; k < n; ++k) named[k].norm = norms[k] / divisors[k];
  return named;
}

// The sums over workers lie where gradients were; each element counts on its owner, as in the verdict.
double Update::outer_gradient_norm(i64 step) {
  const std::array<double, kNorms> norms = norms_of([&](FunctionRef<void(i64, const TensorView&)> visit) {
    for (const zero::Piece& p : plan_.outer_judged) {
      if (!lands(plan_.diloco, plan_.fragment_of(p), step)) continue;
      zero::for_each_part(p, combine_.most_leased(p), [&](const zero::Piece& part) {
        const zero::TierLease lease = combine_.gradient(part, zero::LeaseTo::Read);
        visit(0, TensorView::of(lease.data(), DType::F32, {part.count}));
      });
    }
  });
  return norms[0] / axes_.outer.size();
}

}  // namespace ds::update
