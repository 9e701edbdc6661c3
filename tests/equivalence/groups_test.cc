// SPDX-License-Identifier: Apache-2.0
// A model with two reduction groups. A matrix of each block differs on every expert, and each rank of dp computes with
// one expert; so its gradient is reduced over the ranks with the same expert, which also cut it by ZeRO. Beside it the
// same model with one group: every rank has all experts, and the gradients of those that it does not use are zero. Both
// train with the same bits, whether the ranks with one expert are side by side or apart, save the same, and resume from
// each other's checkpoints.
// The experts of a block are one parameter, a batch of matrices.
//
// A second model has layers whose ranks exchange rows over the axis of experts, with room for fewer or more rows than
// they have, and which add losses (toy_experts.h).

#include "equivalence/checkpoints.h"
#include "equivalence/one_bit.h"
#include "equivalence/tiers.h"
#include "equivalence/toy_experts.h"
#include "model/models.h"
#include "slow_set.h"

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
  bool adds_gradients() const noexcept override { return true; }
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
    if (one_group_ && grads.own[which_].data != nullptr && !ctx.adds_gradients())
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
    model::Model model = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord));
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
  test::EveryNth tried(5);
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
          if (!tried()) continue;
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

// Sums of a rank's own micro-batches are rounded where there are several data-parallel ranks, in groups of one rank
// too.
TEST(Groups, OfOneRankRoundSumsLikeLargerOnes) {
  for (const int dp : {kExperts, 2 * kExperts}) {
    const auto train = [&](bool one_group, i64 stage) {
      Config c = config({.dp = dp, .stage = stage}, true);
      c.reduce_order = ReduceOrder::Boundary;
      return train_threads(c, dp, kSteps, 1, with_experts({kApart, one_group}));
    };
    const Trace one = train(true, 1);
    for (const i64 stage : {0, 1}) {
      const Trace two = train(false, stage);
      expect_same_training(two, one, fmt::format("dp {} stage {}", dp, stage));
      expect_planned(two, kSteps, "");
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

// Each group averages by signs over its own ranks: of the same gradients a simulation of each group makes the same
// bits.
TEST(Groups, AverageBySigns) {
  using namespace one_bit_test;
  constexpr i64 kFirst = 3, kAll = 9;
  constexpr int kRanks = 4;
  Config c = one_bit(tiny_gpt2(), {.dp = kRanks}, 2);
  c.optimizer.freeze_step = kFirst;
  for (const bool apart : {true, false}) {
    const DpSplit split = apart ? kApart : side_by_side(kRanks);
    std::vector<std::vector<double>> gradients[2];  // by group and rank
    for (auto& of_ranks : gradients) of_ranks.resize(kRanks);
    std::optional<Simulation<float>> simulated[2][kRanks];
    Hooks hooks;
    hooks.before_step = [&](engine::Engine& engine, i64 step) {
      if (step != kFirst) return;
      for (size_t g = 0; g < 2; ++g) {
        const zero::Layout& layout = engine.plan().shards[g].layout;
        auto& own = simulated[g][engine.mesh().rank()];
        own.emplace(c.optimizer, decays_of(engine, g), chunks_of(layout), static_cast<size_t>(layout.num_ranks()));
        own->w = state_of<float>(engine, State::Master, g);
        own->m = state_of<float>(engine, State::ExpAvg, g);
        own->v = state_of<float>(engine, State::ExpAvgSq, g);
        own->t = step;
      }
    };
    hooks.after_step = [&](engine::Engine& engine, i64 step) {
      if (step < kFirst) return;
      const int rank = engine.mesh().rank();
      for (size_t g = 0; g < 2; ++g) gradients[g][static_cast<size_t>(rank)] = gradients_of(engine, 1, g);
      engine.mesh().world().barrier("test");
      for (size_t g = 0; g < 2; ++g) {
        std::vector<std::vector<double>> of_group = gradients[g];
        if (g == 1) {
          of_group.clear();
          for (const int r : split_ranks(engine.mesh().shape(), split, engine.mesh().coord()))
            of_group.push_back(gradients[g][static_cast<size_t>(r)]);
        }
        auto& own = simulated[g][rank];
        own->compressed(of_group);
        EXPECT_TRUE(same_bits(own->w, state_of<float>(engine, State::Master, g))) << g << " step " << step;
        EXPECT_TRUE(same_bits(own->m, state_of<float>(engine, State::ExpAvg, g))) << g << " step " << step;
      }
      engine.mesh().world().barrier("test");
    };
    const Trace t = train_threads(c, kRanks, kAll, 1, with_experts({split, false}, hooks));
    EXPECT_LT(t.losses.back(), t.losses.front());
    EXPECT_GT(t.sent.at("edp.one_bit").bytes, 0);
  }
}

// Gradients that are left on their ranks are terms of a mean over the ranks of the group, which is the sum's share.
TEST(Groups, LeaveTermsOfMeansOnTheirRanks) {
  using namespace one_bit_test;
  constexpr int kRanks = 4;
  for (const i64 divisor : {0, 2}) {
    std::vector<double> terms[kRanks], sums[kRanks];
    const auto train = [&](i64 freeze, std::vector<double>* to) {
      Config c = one_bit(tiny_gpt2(), {.dp = kRanks}, 2);
      c.optimizer.freeze_step = freeze;
      Hooks hooks;
      hooks.after_step = [&](engine::Engine& engine, i64 step) {
        if (step == 2) to[engine.mesh().rank()] = gradients_of(engine, 1, 1);
      };
      (void)train_threads(c, kRanks, 3, 1, with_experts({kApart, false, divisor}, hooks));
    };
    train(2, terms);
    train(3, sums);
    double largest = 0;
    for (size_t i = 0; i < sums[0].size(); ++i) {
      ASSERT_NEAR((terms[0][i] + terms[2][i]) / 2, sums[0][i] / kRanks, 1e-7) << i;
      largest = std::max(largest, std::abs(sums[0][i]));
    }
    EXPECT_GT(largest, 1e-3);
  }
}

Config signs_config(OptimizerType type, const Layout& l) {
  Config c = one_bit_test::one_bit(tiny_gpt2(), l, 2);
  c.optimizer.type = type;
  c.optimizer.freeze_step = c.optimizer.var_freeze_step = 2;
  c.optimizer.var_update_scaler = 1;
  c.optimizer.local_step_scaler = 2, c.optimizer.local_step_clipper = 4;
  return c;
}

TEST(Groups, AverageSlicesLikeWholeMomentum) {
  for (const OptimizerType type : {OptimizerType::OneBitAdam, OptimizerType::OneBitLamb}) {
    const auto train = [&](const Layout& l) {
      return train_threads(signs_config(type, l), l.ranks(), 8, 1, with_experts({kApart, false}));
    };
    const Trace zero = train({.dp = 4});
    EXPECT_TRUE(std::isfinite(zero.losses.back()));
    expect_same_training(train({.dp = 4, .stage = 1}), zero, std::string(optimizer_row(type).name));
  }
}

// With the errors of each rank, and between two means also its own parameters.
TEST(Groups, ResumeBetweenAveragesBySigns) {
  for (const auto& [type, stage] : {std::pair{OptimizerType::OneBitAdam, i64{0}},
                                    {OptimizerType::OneBitAdam, i64{1}},
                                    {OptimizerType::ZeroOneAdam, i64{0}}}) {
    const Layout l{.dp = 4, .stage = stage};
    const Config c = signs_config(type, l);
    const Hooks experts = with_experts({kApart, false});
    const std::string what = fmt::format("{} stage {}", optimizer_row(type).name, stage);
    const Trace want = train_threads(c, l.ranks(), 12, 1, experts);
    EXPECT_TRUE(std::isfinite(want.losses.back())) << what;
    for (const i64 steps : {5, 7, 8}) {
      const TempDirectory dir;
      std::map<std::string, std::vector<float>> arrays[4];  // by rank
      std::string saved;
      Hooks first = experts, rest = experts;
      first.at_end = [&](engine::Engine& engine) {
        const int rank = engine.mesh().rank();
        const std::string step = save_step(engine, dir.path());
        if (rank == 0) saved = step;
        for (const zero::SavedArray& array : engine.rank_local()) {
          const auto* const values = array.values.as<float>();
          EXPECT_TRUE(arrays[rank].try_emplace(array.name, values, values + array.values.numel()).second) << array.name;
        }
      };
      rest.start = [&](engine::Engine& engine) {
        load_step(engine, saved);
        for (const zero::SavedArray& array : engine.rank_local()) {
          const std::vector<float>& values = arrays[engine.mesh().rank()].at(array.name);
          std::ranges::copy(values, array.values.as<float>());
        }
        engine.rank_local_was_set();
      };
      (void)train_threads(c, l.ranks(), steps, 1, first);
      EXPECT_GT(arrays[3].size(), 2u) << what;
      const Trace got = train_threads(c, l.ranks(), 12 - steps, 1, rest);
      EXPECT_TRUE(std::equal(got.losses.rbegin(), got.losses.rend(), want.losses.rbegin())) << what << " " << steps;
      EXPECT_TRUE(same_bits(got.weights, want.weights)) << what << " " << steps;
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
    model::Shard shard = model::shard_of(c, mesh, coord);
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
          EXPECT_EQ(t.sent.contains("ep.all_to_all"), l.pp < 3) << what;  // the first of three stages has no experts
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

// Each expert is averaged by signs over the ranks that have it.
TEST(ToyExperts, TrainWithAveragesBySigns) {
  const auto train = [](const Layout& l) {
    Config c = toy_config(l);
    c.gradient_clipping = 0;
    c.optimizer.type = OptimizerType::OneBitAdam;
    c.optimizer.freeze_step = 2;
    c.optimizer.beta2 = 0.95;
    return train_threads(c, l.ranks(), 8, 1, with_toys({.capacity = 0.5}));
  };
  const Trace want = train({.dp = 4});
  EXPECT_GT(want.sent.at("edp.one_bit").bytes, 0);
  EXPECT_LT(want.losses.back(), want.losses.front());
  for (const Layout& l : {Layout{.dp = 4, .stage = 1}, {.dp = 4, .pp = 2, .stage = 1}})
    expect_same_training(train(l), want, l.name());
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
  // The larger coefficient has trained to a smaller loss, compared without the coefficient.
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

// The derivative of both losses together along their gradient, of the mean over two ranks with four micro-batches each.
TEST(ToyExperts, HaveTheGradientOfBothLosses) {
  constexpr double kStep = 4e-3;
  const Layout l{.dp = 2, .stage = 1};
  for (const float weight : {0.0f, 8.0f}) {
    std::map<i64, std::vector<double>> gradient;  // whole, by parameter
    double norm = 0;
    std::mutex mutex;
    const auto collect = [&](engine::Engine& engine, i64) {
      const std::lock_guard lock(mutex);
      for (const zero::Piece& piece : engine.saved_pieces()) {
        const zero::TierLease lease = engine.gradient(piece);
        const model::ParamRow& row = engine.row_of(piece.param);
        std::vector<double>& whole = gradient[piece.param];
        whole.resize(static_cast<size_t>(row.whole_numel()));
        const model::SliceMap map(row.slice, row.whole_shape());
        for (i64 i = 0; i < piece.count; ++i) {
          const double g = double{lease.values()[i]} / 8;
          whole[static_cast<size_t>(map.global_of(piece.begin + i))] = g;
          norm += g * g;
        }
      }
    };
    // Both losses at a distance from the first weights.
    const auto losses = [&](double distance) {
      Hooks hooks;
      hooks.start = [&](engine::Engine& engine) {
        engine.set_weights([&](i64 param, i64 begin, i64 count, float* out) {
          engine.init_values(param, begin, count, out);
          for (i64 i = 0; i < count; ++i) {
            out[i] *= 2;
            if (distance != 0)
              out[i] += static_cast<float>(distance * gradient.at(param)[static_cast<size_t>(begin + i)]);
          }
        });
      };
      if (distance == 0) hooks.after_step = collect;
      const Trace t = train_threads(toy_config(l), l.ranks(), 1, 1, with_toys({.aux_weight = weight}, hooks));
      EXPECT_EQ(t.aux_losses.empty(), weight == 0);
      return std::pair(t.losses[0], weight == 0 ? 0 : t.aux_losses[0]);
    };
    (void)losses(0);
    norm = std::sqrt(norm);
    const auto [up, aux_up] = losses(kStep / norm);
    const auto [down, aux_down] = losses(-kStep / norm);
    EXPECT_NEAR((up + aux_up - down - aux_down) / (2 * kStep), norm, 1e-3 * norm) << weight;
    EXPECT_GE(aux_up - aux_down, weight / 40 * kStep * norm);  // a good part of it
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
