// SPDX-License-Identifier: Apache-2.0
// Products that add weight gradients to the sums of a rank's micro-batches (gradient_accumulation_fusion, reduce_order
// "boundary"): sums are those of gradients in fp32, layouts change no bit, and rounding depends on dp alone.

#include <algorithm>
#include <cmath>

#include "equivalence/layouts.h"
#include "equivalence/moved_states.h"
#include "slow_set.h"

namespace ds::testing {
namespace accumulation_test {

constexpr i64 kSteps = 4;

ModelConfig untied(ModelConfig c) {
  c.tie_embeddings = false;
  return c;
}
std::vector<ModelConfig> models() {
  return {of_four_heads(tiny_gpt2()), of_four_heads(untied(tiny_llama())), of_four_heads(tiny_bert())};
}

Config in(DType work, const ModelConfig& model, const Layout& l, bool fused = true) {
  Config c = config_of(model, l);
  c.bf16.enabled = work == DType::BF16;
  c.fp16 = {.enabled = work == DType::F16, .loss_scale = 256};
  c.communication_data_type = wire_type_of(work);
  c.reduce_order = ReduceOrder::Boundary;
  c.gradient_accumulation_fusion = fused;
  return c;
}

std::string name_of(DType work, const ModelConfig& model, const Layout& l, bool fused = true) {
  return fmt::format("{} {} {}{}", family_name(model.family), dtype_name(work), l.name(), fused ? "" : " apart");
}

TEST(Fusion, LayoutsChangeNoBit) {
  test::EveryNth tried(3);
  for (const bool fused : {true, false}) {
    for (const DType work : {DType::BF16, DType::F32, DType::F16}) {
      for (const ModelConfig& model : models()) {
        for (const int dp : {1, 2}) {
          const Trace base = train_threads(in(work, model, {.dp = dp}, fused), dp, kSteps);
          ASSERT_LT(base.losses.back(), base.losses.front());
          for (Layout l : {Layout{.stage = 1},
                           {.pp = 2},
                           {.pp = 3, .stage = 1},
                           {.pp = 2, .schedule = Kind::GPipe},
                           {.pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                           {.pp = 2, .schedule = Kind::ZeroBubbleH1},
                           {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2, .stage = 1},
                           {.schedule = Kind::BreadthFirst, .chunks = 2, .stage = 1},
                           {.checkpoints = Granularity::Layer, .interval = 2},
                           {.pp = 2, .checkpoints = Granularity::Selective, .stage = 1}}) {
            if (!tried()) continue;
            l.dp = dp;
            const Trace t = train_threads(in(work, model, l, fused), l.ranks(), kSteps);
            expect_same_training(t, base, name_of(work, model, l, fused));
            expect_planned(t, kSteps, name_of(work, model, l, fused));
          }
        }
      }
    }
  }
}

TEST(Fusion, PartsOfSumsAreCloseToOneRanks) {
  for (const ModelConfig& model : models()) {
    const Trace base = train_threads(in(DType::F32, model, {}), 1, kSteps);
    for (const Layout& l : {Layout{.tp = 2},
                            {.tp = 2, .sequence = true, .stage = 1},
                            {.pp = 2, .tp = 2, .checkpoints = Granularity::Layer, .stage = 1},
                            {.sp = 2},
                            {.dp = 2, .sp = 2, .stage = 1}}) {
      const Trace t = train_threads(in(DType::F32, model, l), l.ranks(), kSteps);
      expect_close(t, base, name_of(DType::F32, model, l));
      expect_planned(t, kSteps, name_of(DType::F32, model, l));
    }
  }
}

// The sum of a rank's micro-batches in fp32 is that of gradients that travel in fp32, to the order of additions within
// a gradient; gradients in 16 bits that are rounded before are further away. With one data-parallel rank it is not
// rounded later, either, also if ranks of sp add their parts.
TEST(Fusion, SumsAreThoseOfGradientsInFp32) {
  for (const DType work : {DType::BF16, DType::F16}) {
    const double u = work == DType::BF16 ? 0x1p-8 : 0x1p-11;
    for (const ModelConfig& model : models()) {
      for (const Layout& l : {Layout{}, {.pp = 2, .stage = 1}, {.tp = 2}, {.sp = 2}, {.dp = 2}}) {
        Config wide = in(work, model, l, false);
        wide.communication_data_type = WireType::F32;
        const auto first_norm = [&](const Config& c) { return train_threads(c, l.ranks(), 1).norms.front(); };
        const double exact = first_norm(wide), added = first_norm(in(work, model, l)),
                     apart = first_norm(in(work, model, l, false));
        SCOPED_TRACE(name_of(work, model, l));
        EXPECT_NEAR(added, exact, (l.dp > 1 ? 2 * u : 1e-6) * exact);
        if (l.dp == 1) {
          EXPECT_LT(std::abs(added - exact), std::abs(apart - exact));
        }
      }
    }
  }
}

// One rank has no gradients beside its sums, and sends none. In a tier its sums are copied there.
TEST(Fusion, OneRankHasSumsAlone) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const Config c = in(work, of_four_heads(tiny_gpt2()), {});
    const Trace base = train_threads(c, 1, kSteps);
    EXPECT_EQ(base.counted[static_cast<size_t>(Tag::Grads)], 0);
    EXPECT_FALSE(base.sent.contains("dp.reduce_scatter"));
    Config one = c;
    one.zero.stage = 1;
    std::atomic<i64> states = 0, sums = 0;
    Hooks moved;
    moved.parts.tiers.states = [&](zero::StateStore::Parts parts) {
      return std::make_unique<MovedStates>(std::move(parts), 2, states);
    };
    moved.parts.tiers.grads = [&](Device& device, MemoryLedger& ledger, Tag tag, i64 bytes, i64) {
      return std::make_unique<MovedArray>(device, ledger, tag, bytes, sums);
    };
    expect_same_training(train_threads(one, 1, kSteps, 1, moved), base, "in a tier");
    EXPECT_GT(sums, 0);
  }
}

TEST(Fusion, OverflowsSkipTheirSteps) {
  for (const int dp : {1, 2}) {
    std::vector<Trace> traces;
    for (const Layout& l : {Layout{.dp = dp}, {.dp = dp, .stage = 1}, {.dp = dp, .pp = 2}}) {
      Config c = in(DType::F16, of_four_heads(tiny_gpt2()), l);
      c.fp16 = {.enabled = true, .initial_scale_power = 24};
      c.fp16.hysteresis = 1;
      traces.push_back(train_threads(c, l.ranks(), 14));
    }
    EXPECT_TRUE(traces[0].skipped.front());
    EXPECT_FALSE(traces[0].skipped.back());
    EXPECT_EQ(traces[1].skipped, traces[0].skipped);
    EXPECT_EQ(traces[2].skipped, traces[0].skipped);
    EXPECT_TRUE(same_bits(traces[1].weights, traces[0].weights));
    EXPECT_TRUE(same_bits(traces[2].weights, traces[0].weights));
  }
}

// Frozen rows have no sums: a tied matrix, a projection of its own, all blocks.
TEST(Fusion, LeavesOutWhatIsFrozen) {
  const auto frozen = [](Config c, std::vector<std::string> params) {
    ParamGroupConfig group;
    static_cast<UpdateConfig&>(group) = c.optimizer;
    group.params = std::move(params);
    group.frozen = true;
    c.optimizer.groups = {group};
    return c;
  };
  const ModelConfig gpt2 = of_four_heads(tiny_gpt2()), llama = of_four_heads(untied(tiny_llama()));
  for (const auto& [model, params] : {std::pair{gpt2, "*wte*"}, {llama, "*lm_head*"}, {llama, "*layers*"}}) {
    const Trace base = train_threads(frozen(in(DType::BF16, model, {}), {params}), 1, kSteps);
    for (const Layout& l : {Layout{.pp = 2, .stage = 1}, {.pp = 2, .schedule = Kind::ZeroBubbleH1}}) {
      const Trace t = train_threads(frozen(in(DType::BF16, model, l), {params}), l.ranks(), kSteps);
      expect_same_training(t, base, fmt::format("{} {}", params, l.name()));
      expect_planned(t, kSteps, params);
    }
  }
}

// A model with a layer that overwrites its gradients trains with sums beside them.
class Overwrites final : public model::Layer {
 public:
  explicit Overwrites(std::unique_ptr<model::Layer> block) : Layer(block->name()), block_(std::move(block)) {
    rows_ = block_->rows();
  }
  std::string_view type() const noexcept override { return "Overwrites"; }
  bool is_block() const noexcept override { return true; }
  model::LayerActs plan(model::ActivationPlanner& p, const model::PlannedPass& pass) const override {
    return block_->plan(p, pass);
  }
  void forward(const model::PassContext& ctx, model::RowViews params, TensorView x,
               const model::LayerActs& a) const override {
    block_->forward(ctx, params, x, a);
  }
  void backward_input(const model::PassContext& ctx, model::RowViews params, TensorView x, TensorView dy,
                      const model::LayerActs& a) const override {
    block_->backward_input(ctx, params, x, dy, a);
  }
  void backward_weight(const model::PassContext& ctx, model::RowViews grads, TensorView x, TensorView dy,
                       const model::LayerActs& a) const override {
    EXPECT_EQ(ctx.term, model::GradTerm::Alone);
    block_->backward_weight(ctx, grads, x, dy, a);
  }

 private:
  std::unique_ptr<model::Layer> block_;
};

TEST(Fusion, IsForModelsAllOfWhoseLayersAdd) {
  const ModelConfig model = of_four_heads(tiny_gpt2());
  Hooks overwrites;
  overwrites.parts.model = [](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    model::Model m = model::make_model(c.model, c.data.seq_length, model::shard_of(c, mesh, coord));
    m.layers[1] = std::make_unique<Overwrites>(std::move(m.layers[1]));
    return m;
  };
  for (const int dp : {1, 2}) {
    const Layout l{.dp = dp, .stage = 1};
    const Trace t = train_threads(in(DType::BF16, model, l), dp, kSteps, 1, overwrites);
    expect_same_training(t, train_threads(in(DType::BF16, model, l, false), dp, kSteps), l.name());
    expect_planned(t, kSteps, l.name());
  }
}

}  // namespace accumulation_test
}  // namespace ds::testing
