// SPDX-License-Identifier: Apache-2.0
// The tokens over which the loss that balances experts is formed: sequences, all layers, whatever stages they are on,
// and the global batch. Layouts that divide neither matrices nor sums have the same bits, the others agree to rounding.

#include "equivalence/checkpoints.h"
#include "equivalence/tiny_experts.h"

namespace ds::testing {
namespace experts_test {

ModelConfig balanced_over(BalanceOver over) { return tiny_experts({.one_dense = true, .balance = 0.3f, .over = over}); }

// Rows that travel depend on values, and steps that begin again send more than the plan says.
Trace train_as_planned(const Config& c, const Layout& l, const std::string& what, const Hooks& hooks = {}) {
  const Trace t = train(c, l, hooks);
  for (size_t tag = 0; tag < t.counted.size(); ++tag)
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << what << ": " << tag_name(static_cast<Tag>(tag));
  if (c.expert_parallel.size == 1 && !c.pipeline.post_validate && !hooks.length && !hooks.after_step)
    expect_planned_traffic(t.sent, t.planned, kSteps, what);
  return t;
}
Trace train_over(BalanceOver over, const Layout& l, const Experts& x = {}, DType work = DType::F32) {
  return train_as_planned(experts_config(balanced_over(over), l, x, work), l, fmt::format("{} ep {}", l.name(), x.ep));
}

void expect_close_losses(const Trace& got, const Trace& want, const std::string& what) {
  expect_close(got, want, what);
  for (size_t i = 0; i < want.aux_losses.size(); ++i)
    EXPECT_NEAR(got.aux_losses[i], want.aux_losses[i], 1e-3 * want.aux_losses[i]) << what << " step " << i;
}

// An evaluation after each step but the last, of samples that all ranks share.
Hooks evaluating(const Config& c) {
  return {.after_step = [B = c.batch.micro, T = c.data.seq_length, vocab = c.model.vocab_size](engine::Engine& engine,
                                                                                               i64 step) {
    if (step + 1 == kSteps) return;
    const std::optional<double> loss =
        engine.evaluate(2, [&](i64 batch, std::span<i32> ids, std::span<i32> targets, std::span<i32>) {
          for (i64 b = 0; b < B; ++b) {
            const size_t at = static_cast<size_t>(b * T), n = static_cast<size_t>(T);
            fill_sample(900 + B * batch + b, vocab, ids.subspan(at, n), targets.subspan(at, n));
          }
          return true;
        });
    EXPECT_TRUE(loss.has_value() && std::isfinite(*loss));
  }};
}

// That over sequences is the one of micro-batches of one sequence.
TEST(Balance, LossesOverSequences) {
  const Trace want = train_over(BalanceOver::Sequence, {});
  for (const Layout& l :
       {Layout{.dp = 4, .stage = 3}, {.dp = 2, .checkpoints = Granularity::Layer, .stage = 2}, {.pp = 2}})
    expect_same_training(train_over(BalanceOver::Sequence, l), want, l.name());
  expect_same_training(train_over(BalanceOver::Sequence, {.dp = 2, .stage = 1}, {.ep = 2}), want, "ep");
  for (const Layout& l : {Layout{.tp = 2}, {.sp = 2}})
    expect_close_losses(train_over(BalanceOver::Sequence, l), want, l.name());

  const Layout l;
  const auto of = [&](BalanceOver over, i64 micro) {
    Config c = experts_config(tiny_experts({.balance = 0.3f, .z = 0, .over = over}), l);
    c.batch = {.train = 4, .micro = micro, .accumulation = 4 / micro};
    c.loss.norm = LossNorm::Token;  // the head's loss does not depend on micro-batches
    return train(c, l);
  };
  const Trace one = of(BalanceOver::MicroBatch, 1), together = of(BalanceOver::Sequence, 4);
  expect_close(together, one, "sequences", {});
  for (size_t i = 0; i < one.aux_losses.size(); ++i)
    EXPECT_NEAR(together.aux_losses[i], one.aux_losses[i], 1e-5 * one.aux_losses[i]);
  EXPECT_GT(std::abs(of(BalanceOver::MicroBatch, 4).aux_losses[0] - one.aux_losses[0]), 1e-4 * one.aux_losses[0]);
}

// ---- over layers

// Statistics travel from stage to stage with the stream, and what the last layer has made of them back with gradients.
TEST(Balance, LossOverLayersOfAllStages) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const Trace want = train_over(BalanceOver::Layers, {}, {}, work);
    const auto check = [&](const Layout& l, const Experts& x = {}) {
      expect_same_training(train_over(BalanceOver::Layers, l, x, work), want,
                           fmt::format("{} {} ep {}", dtype_name(work), l.name(), x.ep));
    };
    for (const Layout& l : {Layout{.dp = 4, .stage = 3},
                            {.schedule = Kind::BreadthFirst, .chunks = 3},
                            {.checkpoints = Granularity::Layer, .interval = 2},
                            {.pp = 2},
                            {.pp = 2, .schedule = Kind::Naive},
                            {.pp = 3, .schedule = Kind::GPipe},
                            {.pp = 2, .schedule = Kind::Interleaved, .chunks = 3},
                            {.pp = 3, .schedule = Kind::ZeroBubbleH1},
                            {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.pp = 3, .schedule = Kind::ZeroBubbleV, .chunks = 2, .memory_limit = 0.7},
                            {.pp = 6},
                            {.dp = 2, .pp = 3, .stage = 2},
                            {.dp = 2, .pp = 2, .checkpoints = Granularity::Layer, .stage = 3},
                            {.pp = 2, .checkpoints = Granularity::Layer, .interval = 2},
                            {.pp = 2, .schedule = Kind::ZeroBubbleH1, .checkpoints = Granularity::Selective}})
      check(l);
    check({.dp = 2, .stage = 1}, {.ep = 2});
    check({.dp = 2, .pp = 2, .stage = 3}, {.ep = 2});
    check({.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleH1, .stage = 1}, {.ep = 2});
  }
  const Trace want = train_over(BalanceOver::Layers, {});
  for (const Layout& l : {Layout{.tp = 2},
                          {.sp = 2},
                          {.pp = 2, .tp = 2},
                          {.pp = 2, .tp = 2, .sequence = true},
                          {.pp = 2, .sp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}})
    expect_close_losses(train_over(BalanceOver::Layers, l), want, l.name());
}

// The bytes of the stream are no multiple of the alignment of what follows it, sequences grow, and evaluations, whose
// messages are the stream alone, come between steps.
TEST(Balance, LossOverLayersWithMessagesOfAnySize) {
  const auto run = [&](const Layout& l, const std::function<Hooks(const Config&)>& hooks) {
    Config c = experts_config(balanced_over(BalanceOver::Layers), l, {}, DType::BF16);
    c.data.seq_length = 13;
    c.batch = {.train = 4, .micro = 1, .accumulation = 4};
    return train_as_planned(c, l, l.name(), hooks(c));
  };
  const auto growing = [](const Config&) { return Hooks{.length = [](i64 step) { return step < 2 ? 5 : 13; }}; };
  for (const std::function<Hooks(const Config&)>& hooks :
       {std::function<Hooks(const Config&)>(growing), {evaluating}}) {
    const Trace want = run({}, hooks);
    for (const Layout& l : {Layout{.pp = 3}, {.pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}})
      expect_same_training(run(l, hooks), want, l.name());
  }
}

// Layers before the lowest trained one have losses, and no backward pass.
TEST(Balance, LossOverLayersSomeOfWhichAreFrozen) {
  const auto run = [&](const Layout& l) {
    Config c = experts_config(balanced_over(BalanceOver::Layers), l);
    ParamGroupConfig frozen;
    frozen.params = {"model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"};
    frozen.frozen = true;
    c.optimizer.groups = {frozen};
    return train_as_planned(c, l, l.name());
  };
  const Trace want = run({});
  for (const Layout& l : {Layout{.pp = 2}, {.pp = 6}, {.pp = 3, .schedule = Kind::ZeroBubbleH1}})
    expect_same_training(run(l), want, l.name());
}

// ---- over the global batch

// All with as many micro-batches in a row.
TEST(Balance, LossOverTheGlobalBatch) {
  for (const DType work : {DType::F32, DType::BF16}) {
    const Trace want = train_over(BalanceOver::GlobalBatch, {.dp = 2}, {}, work);
    EXPECT_EQ(std::ssize(want.aux_losses), kSteps);
    EXPECT_EQ(want.planned.at("dp.all_reduce").calls, 4 * 3);
    const auto check = [&](const Layout& l, const Experts& x = {}) {
      expect_same_training(train_over(BalanceOver::GlobalBatch, l, x, work), want,
                           fmt::format("{} {} ep {}", dtype_name(work), l.name(), x.ep));
    };
    for (const Layout& l : {Layout{.dp = 2, .stage = 1},
                            {.dp = 2, .stage = 2},
                            {.dp = 2, .stage = 3},
                            {.dp = 2, .schedule = Kind::BreadthFirst, .chunks = 3},
                            {.dp = 2, .pp = 2},
                            {.dp = 2, .pp = 3, .schedule = Kind::ZeroBubbleH1, .stage = 2},
                            {.dp = 2, .pp = 2, .schedule = Kind::Interleaved, .chunks = 2},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2},
                            {.dp = 2, .checkpoints = Granularity::Layer, .interval = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .checkpoints = Granularity::Layer, .stage = 1},
                            {.dp = 2, .checkpoints = Granularity::Selective, .stage = 2}})
      check(l);
    for (const i64 stage : {0, 3}) check({.dp = 2, .stage = stage}, {.ep = 2});
    check({.dp = 2, .pp = 2, .stage = 1}, {.ep = 2});
  }
  const Trace want = train_over(BalanceOver::GlobalBatch, {.dp = 2});
  for (const Layout& l : {Layout{.dp = 2, .tp = 2, .stage = 1},
                          {.dp = 2, .tp = 2, .sequence = true},
                          {.dp = 2, .sp = 2, .stage = 3},
                          {.dp = 2, .sp = 2, .mode = SequenceParallelMode::Ring}})
    expect_close_losses(train_over(BalanceOver::GlobalBatch, l), want, l.name());
  expect_close_losses(train_over(BalanceOver::GlobalBatch, {.dp = 2, .sp = 2, .stage = 2}, {.ep = 2}), want, "ep, sp");
  const Trace alone = train_over(BalanceOver::GlobalBatch, {}), parts = train_over(BalanceOver::GlobalBatch, {.sp = 2});
  expect_close_losses(parts, alone, "sp alone");
  EXPECT_NE(alone.aux_losses, want.aux_losses) << "eight in a row";
}

// One micro-batch that is the global batch has the loss of micro-batches; a global batch of two ranks has nearly that
// of one rank with all of it, from which losses over their micro-batches differ more.
TEST(Balance, TheGlobalBatchIsThatOfAllRanks) {
  const auto first = [&](BalanceOver over, int dp) {
    const Layout l{.dp = dp};
    Config c = experts_config(tiny_experts({.balance = 0.3f, .z = 0, .over = over}), l);
    c.batch = {.train = 8, .micro = 8 / dp, .accumulation = 1};
    c.loss.norm = LossNorm::Token;
    return train(c, l, {}, 1);
  };
  const Trace all = first(BalanceOver::MicroBatch, 1);
  expect_same_training(first(BalanceOver::GlobalBatch, 1), all, "one micro-batch");
  for (const int dp : {2, 4}) {
    const double want = all.aux_losses[0], micro = std::abs(first(BalanceOver::MicroBatch, dp).aux_losses[0] - want),
                 global = std::abs(first(BalanceOver::GlobalBatch, dp).aux_losses[0] - want);
    EXPECT_GT(micro, 1e-3 * want) << dp;
    EXPECT_LT(global, micro / 20) << dp;
  }
}

// A step begins with no counts: one that begins again, since its update was undone, that follows an evaluation or a
// step that was skipped, or with which a run resumes.
TEST(Balance, CountsOfTheGlobalBatchAreThoseOfTheStep) {
  const Layout l{.dp = 2, .pp = 2, .stage = 1};
  const auto config = [&] { return experts_config(balanced_over(BalanceOver::GlobalBatch), l, {.ep = 2}); };
  for (const bool fp16 : {false, true}) {
    const auto run = [&](bool post_validate) {
      Config c = config();
      c.pipeline.post_validate = post_validate;
      c.gradient_clipping = 1.05;
      if (fp16) {
        c.fp16 = {.enabled = true, .loss_scale = 0, .initial_scale_power = 19, .loss_scale_window = 2};
        c.communication_data_type = wire_type_of(DType::F16);
      }
      return train(c, l, {}, 8);
    };
    const Trace want = run(false);
    EXPECT_EQ(std::ranges::count(want.skipped, true) > 0, fp16);
    expect_same_training(run(true), want, fp16 ? "fp16" : "fp32");
  }
  const Config c = config();
  const Trace want = train(c, l);
  expect_same_training(train(c, l, evaluating(c)), want, "evaluations");

  const TempDirectory dir;
  const Hooks hooks{.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {})),
                    .same_logits = false};
  const Saved saved = train_and_save(c, l, 2, dir.path(), hooks);
  const Trace resumed = resume(c, l, kSteps - 2, saved.step, hooks);
  EXPECT_TRUE(same_bits(resumed.weights, want.weights));
  EXPECT_EQ(resumed.aux_losses.back(), want.aux_losses.back());
}

// Layers that see some of the tokens count those.
TEST(Balance, LossesOfLayersThatDropTokens) {
  for (const BalanceOver over : {BalanceOver::Layers, BalanceOver::GlobalBatch}) {
    const auto run = [&](const Layout& l) {
      Config c = experts_config(balanced_over(over), l);
      RandomLtdConfig& ltd = c.random_ltd;
      ltd.data_efficiency = ltd.data_routing = ltd.enabled = true;
      ltd.layers = {0, 2};
      ltd.min_value = 5, ltd.max_value = 16, ltd.require_steps = 3, ltd.seq_per_step = 1;
      return train(c, l);
    };
    const Trace want = run({.dp = 2});
    for (const Layout& l : {Layout{.dp = 2, .pp = 2, .stage = 1},
                            {.dp = 2, .checkpoints = Granularity::Layer, .interval = 2, .stage = 3},
                            {.dp = 2, .pp = 2, .schedule = Kind::ZeroBubbleV, .chunks = 2}})
      expect_same_training(run(l), want, l.name());
  }
}

}  // namespace experts_test
}  // namespace ds::testing
