// SPDX-License-Identifier: Apache-2.0
// A model with two reduction groups. A matrix of each block differs on every expert, and each rank of dp computes with
// one expert; so its gradient is reduced over the ranks with the same expert, which also cut it by ZeRO. Beside it the
// same model with one group: every rank has all experts, and the gradients of those that it does not use are zero. Both
// train with the same bits, whether the ranks with one expert are side by side or apart, save the same, and resume from
// each other's checkpoints.

#include "equivalence/checkpoints.h"
#include "equivalence/optimizers.h"
#include "model/models.h"

namespace ds::testing {
namespace groups_test {

constexpr i64 kSteps = 4;
constexpr int kExperts = 2;
constexpr std::string_view kExpertMatrix = ".mlp.c_fc.weight";

struct Arrangement {
  DpSplit split;           // the ranks that have an expert in common
  bool one_group = false;  // every rank has all experts
  i64 divisor = 0;         // of the experts' gradients
};

// A block of which a rank uses one expert.
class ExpertBlock final : public model::Layer {
 public:
  ExpertBlock(std::unique_ptr<model::Layer> block, int expert, const Arrangement& a)
      : Layer(block->name()), block_(std::move(block)), expert_(expert), one_group_(a.one_group) {
    rows_ = block_->rows();
    for (size_t r = 0; r < rows_.size(); ++r) {
      model::ParamRow& row = rows_[r];
      if (!row.name.ends_with(kExpertMatrix)) continue;
      which_ = r;
      own_rows_ = row.shape[0];
      row.divisor = a.divisor;
      std::vector<i64> whole = {kExperts * row.shape[0], row.shape[1]};
      if (one_group_) {
        row.shape = whole;
        continue;
      }
      row.group = 1;
      row.whole = whole;
      row.slice = {0, {{expert * own_rows_, (expert + 1) * own_rows_}}};
    }
    DS_ASSERT(own_rows_ > 0);
  }
  std::string_view type() const noexcept override { return "ExpertBlock"; }
  bool is_block() const noexcept override { return true; }
  model::LayerActs plan(model::ActivationPlanner& p, DType work, i64 B, i64 T, model::Mode mode) const override {
    return block_->plan(p, work, B, T, mode);
  }
  void forward(const model::PassContext& ctx, model::RowViews params, TensorView x,
               const model::LayerActs& acts) const override {
    const std::vector<TensorView> own = own_of(params.own);
    block_->forward(ctx, {own, params.shared}, x, acts);
  }
  void backward_input(const model::PassContext& ctx, model::RowViews params, TensorView x, TensorView dy,
                      const model::LayerActs& acts) const override {
    const std::vector<TensorView> own = own_of(params.own);
    block_->backward_input(ctx, {own, params.shared}, x, dy, acts);
  }
  void backward_weight(const model::PassContext& ctx, model::RowViews grads, TensorView x, TensorView dy,
                       const model::LayerActs& acts) const override {
    const std::vector<TensorView> own = own_of(grads.own);
    if (one_group_ && grads.own[which_].data != nullptr)
      std::memset(grads.own[which_].data, 0, static_cast<size_t>(grads.own[which_].bytes()));
    block_->backward_weight(ctx, {own, grads.shared}, x, dy, acts);
  }
  void recompute(const model::PassContext& ctx, model::RowViews params, TensorView x, const model::LayerActs& acts,
                 model::Keep keep) const override {
    const std::vector<TensorView> own = own_of(params.own);
    block_->recompute(ctx, {own, params.shared}, x, acts, keep);
  }

 private:
  std::vector<TensorView> own_of(std::span<const TensorView> views) const {
    std::vector<TensorView> own(views.begin(), views.end());
    if (one_group_) own[which_] = own[which_].rows(expert_ * own_rows_, own_rows_);
    return own;
  }

  std::unique_ptr<model::Layer> block_;
  int expert_;
  bool one_group_;
  size_t which_ = 0;
  i64 own_rows_ = 0;
};

Hooks with_experts(const Arrangement& a, Hooks hooks = {}) {
  hooks.same_logits = false;
  if (!a.one_group) hooks.splits = {a.split};
  hooks.parts.model = [a](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord.tp, coord.sp));
    const int expert = a.split.along == DpSplit::Along::Outer ? coord.dp % a.split.inner : coord.dp / a.split.inner;
    for (auto& layer : model.layers) {
      if (layer->is_block()) layer = std::make_unique<ExpertBlock>(std::move(layer), expert, a);
    }
    if (!a.one_group) model.splits = {a.split};
    return model;
  };
  return hooks;
}

Config config(const Layout& l, bool bf16) {
  Config c = config_of(tiny_gpt2(), l);
  c.bf16.enabled = bf16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  return c;
}

// Ranks with one expert: apart, or side by side.
const DpSplit kApart{"edp", kExperts, DpSplit::Along::Outer};
DpSplit side_by_side(int dp) { return {"edp", dp / kExperts, DpSplit::Along::Inner}; }

TEST(Groups, SplitsJoinTheRanksAlongOneFactor) {
  const MeshShape shape{.dp = 6, .sp = 2};
  const DpSplit inner{"x", 3, DpSplit::Along::Inner}, outer{"y", 3, DpSplit::Along::Outer};
  const MeshCoord at{.dp = 4, .sp = 1};
  EXPECT_EQ(split_ranks(shape, inner, at), (std::vector<int>{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(split_ranks(shape, outer, at), (std::vector<int>{2, 3, 8, 9}));
  for (int rank = 0; rank < shape.world(); ++rank) {
    for (const DpSplit& split : {inner, outer}) {
      const MeshCoord c = coord_of(shape, rank);
      const std::vector<int> ranks = split_ranks(shape, split, c);
      EXPECT_EQ(std::ssize(ranks), split_size(shape, split));
      EXPECT_EQ(ranks[split_rank(shape, split, c)], rank);
    }
  }
}

TEST(Groups, TrainWithTheBitsOfOne) {
  for (const bool bf16 : {false, true}) {
    for (const i64 divisor : {0, 2, 3}) {  // as all; of the group's size; of none
      for (const bool apart : {true, false}) {
        const DpSplit split = apart ? kApart : side_by_side(4);
        const Layout four{.dp = 4, .stage = 1};
        const Trace one = train_threads(config(four, bf16), 4, kSteps, 1, with_experts({split, true, divisor}));
        ASSERT_LT(one.losses.back(), one.losses.front());
        EXPECT_GT(*std::ranges::max_element(one.norms), 0.5);  // clipping is at work
        for (const Layout& l : {Layout{.dp = 4, .stage = 0},
                                {.dp = 4, .stage = 1},
                                {.dp = 4, .stage = 2},
                                {.dp = 4, .stage = 3},
                                {.dp = 4, .pp = 2, .stage = 1},
                                {.dp = 4, .pp = 2, .stage = 3}}) {
          const std::string what =
              fmt::format("{} {} divisor {}{}", l.name(), bf16 ? "bf16" : "fp32", divisor, apart ? " apart" : "");
          const Trace two = train_threads(config(l, bf16), l.ranks(), kSteps, 1, with_experts({split, false, divisor}));
          expect_same_training(two, one, what);
          expect_planned(two, kSteps, what);
        }
      }
    }
  }
}

// Updates of several groups run beside a step, one after the other.
TEST(Groups, DelayTheirUpdates) {
  const TempDirectory dir;
  for (const Layout& l : {Layout{.dp = 4, .stage = 1}, {.dp = 4, .stage = 3}}) {
    Config c = config(l, true);
    const Arrangement a{kApart, false};
    Hooks finish = with_experts(a);
    finish.after_step = [](engine::Engine& engine, i64) { engine.finish_updates(); };
    const Trace want = train_threads(c, l.ranks(), kSteps, 1, with_experts(a));
    c.zero.sub_group_size = 4 * kStateBlock;
    c.zero.offload_optimizer = {
        .device = OffloadDevice::Nvme, .nvme_path = dir.path(), .delayed_update = true, .delayed_update_start = 1};
    expect_same_training(train_threads(c, l.ranks(), kSteps, 1, finish), want, l.name());
    Config memory = c;
    memory.zero.offload_optimizer.device = OffloadDevice::Cpu;
    expect_same_training(train_threads(c, l.ranks(), kSteps, 1, with_experts(a)),
                         train_threads(memory, l.ranks(), kSteps, 1, with_experts(a)), l.name() + " late");
  }
}

// Norms over whole parameters are those of all experts.
TEST(Groups, TrainWithEveryOptimizer) {
  for (const OptimizerCase& optimizer : kOptimizers) {
    if (optimizer.rounds_states) continue;  // blocks and random numbers are those of a group's own elements
    const auto train = [&](const Layout& l, const Arrangement& a) {
      Config c = config(l, true);
      optimizer.choose(c.optimizer);
      return train_threads(c, l.ranks(), kSteps, 1, with_experts(a));
    };
    const Layout l{.dp = 4, .stage = 3};
    if (any_optimizer(optimizer, &OptimizerRow::needs_matrices)) {
      try {
        train(l, {kApart, false});
        FAIL();
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), Errc::Config);
        EXPECT_STREQ(e.what(),
                     "optimizer: Muon needs transformer.h.0.mlp.c_fc.weight whole, and it is reduced over edp: Muon "
                     "works over dp alone");
      }
      continue;
    }
    expect_same_training(train(l, {kApart, false}), train({.dp = 4}, {kApart, true}), optimizer.name);
  }
}

// Each expert on a rank of its own.
TEST(Groups, MayHaveOneRank) {
  const Layout two{.dp = 2, .stage = 1};
  const Trace one = train_threads(config(two, false), 2, kSteps, 1, with_experts({kApart, true}));
  for (const i64 stage : {0, 1, 3}) {
    const Layout l{.dp = 2, .stage = stage};
    expect_same_training(train_threads(config(l, false), 2, kSteps, 1, with_experts({kApart, false})), one, l.name());
  }
}

TEST(Groups, OfOtherDivisorsTrainOtherwise) {
  const Layout l{.dp = 4, .stage = 1};
  const auto norm = [&](i64 divisor) {
    return train_threads(config(l, false), 4, 1, 1, with_experts({kApart, false, divisor})).norms.front();
  };
  EXPECT_GT(norm(2), norm(0));
  EXPECT_LT(norm(8), norm(0));
}

// Runs resume whatever layout saved the checkpoint: with experts apart, which rank trains on which samples does not
// depend on dp.
TEST(Groups, ResumeAtAnotherLayoutAndMerge) {
  for (const bool bf16 : {false, true}) {
    const TempDirectory dir;
    const Arrangement experts{kApart, false}, all{kApart, true};
    const Layout first{.dp = 4, .stage = 1};
    const Saved saved = train_and_save(config(first, bf16), first, kSteps, dir / "groups", with_experts(experts));
    const Saved of_one = train_and_save(config(first, bf16), first, kSteps, dir / "one", with_experts(all));
    const auto merged = [&](const Saved& s, const std::string& name) {
      MergeOptions options;
      options.optimizer = true;
      (void)merge_checkpoint(s.step, dir / name, options);
      return bytes_of(dir / name);
    };
    EXPECT_EQ(merged(saved, "groups.safetensors"), merged(of_one, "one.safetensors"));

    const Trace want = resume(config(first, bf16), first, kSteps, of_one.step, with_experts(all));
    for (const Layout& l : {Layout{.dp = 4, .stage = 3},
                            {.dp = 2, .stage = 2},
                            {.dp = 4, .pp = 2, .stage = 1},
                            {.dp = 2, .pp = 2, .stage = 0}}) {
      expect_same_training(resume(config(l, bf16), l, kSteps, saved.step, with_experts(experts)), want, l.name());
    }
    expect_same_training(resume(config(first, bf16), first, kSteps, saved.step, with_experts(all)), want,
                         "to one group");
    expect_same_training(resume(config(first, bf16), first, kSteps, of_one.step, with_experts(experts)), want,
                         "from one group");
  }
}

}  // namespace groups_test
}  // namespace ds::testing
