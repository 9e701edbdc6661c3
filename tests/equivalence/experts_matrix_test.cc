// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts over everything that divides them: ranks of ep beside each other or with their copies in between,
// ZeRO, pipelines, tensor and sequence parallelism, recomputation, rounds, offload, optimizers. Every run has the bits
// of the one that divides nothing but what tp and sp divide, as far as that is promised, and else agrees to rounding.
// The ordinary run tries few arrangements, DS_SLOW=1 all.

#include <map>

#include "equivalence/layouts.h"
#include "equivalence/optimizers.h"
#include "equivalence/training.h"
#include "model/models.h"
#include "slow_set.h"
#include "temp_directory.h"

namespace ds::testing {
namespace experts_matrix_test {

using Kind = PipelineSchedule;
using Granularity = CheckpointGranularity;

constexpr i64 kSteps = 3;

ModelConfig of_llama(const ExpertsConfig& experts) {
  ModelConfig m = of_four_heads(tiny_llama());
  m.layers = 4;
  m.experts = experts;
  m.experts.intermediate = 24;
  return m;
}
// Softmax and a gated shared expert; DeepSeek-V3's router; DeepSpeed's layer, which drops choices.
const std::vector<ModelConfig>& models() {
  static const std::vector<ModelConfig> all = [] {
    std::vector<ModelConfig> m;
    m.push_back(of_llama({.count = 8,
                          .per_token = 2,
                          .router = {.normalise = true},
                          .shared = 32,
                          .shared_gate = true,
                          .balance_loss = 0.02f,
                          .z_loss = 1e-3f,
                          .layers = {true, false, true, true}}));
    m.push_back(of_llama(
        {.count = 8,
         .per_token = 3,
         .router =
             {.sigmoid = true, .normalise = true, .scale = 1.5f, .groups = 4, .chosen_groups = 2, .group_by_two = true},
         .balancing_bias = true,
         .shared = 32,
         .layers = std::vector<bool>(4, true)}));
    ModelConfig& moe = m.emplace_back(of_four_heads(tiny_gpt2()));
    moe.layers = 4;
    moe.experts = {.count = 8,
                   .per_token = 2,
                   .intermediate = moe.intermediate,
                   .plain = true,
                   .router = {.normalise = true},
                   .balance_loss = 0.05f,
                   .first_choice_loss = true,
                   .capacity = {.limited = true, .least = 2, .policy = DropPolicy::Position},
                   .noisy_choice = true,
                   .layers = {false, true, false, true}};
    return m;
  }();
  return all;
}

// The ranks of dp, and how experts lie on them.
struct Spread {
  int dp = 1, ep = 1;
  bool data_first = false;
  double room = 8;
  bool same_bits() const { return ep == 1 || ep == dp || data_first; }
};
constexpr Spread kSpreads[] = {{2},    {2, 2},       {4, 4},           {4, 4, false, 1},
                               {4, 2}, {4, 2, true}, {8, 8, false, 1}, {8, 4, true, 1}};

struct Stages {
  int pp = 1;
  Kind schedule = Kind::OneFOneB;
  i64 chunks = 1;
};
constexpr Stages kStages[] = {{}, {2}, {2, Kind::ZeroBubbleH1}, {2, Kind::ZeroBubbleV, 2}};

struct Cuts {
  int tp = 1, sp = 1;
  bool sequence = false;
  SequenceParallelMode mode = SequenceParallelMode::Ulysses;
};
constexpr Cuts kCuts[] = {{}, {2}, {2, 1, true}, {1, 2}, {1, 2, false, SequenceParallelMode::Ring}, {2, 2}};

enum class Offload : u8 { None, States, Params };

struct Case {
  size_t model = 0;
  Spread spread = {};
  Stages stages = {};
  Cuts cuts = {};
  i64 zero = 0;
  Granularity checkpoints = Granularity::None;
  Offload offload = Offload::None;
  const char* optimizer = "AdamW";
  DType work = DType::F32;

  Layout layout() const {
    return {.dp = spread.dp,
            .pp = stages.pp,
            .tp = cuts.tp,
            .sp = cuts.sp,
            .schedule = stages.schedule,
            .chunks = stages.chunks,
            .sequence = cuts.sequence,
            .mode = cuts.mode,
            .checkpoints = checkpoints,
            .stage = zero};
  }
  std::string name() const {
    return fmt::format("model {} {} ep {}{} room {} offload {} {} {}", model, layout().name(), spread.ep,
                       spread.data_first ? " data first" : "", spread.room, static_cast<int>(offload), optimizer,
                       dtype_name(work));
  }
};

Trace train(const Case& x, const std::string& dir) {
  const Layout l = x.layout();
  Config c = config_of(models()[x.model], l);
  c.bf16.enabled = x.work == DType::BF16;
  c.communication_data_type = wire_type_of(c.work_dtype());
  c.gradient_clipping = 0.5;
  c.optimizer.router_bias_update_rate = 0.01f;
  std::ranges::find(kOptimizers, std::string_view(x.optimizer), &OptimizerCase::name)->choose(c.optimizer);
  c.expert_parallel = {
      .enabled = x.spread.ep > 1, .size = x.spread.ep, .data_first = x.spread.data_first, .room = x.spread.room};
  if (x.offload != Offload::None)
    c.zero.offload_optimizer = {.device = OffloadDevice::Nvme, .nvme_path = dir, .buffer_count = 2};
  if (x.offload == Offload::Params) c.zero.offload_param = {.device = OffloadDevice::Nvme, .nvme_path = dir};
  Hooks hooks;
  hooks.splits = model::expert_splits(model::shard_of(c, mesh_shape(c, l.ranks()), {}));
  hooks.same_logits &= x.spread.ep == 1;
  const Trace t = train_threads(c, l.ranks(), kSteps, 1, hooks);
  for (size_t tag = 0; tag < t.counted.size(); ++tag)
    EXPECT_EQ(t.counted[tag], t.predicted[tag]) << x.name() << ": " << tag_name(static_cast<Tag>(tag));
  return t;
}

void check(const Case& x, const std::string& dir) {
  static std::map<std::string, Trace> known;  // runs that divide no more than they must
  Case whole = x;
  whole.spread = {};
  whole.stages = {};
  whole.zero = 0;
  whole.checkpoints = Granularity::None;
  whole.offload = Offload::None;
  const auto [at, is_new] = known.try_emplace(whole.name());
  if (is_new) at->second = train(whole, dir);
  const Trace &want = at->second, got = train(x, dir);
  if (x.spread.same_bits()) return expect_same_training(got, want, x.name());
  EXPECT_EQ(got.losses[0], want.losses[0]) << x.name();
  expect_close(got, want, x.name(),
               x.work == DType::F32 ? Tolerance{} : Tolerance{.loss = 1e-3, .first_norm = 1e-3, .norm = 3e-2});
}

TEST(ExpertsMatrix, TrainsAlikeHoweverItIsDivided) {
  const TempDirectory dir;
  test::EveryNth tried(37);
  for (size_t model = 0; model < models().size(); ++model) {
    for (const DType work : {DType::F32, DType::BF16}) {
      for (const Cuts& cuts : kCuts) {
        for (const Spread& spread : kSpreads) {
          for (const Stages& stages : kStages) {
            for (const i64 zero : {0, 1, 2, 3}) {
              for (const Granularity checkpoints : {Granularity::None, Granularity::Layer, Granularity::Selective}) {
                const Case x{.model = model,
                             .spread = spread,
                             .stages = stages,
                             .cuts = cuts,
                             .zero = zero,
                             .checkpoints = checkpoints,
                             .work = work};
                if (x.layout().ranks() <= 8 && tried()) check(x, dir.path());
              }
            }
          }
        }
      }
    }
  }
}

TEST(ExpertsMatrix, TrainsAlikeInEveryTierAndWithEveryOptimizer) {
  const TempDirectory dir;
  test::EveryNth tried(11);
  for (const OptimizerCase& optimizer : kOptimizers) {
    for (size_t model = 0; model < models().size(); ++model) {
      for (const Spread& spread : kSpreads) {
        if (optimizer.rounds_states && spread.ep > 1) continue;  // the random numbers are a rank's own
        for (const i64 zero : {1, 2, 3}) {
          for (const Offload offload : {Offload::None, Offload::States, Offload::Params}) {
            if (offload == Offload::Params && zero < 3) continue;
            const Case x{.model = model,
                         .spread = spread,
                         .zero = zero,
                         .checkpoints = zero == 2 ? Granularity::Layer : Granularity::None,
                         .offload = offload,
                         .optimizer = optimizer.name,
                         .work = zero == 3 ? DType::BF16 : DType::F32};
            if (tried()) check(x, dir.path());
          }
        }
      }
    }
  }
}

}  // namespace experts_matrix_test
}  // namespace ds::testing
