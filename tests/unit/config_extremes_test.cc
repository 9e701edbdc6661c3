// SPDX-License-Identifier: Apache-2.0
// Every number of a configuration at the ends of its type and beyond: each is refused in words that name its key, or
// its prediction is right. With -DDS_SANITIZE=undefined this is also the proof that no product of two of them overflows
// on the way.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "config/keys.h"
#include "config/model_config.h"
#include "config/scheduler.h"
#include "ds/memreport.h"
#include "optim/lr_schedule.h"
#include "plan/planned.h"

namespace ds {
namespace config_extremes_test {

constexpr const char* kIntegers[] = {"0",
                                     "-1",
                                     "1",
                                     "2",
                                     "100001",
                                     "1048576",
                                     "16777216",
                                     "2147483647",
                                     "2147483648",
                                     "4294967296",
                                     "1000000000000",
                                     "9007199254740992",
                                     "4611686018427387904",
                                     "768614336404564651",
                                     "9223372036854775807",
                                     "9223372036854775808",
                                     "18446744073709551615",
                                     "1e308",
                                     "1e-320",
                                     "-1e308",
                                     "nan"};
constexpr const char* kNumbers[] = {"0",     "-1",   "1",      "0.5",  "1e-320", "1e-46", "1e-45",
                                    "1e-30", "1e30", "3e38",   "4e38", "1e300",  "1e308", "9223372036854775807",
                                    "nan",   "inf",  "-1e-320"};

struct Number {
  std::string key;  // as in diagnostics
  bool is_integer = false;
  std::vector<std::string> settings = {};  // what else it needs to mean something
};

constexpr const char* kGpt2 =
    R"(model={"type": "gpt2", "vocab_size": 96, "n_embd": 8, "n_layer": 4, "n_head": 2, "n_positions": 64})";
constexpr const char* kQwen3 =
    R"(model={"type": "qwen3", "vocab_size": 96, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
       "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16, "max_position_embeddings": 64,
       "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2,
       "rope_scaling": {"rope_type": "yarn", "factor": 2}})";
constexpr const char* kQwen2Moe =
    R"(model={"type": "qwen2_moe", "vocab_size": 96, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
       "num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64, "num_experts": 6,
       "num_experts_per_tok": 2, "moe_intermediate_size": 4, "shared_expert_intermediate_size": 12,
       "mlp_only_layers": [0]})";
constexpr const char* kBert =
    R"(model={"type": "bert", "vocab_size": 96, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
       "intermediate_size": 16, "max_position_embeddings": 64})";

std::string argument(const Number& n, const char* value) {
  if (n.key == "optimizer.params.betas") return fmt::format("optimizer.params.betas[1]={}", value);
  return fmt::format("{}={}", n.key, value);
}

// Every key of the tables that takes a number.
std::vector<Number> all_numbers() {
  std::vector<Number> all;
  const auto add = [&](const Key& key, void* root, std::string_view prefix, std::vector<std::string> settings) {
    if (key.kind != KeyKind::Effect) return;
    const Slot slot = key.slot(root);
    const bool is_integer = std::holds_alternative<i64*>(slot);
    if (is_integer || std::holds_alternative<double*>(slot) || std::holds_alternative<float*>(slot) ||
        std::holds_alternative<BetasSlot>(slot))
      all.push_back({fmt::format("{}{}", prefix, key.path), is_integer, std::move(settings)});
  };
  Config config;
  for (const Key& key : config_keys()) {
    std::vector<std::string> settings = {kGpt2};
    if (key.path.starts_with("optimizer."))
      settings.insert(settings.end(), {"optimizer.type=AdamW", "optimizer.params.betas=[0.9,0.99]"});
    if (constexpr std::string_view kParams = "scheduler.params."; key.path.starts_with(kParams)) {
      for (const EnumName& type : scheduler_names()) {
        if (!scheduler_takes(SchedulerType(type.value), key.path.substr(kParams.size()))) continue;
        settings.push_back(fmt::format("scheduler.type={}", type.name));
        if (SchedulerType(type.value) == SchedulerType::OneCycle)
          settings.insert(settings.end(), {"scheduler.params.cycle_min_lr=0.5", "scheduler.params.cycle_max_lr=0.5"});
        break;
      }
    }
    if (key.path.starts_with("fp16.")) settings.push_back("fp16.enabled=true");
    if (key.path.starts_with("zero_optimization.")) settings.push_back("zero_optimization.stage=3");
    if (key.path.starts_with("data.mlm.")) settings[0] = kBert;
    if (key.path.starts_with("sparse_attention.")) {
      const bool sliding = key.path.ends_with("random_blocks") || key.path.ends_with("window_blocks");
      settings.push_back(sliding ? "sparse_attention.mode=bigbird" : "sparse_attention.mode=fixed");
      if (sliding) settings.emplace_back("sparse_attention.num_sliding_window_blocks=1");  // sequences have one block
    }
    add(key, &config, "", settings);
  }
  struct Root {  // as large as any root of model keys
    alignas(64) std::byte bytes[1 << 14];
  };
  const auto root = std::make_unique<Root>();
  for (const auto& [family, model] : {std::pair{Family::Gpt2, kGpt2},
                                      {Family::Qwen3, kQwen3},
                                      {Family::Qwen2Moe, kQwen2Moe},
                                      {Family::Bert, kBert}}) {
    for (const Key& key : model_keys(family, ModelSource::Inline)) add(key, root.get(), "model.", {model});
  }
  return all;
}

// Checks properties of every valid prediction.
void check_prediction(const Config& c, int ranks) {
  const memreport::Prediction p = memreport::predict(c, {.ranks = ranks, .nodes = 1}, DeviceKind::Cpu);
  const auto product = static_cast<long double>(c.batch.train) * static_cast<long double>(c.data.seq_length);
  EXPECT_EQ(static_cast<long double>(p.tokens_per_step), product);
  EXPECT_EQ(c.batch.train, c.batch.micro * c.batch.accumulation * p.mesh.dp);
  ASSERT_FALSE(p.groups.empty());
  EXPECT_GT(p.num_params, 0);
  for (const memreport::RankGroup& g : p.groups) {
    EXPECT_GT(g.device_bytes, 0);
    EXPECT_LT(g.device_bytes, i64{1} << 62);
    for (const memreport::TagBytes& t : g.memory) EXPECT_GE(t.bytes, 0) << t.tag;
    for (const memreport::Traffic& t : g.traffic) EXPECT_GE(t.bytes, 0) << t.name;
  }
  EXPECT_GE(p.fullest.host_bytes, 0);
  EXPECT_TRUE(p.bubble_fraction >= 0 && p.bubble_fraction < 1);
  const LrSchedule schedule(c.optimizer, c.scheduler);
  for (const i64 step : {i64{0}, i64{1}, c.steps, i64{1} << 53}) {
    const double lr = schedule.lr_at(step);
    EXPECT_TRUE(lr >= 0 && std::isfinite(static_cast<float>(lr))) << lr << " at " << step;
  }
}

// Whether it was accepted.
bool check(const std::vector<std::string>& settings, std::span<const std::string> keys, int ranks) {
  std::string what;
  for (const std::string& s : settings) what += s + "; ";
  SCOPED_TRACE(what);
  const ConfigResult r = parse_config("{}", "cfg", settings, ranks, ConfigUse::Inspect);
  if (!r.ok()) {
    // Some message names one of the keys, its other name, or what follows from it or holds it.
    const auto names = [&](const Diagnostic& d) {
      const auto is_of = [&](std::string_view key) { return d.key.starts_with(key); };
      if (d.severity != Severity::Error) return false;
      if (is_of("train_") || is_of("gradient_") || is_of("data.seq_length") || is_of("model")) return true;
      return std::ranges::any_of(keys, [&](const std::string& key) {
        return is_of(key) || key.starts_with(d.key) || d.message.find(key) != std::string::npos ||
               (key == "tensor_parallel.autotp_size" && is_of("tensor_parallel.tp_size"));
      });
    };
    EXPECT_TRUE(std::ranges::any_of(r.diagnostics, names)) << r.message();
    for (const Diagnostic& d : r.diagnostics) EXPECT_FALSE(d.key.empty()) << d.message;
    return false;
  }
  EXPECT_EQ(resolved_json(parse_config(resolved_json(r.config), "again", {}, ranks, ConfigUse::Inspect).config),
            resolved_json(r.config));
  check_prediction(r.config, ranks);
  return true;
}

TEST(ConfigExtremes, EachNumberByItself) {
  size_t tried = 0, accepted = 0;
  const std::vector<Number> numbers = all_numbers();
  ASSERT_GT(numbers.size(), 80u);
  for (const Number& n : numbers) {
    for (const int ranks : {1, 4}) {
      const auto one = [&](const char* value) {
        std::vector<std::string> settings = n.settings;
        if (!n.key.starts_with("train_batch_size")) settings.emplace_back("train_micro_batch_size_per_gpu=2");
        settings.emplace_back("data.seq_length=8");
        settings.push_back(argument(n, value));
        ++tried;
        accepted += check(settings, std::vector{n.key}, ranks);
      };
      if (n.is_integer)
        std::ranges::for_each(kIntegers, one);
      else
        std::ranges::for_each(kNumbers, one);
    }
  }
  EXPECT_GT(accepted, tried / 10);
  EXPECT_LT(accepted, tried);
}

TEST(ConfigExtremes, SeveralNumbersTogether) {
  const std::vector<Number> numbers = all_numbers();
  std::minstd_rand random(1);
  const auto below = [&](size_t n) { return random() % n; };
  for (int i = 0; i < 3000 && !HasFailure(); ++i) {
    std::vector<std::string> settings, values, keys;
    const Number& first = numbers[below(numbers.size())];
    settings = first.settings;
    settings.emplace_back("data.seq_length=8");
    if (below(4) == 0) settings.emplace_back("pipeline.stages=2");
    if (below(4) == 0) settings.emplace_back("pipeline.schedule=gpipe");
    for (size_t k = 2 + below(3); k-- > 0;) {
      const Number& n = k == 0 ? first : numbers[below(numbers.size())];
      if (n.key.starts_with("model.") && n.settings[0] != first.settings[0]) continue;
      keys.push_back(n.key);
      values.push_back(
          argument(n, n.is_integer ? kIntegers[below(std::size(kIntegers))] : kNumbers[below(std::size(kNumbers))]));
    }
    if (std::ranges::none_of(keys, [](const std::string& k) { return k.starts_with("train_"); }))
      settings.emplace_back("train_micro_batch_size_per_gpu=2");
    if (std::ranges::any_of(keys, [](const std::string& k) { return k.starts_with("optimizer."); }))
      settings.insert(settings.end(), {"optimizer.type=AdamW", "optimizer.params.betas=[0.9,0.99]"});
    settings.insert(settings.end(), values.begin(), values.end());
    keys.insert(keys.end(), {"pipeline", "scheduler", "optimizer", "fp16", "bf16", "eval", "reduce_order"});
    check(settings, keys, below(2) == 0 ? 1 : 4);
  }
}

// Each of these is within the bounds of its key: it is the products that are not.
TEST(ConfigExtremes, ProductsAreNamedAndNotComputed) {
  const struct {
    std::vector<std::string> settings;
    const char* message;
    int ranks = 1;
  } cases[] = {
      {{"train_micro_batch_size_per_gpu=2147483648", "gradient_accumulation_steps=100000"},
       "train_micro_batch_size_per_gpu: train_micro_batch_size_per_gpu 2147483648 x gradient_accumulation_steps 100000 "
       "x "
       "2147483647 ranks is beyond 2147483648 samples of a step",
       2147483647},
      {{kGpt2, "train_micro_batch_size_per_gpu=131072", "gradient_accumulation_steps=1", "data.seq_length=64",
        "model.vocab_size=16777216", "model.n_embd=65536", "model.n_head=256", "model.n_layer=1"},
       "EFLOP, beyond the 9 that are computed with"},
      {{kGpt2, "train_micro_batch_size_per_gpu=8192", "gradient_accumulation_steps=100000", "data.seq_length=64",
        "model.n_embd=8192", "model.n_head=64", "model.n_layer=40"},
       "gradient_accumulation_steps: this model"},
      {{kGpt2, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=1", "model.n_layer=100000",
        "pipeline.stages=1000"},
       "pipeline.stages: 1000 stages of 100002 layers are not planned: their product is at most 2000000",
       1000},
      {{kGpt2, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=100000", "model.n_layer=1000",
        "pipeline.stages=1000"},
       "gradient_accumulation_steps: 100000 micro-batches in 1000 stages are not planned",
       1000},
      {{kGpt2, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=100000", "model.n_layer=1000",
        "zero_optimization.stage=3"},
       "gradient_accumulation_steps: 100000 micro-batches through 1002 layers"},
  };
  for (const auto& c : cases) {
    const ConfigResult r = parse_config("{}", "cfg", c.settings, c.ranks, ConfigUse::Inspect);
    EXPECT_FALSE(r.ok());
    EXPECT_NE(r.message().find(c.message), std::string::npos) << r.message() << "\nwanted: " << c.message;
  }
}

// A step of any number of micro-batches: units that are gathered nowhere are not looked at use by use.
TEST(ConfigExtremes, APlanDoesNotGrowWithAccumulationWhereNothingIsGathered) {
  for (const int stage : {0, 2}) {
    const ConfigResult r = parse_config(
        "{}", "cfg",
        std::vector<std::string>{kGpt2, "train_micro_batch_size_per_gpu=1", "gradient_accumulation_steps=100000",
                                 fmt::format("zero_optimization.stage={}", stage)},
        2, ConfigUse::Inspect);
    ASSERT_TRUE(r.ok()) << r.message();
    const plan::Planned planned(r.config, {.dp = 2}, 0, DeviceKind::Cpu);
    EXPECT_TRUE(planned.plan.dp().train_gathers.accesses.empty());
    EXPECT_TRUE(planned.plan.dp().train_gathers.steps.empty());
    EXPECT_EQ(planned.plan.micro_batches, 100000);
  }
}

}  // namespace config_extremes_test
}  // namespace ds
