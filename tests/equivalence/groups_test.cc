// SPDX-License-Identifier: Apache-2.0
// A model with two reduction groups: a matrix of each block is another one on every expert, of which each rank of dp
// computes with one, so that its gradient is reduced over the ranks with the same expert, which also cut it by ZeRO.
// Beside it the same model with one group: every rank has all experts, and the gradients of those that it does not use
// are zero. Both train with the same bits, whether the ranks with one expert stand side by side or apart, save the
// same, and go on from each other's checkpoints. The experts of a block are one parameter, a batch of matrices.
//
// Further a model with layers whose ranks exchange rows over the axis of experts, with room for fewer or more rows than
// they have, and which add losses (toy_experts.h).

#include "equivalence/checkpoints.h"
#include "equivalence/tiers.h"
#include "equivalence/toy_experts.h"
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
  bool batch = true;       // of matrices; else one matrix, of which the experts are rows
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
      const i64 cols = row.shape[1], rows = a.batch ? 1 : own_rows_;  // of the first dim that an expert has
      row.whole = row.shape = {kExperts * own_rows_, cols};
      if (a.batch) row.whole = row.shape = {kExperts, own_rows_, cols};
      if (one_group_) continue;
      row.group = 1;
      row.shape[0] = rows;
      row.slice = {0, {{expert * rows, (expert + 1) * rows}}};
    }
    DS_ASSERT(own_rows_ > 0);
  }
  std::string_view type() const noexcept override { return "ExpertBlock"; }
  bool is_block() const noexcept override { return true; }
  model::LayerActs plan(model::ActivationPlanner& p, const model::PlannedPass& pass) const override {
    return block_->plan(p, pass);
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
    TensorView& experts = own[which_];
    const i64 cols = experts.dim(experts.rank - 1);
    experts = experts.reshaped({experts.numel() / cols, cols}).rows(one_group_ ? expert_ * own_rows_ : 0, own_rows_);
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
    for (const bool apart : {true, false}) {
      const DpSplit split = apart ? kApart : side_by_side(4);
      const Trace one = train({.dp = 4}, {split, true});
      for (const i64 stage : {0, 1, 3}) {
        const Layout l{.dp = 4, .stage = stage};
        const Trace two = train(l, {split, false});
        expect_same_training(two, one, std::string(optimizer.name) + " " + l.name());
        expect_planned(two, kSteps, std::string(optimizer.name) + " " + l.name());
      }
    }
  }
}

// Rows of one matrix on ranks of dp are no matrix.
TEST(Groups, WithPartsOfAMatrixRefuseMuon) {
  const Layout l{.dp = 4, .stage = 1};
  const auto train = [&](const char* optimizer) {
    Config c = config(l, true);
    optimizer_named(optimizer).choose(c.optimizer);
    return train_threads(c, l.ranks(), kSteps, 1, with_experts({kApart, false, 0, false}));
  };
  EXPECT_LT(train("AdamW").losses.back(), train("AdamW").losses.front());
  try {
    train("Muon");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Errc::Config);
    EXPECT_STREQ(e.what(),
                 "optimizer: Muon needs the matrices of transformer.h.0.mlp.c_fc.weight whole, and ranks of dp have "
                 "parts of them: the parameter must have a dim for what they divide");
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

// Whatever the layout that saved them: which rank trains on which samples does not depend on dp where experts stand
// apart.
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

// The second and the last block of four have experts.
struct Toy {
  int ep = 2;
  double capacity = 1;
  float aux_weight = 0.5f;
};
Hooks with_toys(const Toy& toy, Hooks hooks = {}) {
  const DpSplit across{"edp", toy.ep, DpSplit::Along::Outer},
      inside{std::string(axis_name(Axis::Ep)), toy.ep, DpSplit::Along::Inner};
  hooks.same_logits = false;
  if (toy.ep > 1) hooks.splits = {across, inside};
  hooks.parts.model = [toy, splits = hooks.splits](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    model::Shard shard = model::shard_of(c, mesh, coord.tp, coord.sp);
    shard.ep = toy.ep;
    shard.ep_rank = coord.dp % toy.ep;
    model::Model model = model::make_model(c.model, c.data.seq_length, shard);
    const ToyExperts experts{
        .hidden = c.model.hidden, .capacity = toy.capacity, .aux_weight = toy.aux_weight, .group = 1};
    for (const size_t l : {2, 4})
      model.layers[l] = std::make_unique<ToyExpertLayer>(model.layers[l]->name(), experts, shard);
    model.splits = splits;
    return model;
  };
  return hooks;
}

Config toy_config(const Layout& l, DType work = DType::F32) {
  ModelConfig model = tiny_gpt2();
  model.layers = 4;
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  return c;
}

TEST(ToyExperts, TrainWithTheSameBitsInEveryLayout) {
  for (const char* optimizer : {"AdamW", "Muon"}) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const double capacity : {0.5, 1.5}) {  // rows without an expert; room without a row
        const auto train = [&](const Layout& l) {
          Config c = toy_config(l, work);
          optimizer_named(optimizer).choose(c.optimizer);
          const std::string what = fmt::format("{} {} {} {}", optimizer, dtype_name(work), capacity, l.name());
          const Trace t = train_threads(c, l.ranks(), kSteps, 1, with_toys({.capacity = capacity}));
          expect_planned(t, kSteps, what);
          EXPECT_GT(t.sent.at("ep.all_to_all").bytes, 0) << what;
          EXPECT_EQ(t.sent.contains("edp.send"), l.stage > 0 && l.dp > 2 && optimizer == std::string_view("Muon"))
              << what;
          return t;
        };
        const Trace want = train({.dp = 2, .stage = 1});
        EXPECT_LT(want.losses.back(), want.losses.front());
        EXPECT_EQ(std::ssize(want.aux_losses), kSteps);
        for (const Layout& l : {Layout{.dp = 2, .stage = 0},
                                {.dp = 2, .pp = 2, .stage = 3},
                                {.dp = 4, .stage = 0},
                                {.dp = 4, .stage = 2},
                                {.dp = 4, .stage = 3},
                                {.dp = 4, .pp = 2, .stage = 1},
                                {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 1},
                                {.dp = 2, .pp = 3, .checkpoints = Granularity::Layer, .stage = 1},
                                {.dp = 4, .checkpoints = Granularity::Selective, .stage = 3}})
          expect_same_training(train(l), want, fmt::format("{} {}: {}", optimizer, capacity, l.name()));
      }
    }
  }
}

// Copies of the experts on ranks of tp.
TEST(ToyExperts, TrainBesideTensorParallelism) {
  for (const char* optimizer : {"AdamW", "Muon"}) {
    const auto train = [&](const Layout& l) {
      Config c = toy_config(l);
      c.model = of_four_heads(c.model);
      optimizer_named(optimizer).choose(c.optimizer);
      const Trace t = train_threads(c, l.ranks(), kSteps, 1, with_toys({.capacity = 1.5}));
      expect_planned(t, kSteps, l.name());
      return t;
    };
    const Trace want = train({.dp = 2, .stage = 1}), got = train({.dp = 2, .tp = 2, .stage = 1});
    expect_close(got, want, optimizer);
    EXPECT_NEAR(got.aux_losses[0], want.aux_losses[0], 1e-5 * want.aux_losses[0]) << optimizer;
  }
}

// The loss that is reported, in training and evaluation, does not contain it, but the steps do.
TEST(ToyExperts, MinimiseALossOfTheirOwnBesideTheHeads) {
  const Layout l{.dp = 2, .stage = 1};
  const auto train = [&](float weight, i64 steps) {
    return train_threads(toy_config(l), l.ranks(), steps, 1, with_toys({.aux_weight = weight}));
  };
  const Trace none = train(0, 8), some = train(2, 8), twice = train(4, 8);
  EXPECT_TRUE(none.aux_losses.empty());
  EXPECT_EQ(some.losses[0], none.losses[0]);
  EXPECT_NE(some.losses[1], none.losses[1]);
  EXPECT_GT(some.aux_losses[0], 0);
  EXPECT_EQ(twice.aux_losses[0], 2 * some.aux_losses[0]);
  // Of the same weights.
  EXPECT_LT(twice.aux_losses[7] / 2, some.aux_losses[7]);
  const Trace stays = train(0, 0), still = train(2, 0);
  EXPECT_EQ(std::bit_cast<u64>(stays.eval_loss), std::bit_cast<u64>(still.eval_loss));
}

// The ranks of sp have the terms of their tokens.
TEST(ToyExperts, AddTheirLossesOverPartsOfASequence) {
  const auto train = [](const Layout& l) {
    Config c = toy_config(l);
    c.model = of_four_heads(c.model);
    return train_threads(c, l.ranks(), kSteps, 1, with_toys({.ep = 1}));
  };
  const Trace one = train({}), two = train({.sp = 2, .stage = 1});
  expect_close(two, one, "sp 2");
  for (size_t s = 0; s < one.aux_losses.size(); ++s)
    EXPECT_NEAR(two.aux_losses[s], one.aux_losses[s], 1e-5 * one.aux_losses[s]);
}

// The directional derivative of both losses together, of the mean over two ranks and four micro-batches of each.
TEST(ToyExperts, HaveTheGradientOfBothLosses) {
  constexpr double kStep = 2e-3;
  const Layout l{.dp = 2, .stage = 1};
  const auto along = [](i64 param, i64 element) {
    return 2.0 * RngKey::uniform(RngKey{static_cast<u32>(param), 77, 0}.bits(static_cast<u64>(element))) - 1;
  };
  for (const float weight : {0.0f, 8.0f}) {
    double derivative = 0;
    std::mutex mutex;
    const auto total = [&](double distance, bool sums) {
      Hooks hooks;
      hooks.start = [&](engine::Engine& engine) {
        engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
          engine.init_values(param, begin, count, out);
          for (i64 i = 0; i < count; ++i)
            out[i] = static_cast<float>(3.0 * double{out[i]} + distance * along(param, begin + i));
        });
      };
      if (sums) {
        hooks.after_step = [&](engine::Engine& engine, i64) {
          const std::lock_guard lock(mutex);
          for (const zero::Piece& piece : engine.saved_pieces()) {
            const zero::TierLease gradient = engine.gradient(piece);
            const model::ParamRow& row = engine.row_of(piece.param);
            const model::SliceMap map(row.slice, row.whole_shape());
            for (i64 i = 0; i < piece.count; ++i)
              derivative += double{gradient.values()[i]} / 8 * along(piece.param, map.global_of(piece.begin + i));
          }
        };
      }
      const Trace t = train_threads(toy_config(l), l.ranks(), 1, 1, with_toys({.aux_weight = weight}, hooks));
      return t.losses[0] + (weight > 0 ? t.aux_losses[0] : 0);
    };
    (void)total(0, true);
    const double difference = (total(kStep, false) - total(-kStep, false)) / (2 * kStep);
    EXPECT_NEAR(derivative, difference, 2e-3 * std::abs(difference)) << weight;
  }
}

// With fp16 the gradient of both losses is scaled alike.
TEST(ToyExperts, ScaleTheirLossLikeTheHeads) {
  const Layout l{.dp = 2, .stage = 1};
  const auto norm = [&](i64 scale) {
    Config c = toy_config(l);
    c.fp16.enabled = scale > 0;
    c.fp16.loss_scale = static_cast<double>(scale);
    c.communication_data_type = wire_type_of(c.work_dtype());
    return train_threads(c, l.ranks(), 1, 1, with_toys({.aux_weight = 64})).norms[0];
  };
  const double want = norm(0);
  for (const i64 scale : {8, 128}) EXPECT_NEAR(norm(scale), want, 0.01 * want) << scale;
}

}  // namespace groups_test
}  // namespace ds::testing
