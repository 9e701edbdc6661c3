// SPDX-License-Identifier: Apache-2.0
// A model whose layers differ in what they cache and in how they turn positions: two attentions of other heads, each
// with a rotation of its own, one of them with a window, and between them a layer that caches nothing. Text from caches
// is that of whole passes, and its memory is predicted.

#include <cmath>

#include "ds/linear.h"
#include "equivalence/layouts.h"
#include "infer/session_plan.h"
#include "model/models.h"

namespace ds::testing {
namespace caches_test {

using model::Linear;
using model::Split;

constexpr i64 kHidden = 48, kWindow = 20;

struct Attention {
  i64 heads = 0, kv_heads = 0, dim = 0, window = 0;
  size_t rotation = 0;
};

// x + attention(x), or, without heads, x + x W. Computes forward only.
class ToyBlock final : public model::Layer {
 public:
  ToyBlock(i64 number, const Attention& a, const model::Shard& shard)
      : Layer("toy." + std::to_string(number)), a_(a), H_(a.heads / shard.tp), G_(a.kv_heads / shard.tp) {
    const auto linear = [&](const char* name, i64 in, i64 out, Split split) {
      return Linear(rows_, {.name = name_ + name, .in = in, .out = out, .split = split, .bias = false, .std = 0.4f},
                    shard);
    };
    if (a.heads > 0) {
      q_ = linear(".q", kHidden, a.heads * a.dim, Split::Column);
      k_ = linear(".k", kHidden, a.kv_heads * a.dim, Split::Column);
      v_ = linear(".v", kHidden, a.kv_heads * a.dim, Split::Column);
    }
    o_ = linear(".o", a.heads > 0 ? a.heads * a.dim : kHidden, kHidden, a.heads > 0 ? Split::Row : Split::Whole);
    attention_.scale = 1 / std::sqrt(static_cast<float>(std::max<i64>(a.dim, 1)));
    attention_.window = a.window;
  }
  std::string_view type() const noexcept override { return "ToyBlock"; }
  bool is_block() const noexcept override { return true; }
  model::CacheShape cache() const override {
    return a_.heads > 0 ? model::attention_cache(a_.window, G_, a_.dim) : model::CacheShape{};
  }
  model::LayerActs plan(model::ActivationPlanner& p, const model::PlannedPass& pass) const override {
    model::LayerActs a;
    if (a_.heads == 0) return a;
    const DType work = pass.work;
    const i64 R = pass.rows();
    a.saved = {p.saved(work, {R, H_ * a_.dim}), p.saved(work, {R, G_ * a_.dim}), p.saved(work, {R, G_ * a_.dim}),
               p.saved(work, {R, H_ * a_.dim}), p.saved(DType::F32, {pass.B, H_, pass.T})};
    return a;
  }
  void forward(const model::PassContext& ctx, model::RowViews p, TensorView x,
               const model::LayerActs& a) const override {
    if (a_.heads == 0) return o_.forward(ctx, p, a, a.output, x, {.residual = x});
    q_.forward(ctx, p, a, a.saved[0], x);
    k_.forward(ctx, p, a, a.saved[1], x);
    v_.forward(ctx, p, a, a.saved[2], x);
    const auto heads = [&](TensorView rows, i64 n) {
      return model::heads_view(rows, ctx.B, ctx.T, n, a_.dim, n * a_.dim, 0);
    };
    const model::Heads h = {heads(a.saved[0], H_), heads(a.saved[1], G_), heads(a.saved[2], G_)};
    for (const TensorView& turned : {h.q, h.k}) model::rotate(ctx, turned, ctx.rotations[a_.rotation], {});
    model::attend(ctx, heads(a.saved[3], H_), a.saved[4], h, attention_, a);
    o_.forward(ctx, p, a, a.output, a.saved[3], {.residual = x});
  }
  void backward_input(const model::PassContext&, model::RowViews, TensorView, TensorView,
                      const model::LayerActs&) const override {}
  void backward_weight(const model::PassContext&, model::RowViews, TensorView, TensorView,
                       const model::LayerActs&) const override {}

 private:
  Attention a_;
  i64 H_, G_;
  Linear q_, k_, v_, o_;
  AttentionParams attention_;
};

ModelConfig ends() {  // embedding and head
  ModelConfig c = of_four_heads(tiny_llama());
  c.hidden = kHidden;
  c.layers = 3;
  c.max_positions = 400;
  c.initializer_range = 0.5f;  // so that attention depends on positions
  return c;
}

// by_length: one of the rotations depends on the length of the sequence.
engine::EngineParts toy(bool by_length, size_t second_rotation = 1) {
  engine::EngineParts parts;
  parts.model = [=](const Config& c, const MeshShape& mesh, const MeshCoord& coord) {
    const model::Shard shard = model::shard_of(c, mesh, coord);
    model::Model m = model::make_model(c, shard);
    const RopeScaling stretched{.type = by_length ? RopeType::Dynamic : RopeType::Linear, .factor = 2};
    m.rotations = {{.dim = 12, .theta = 1e4f, .max_positions = 400},
                   {.dim = 20, .theta = 50, .scaling = stretched, .max_positions = 100},
                   {.dim = 20, .theta = 1e4f, .max_positions = 100}};
    m.layers[1] = std::make_unique<ToyBlock>(1, Attention{4, 2, 12, 0, 0}, shard);
    m.layers[2] = std::make_unique<ToyBlock>(2, Attention{}, shard);
    m.layers[3] = std::make_unique<ToyBlock>(3, Attention{6, 6, 20, kWindow, second_rotation}, shard);
    return m;
  };
  return parts;
}

Config config(const Layout& l, DType work) {
  Config c = config_of(ends(), l, 4);
  c.data.seq_length = 400;
  c.bf16.enabled = work == DType::BF16;
  c.communication_data_type = wire_type_of(work);
  c.use = ConfigUse::Generate;
  return c;
}

const Texts kPrompts = {std::vector<i32>(150, 5), {7, 7, 2, 9, 30}, {1, 2, 3}};
constexpr i64 kTokens = 120;

Texts write(engine::Engine& engine, const Texts& given, i64 at_once, i64 tokens) {
  return texts_of(
      engine, given,
      {.max_tokens = tokens, .sampling = {.temperature = 0.9, .seed = 5}, .sizes = {.at_once = at_once, .chunk = 40}});
}

TEST(Caches, TextIsThatOfWholePasses) {
  for (const DType work : {DType::F32, DType::BF16}) {
    for (const Layout& l : {Layout{}, {.tp = 2}, {.pp = 2}}) {
      const auto body = [&](engine::Engine& engine) {
        const Texts texts = write(engine, kPrompts, 1, kTokens);
        EXPECT_EQ(write(engine, kPrompts, 3, kTokens), texts) << l.name();
        for (size_t p = 0; p < kPrompts.size(); ++p) {
          for (const size_t n : {size_t{1}, size_t{63}, size_t{90}, size_t{119}}) {
            std::vector<i32> longer = kPrompts[p];
            longer.insert(longer.end(), texts[p].begin(), texts[p].begin() + static_cast<std::ptrdiff_t>(n));
            EXPECT_EQ(write(engine, {longer}, 1, 1)[0], std::vector{texts[p][n]}) << l.name() << " " << p << " " << n;
          }
        }
      };
      with_engines(config(l, work), l.ranks(), body, *cpu_ops(), 1, toy(false));
    }
  }
}

// Rotations that depend on the length are those of the whole text, so other texts beside it change nothing.
TEST(Caches, EachTextHasItsOwnRotations) {
  const auto body = [&](engine::Engine& engine) {
    Texts alone;
    for (const auto& prompt : kPrompts) alone.push_back(write(engine, {prompt}, 1, kTokens)[0]);
    EXPECT_EQ(write(engine, kPrompts, 2, kTokens), alone);
  };
  with_engines(config({}, DType::F32), 1, body, *cpu_ops(), 1, toy(true));
}

TEST(Caches, ALayerTurnsByItsOwnRotation) {
  Texts of[2];
  for (const size_t second : {1, 2}) {
    with_engines(
        config({}, DType::F32), 1, [&](engine::Engine& engine) { of[second - 1] = write(engine, kPrompts, 1, 8); },
        *cpu_ops(), 1, toy(false, second));
  }
  EXPECT_NE(of[0], of[1]);
}

TEST(Caches, AreOfTheLayersShapesAndPredicted) {
  for (const bool by_length : {false, true}) {
    const auto body = [&](engine::Engine& engine) {
      write(engine, kPrompts, 2, kTokens);
      const infer::SessionPlan memory =
          infer::plan_session(engine.model(), engine.plan(), {.at_once = 2, .context = 270, .chunk = 40});
      ASSERT_EQ(memory.spaces.size(), 2u);
      // Two sequences of 270 positions, in blocks of 64.
      EXPECT_EQ(memory.spaces[0].layers, std::vector<i64>{1});
      EXPECT_EQ(memory.spaces[0].blocks, 2 * 5);
      // The 20 of a window and 40 of a pass meet two blocks, or three.
      EXPECT_EQ(memory.spaces[1].layers, std::vector<i64>{3});
      EXPECT_EQ(memory.spaces[1].blocks, 2 * 2);
      EXPECT_EQ(memory.cache_bytes, 2 * (10 * 64 * 2 * 12 + 4 * 64 * 6 * 20) * dtype_bytes(engine.plan().work));
      EXPECT_EQ(memory.pass.rotations.size(), 3u);
      EXPECT_EQ(memory.pass.rotations[1].cos.bytes(), (by_length ? 2 : 1) * 270 * 10 * 4);
      const plan::TagBytes said = memory.bytes();
      for (size_t t = 0; t < said.size(); ++t)
        EXPECT_EQ(engine.ledger().peak(static_cast<Tag>(t)), engine.plan().memory.by_tag[t] + said[t])
            << tag_name(static_cast<Tag>(t));
      const auto scratch = infer::session_scratch(engine.model(), engine.plan(), memory, *cpu_ops(), 1);
      ASSERT_TRUE(scratch.has_value());
      EXPECT_LE(engine.device().scratch_bytes(), *scratch);
    };
    with_engines(config({}, DType::F32), 1, body, *cpu_ops(), 1, toy(by_length));
  }
}

}  // namespace caches_test
}  // namespace ds::testing
