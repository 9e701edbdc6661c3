// SPDX-License-Identifier: Apache-2.0
// The table of keys, row by row: each is live, is listed in ds-config-keys(5), and has the default that the page gives.
#include "config/keys.h"

#include <fmt/format.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "config/model_config.h"
#include "config/reader.h"
#include "config/scheduler.h"
#include "unit/config_reading.h"

namespace ds {
namespace config_keys_test {

using ::testing::HasSubstr;
using namespace ds::testing;

Json::json_pointer pointer_to(std::string_view path) {
  std::string pointer = fmt::format("/{}", path);
  std::replace(pointer.begin(), pointer.end(), '.', '/');
  return Json::json_pointer(pointer);
}

// Without old forms, which are resolved to others.
std::vector<Key> effects() {
  std::vector<Key> keys;
  std::ranges::copy_if(config_keys(), std::back_inserter(keys), [](const Key& k) {
    return k.kind == KeyKind::Effect && !k.path.starts_with("zero_optimization.cpu_offload");
  });
  return keys;
}

// A configuration that moves a key off its default.
struct Moved {
  explicit Moved(const Key& key) {
    Config defaults;
    const Slot slot = key.slot(&defaults);
    if (std::holds_alternative<bool*>(slot)) {
      value = !slot_json(slot).get<bool>();
    } else if (std::holds_alternative<i64*>(slot)) {
      value = key.path == "aio.block_size"                               ? 8192
              : key.path == "diloco.outer_gradient_bits"                 ? 8
              : key.path == "sparse_attention.block"                     ? 32
              : key.path == "sparse_attention.num_sliding_window_blocks" ? 5
                                                                         : 3;
    } else if (std::holds_alternative<double*>(slot) || std::holds_alternative<float*>(slot)) {
      value = key.path == "expert_parallel.room" ? 1.5 : 0.375;
    } else if (std::holds_alternative<BetasSlot>(slot)) {
      value = {0.25, 0.375};
    } else if (std::holds_alternative<std::vector<i64>*>(slot)) {
      value = Json::array({3});
    } else if (std::holds_alternative<std::vector<float>*>(slot)) {
      value = Json::array({0.375});
    } else if (const auto* e = std::get_if<EnumSlot>(&slot)) {
      for (const EnumName& n : e->names)
        if (n.value != EnumName::kLater && n.name != slot_json(slot)) value = enum_name(e->names, n.value);
      if (key.path == "zero_optimization.offload_param.device") value = "nvme";  // "server" is for optimizers
    } else {
      const bool is_form = key.path.starts_with("data.chat_template.") && !key.path.ends_with(".begin");
      value = key.path == "data.tokenizer"       ? "bytes"
              : key.path == "pipeline.partition" ? "uniform"
              : is_form                          ? "a {content} b"
                                                 : "text";
    }
    set.push_back(fmt::format("{}={}", key.path, value.dump()));
    if (key.path.starts_with("train_") || key.path == "gradient_accumulation_steps") {
      set.push_back("train_micro_batch_size_per_gpu=3");
    } else {
      set.push_back("train_batch_size=4");
    }
    if (constexpr std::string_view kParams = "scheduler.params."; key.path.starts_with(kParams)) {
      const std::string_view param = key.path.substr(kParams.size());
      for (const EnumName& type : scheduler_names()) {
        if (!scheduler_takes(SchedulerType(type.value), param)) continue;
        set.push_back(fmt::format("scheduler.type={}", type.name));
        break;
      }
      for (const char* needed : {"cycle_min_lr", "cycle_max_lr"}) {
        if (scheduler_takes(SchedulerType::OneCycle, param) && param != needed)
          set.push_back(fmt::format("scheduler.params.{}=0.5", needed));
      }
    }
    for (const std::string_view of_sgd : {"momentum", "dampening", "nesterov"}) {
      if (key.path == fmt::format("optimizer.params.{}", of_sgd)) set.push_back("optimizer.type=SGD");
    }
    if (key.path.ends_with("params.nesterov")) set.push_back("optimizer.params.momentum=0.5");
    for (const std::string_view of_muon : {"muon_lr", "adam_lr", "adjust_lr_fn"}) {
      if (key.path == fmt::format("optimizer.params.{}", of_muon)) set.push_back("optimizer.type=Muon");
    }
    if (key.path.ends_with("_coeff")) set.push_back("optimizer.type=Lamb");
    if (key.path == "optimizer.params.freeze_step") set.push_back("optimizer.type=OneBitAdam");
    if (key.path.starts_with("optimizer.params.factor_") || key.path == "optimizer.params.coeff_beta")
      set.push_back("optimizer.type=OneBitLamb");
    if (key.path.ends_with("factor_max")) set.push_back("optimizer.params.factor_min=0.25");
    for (const std::string_view of_zero_one :
         {"var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"}) {
      if (key.path == fmt::format("optimizer.params.{}", of_zero_one)) set.push_back("optimizer.type=ZeroOneAdam");
    }
    if (key.path.starts_with("zero_optimization.zero_")) set.push_back("zero_optimization.stage=3");
    const auto offload = [&](std::string_view what, std::string_view device, int stage) {
      set.push_back(fmt::format("zero_optimization.stage={}", stage));
      const auto need = [&](std::string_view name, std::string_view text) {
        const std::string path = fmt::format("zero_optimization.{}.{}", what, name);
        if (key.path != path) set.push_back(fmt::format("{}={}", path, text));
      };
      need("device", device);
      if (device == "nvme") need("nvme_path", "disk");
      if (device == "server") need("name", "states");
    };
    if (key.path.starts_with("aio.")) offload("offload_optimizer", "nvme", 1);
    for (const auto& [what, stage] : {std::pair("offload_optimizer", 1), {"offload_param", 3}}) {
      if (key.path.starts_with(fmt::format("zero_optimization.{}.", what)))
        offload(what,
                value == "server" || key.path.ends_with(".name")      ? "server"
                : value == "nvme" || key.path.ends_with(".nvme_path") ? "nvme"
                                                                      : "cpu",
                stage);
    }
    if (key.path == "data.weights") {
      set.push_back("data.train=text");
      set.push_back("data.split=0");
    }
    if (key.path.ends_with("stage3_tile_size")) set.push_back("zero_optimization.stage=3");
    if (key.path.ends_with("delayed_update_start"))
      set.push_back("zero_optimization.offload_optimizer.delayed_update=true");
    if (key.path == "activation_checkpointing.buffer_count") set.push_back("activation_checkpointing.nvme_path=disk");
    if (constexpr std::string_view kSparse = "sparse_attention."; key.path.starts_with(kSparse)) {
      const struct {
        std::string_view key, needs;
      } needs[] = {{"mode", "layout=file"},
                   {"layout", "mode=layout"},
                   {"num_global_blocks", "num_local_blocks=6"},
                   {"horizontal_global_attention", "attention=bidirectional"},
                   {"num_different_global_patterns", "different_layout_per_head=true"},
                   {"num_random_blocks", "mode=variable"},
                   {"local_window_blocks", "mode=variable"},
                   {"global_block_indices", "mode=variable"},
                   {"global_block_end_indices", "mode=variable"},
                   {"num_sliding_window_blocks", "mode=local"}};
      for (const auto& n : needs) {
        if (key.path.substr(kSparse.size()) == n.key) set.push_back(fmt::format("{}{}", kSparse, n.needs));
      }
    }
    if (constexpr std::string_view kCurriculum = "curriculum_learning."; key.path.starts_with(kCurriculum)) {
      const bool lists = key.path.ends_with(".difficulty") || key.path.ends_with(".max_step");
      const struct {
        std::string_view key, value;
      } needs[] = {{"enabled", "true"},
                   {"schedule_type", lists                                ? "fixed_discrete"
                                     : key.path.ends_with(".root_degree") ? "fixed_root"
                                                                          : "fixed_linear"},
                   {"max_difficulty", "64"},
                   {"schedule_config.total_curriculum_step", "100"},
                   {"schedule_config.difficulty", key.path.ends_with(".max_step") ? "[8, 16]" : "[8]"}};
      for (const auto& n : needs) {
        if (key.path.substr(kCurriculum.size()) != n.key)
          set.push_back(fmt::format("{}{}={}", kCurriculum, n.key, n.value));
      }
    }
    if (constexpr std::string_view kLtd = "data_efficiency.data_routing.random_ltd."; key.path.starts_with(kLtd)) {
      const struct {
        std::string_view key, value;
      } needs[] = {{"enabled", "true"},
                   {"random_ltd_schedule.min_value", "2"},
                   {"random_ltd_schedule.max_value", "8"},
                   {"random_ltd_schedule.schedule_config.require_steps", "100"},
                   {"random_ltd_schedule.schedule_config.seq_per_step", key.path.ends_with("min_value") ? "3" : "2"}};
      for (const auto& n : needs) {
        if (key.path.substr(kLtd.size()) != n.key) set.push_back(fmt::format("{}{}={}", kLtd, n.key, n.value));
      }
      if (key.path.ends_with("seq_per_step")) set.push_back(fmt::format("{}random_ltd_schedule.min_value=3", kLtd));
      set.push_back("data_efficiency.data_routing.enabled=true");
    }
    if (key.path.starts_with("data_efficiency.data_routing.")) set.push_back("data_efficiency.enabled=true");
    if (key.path.starts_with("data.chat_template.") && key.path != "data.chat_template.assistant")
      set.push_back("data.chat_template.assistant=a {content}");
    for (const std::string_view of_documents : {"data.packing", "data.document_token_at", "data.add_document_token",
                                                "data.document_positions", "data.loss_across_documents"})
      if (key.path == of_documents) set.push_back("data.document_token=7");
    if (key.path == "cuda.attention" || key.path.starts_with("fp8.")) set.push_back("bf16.enabled=true");
    if (key.path.starts_with("fp8.") && key.path != "fp8.enabled") set.push_back("fp8.enabled=true");
    if (key.path == "fp8.gathers") set.push_back("zero_optimization.stage=3");
    if (key.path.starts_with("fp16.fp16_")) set.push_back("fp16.enabled=true");
    if (key.path.starts_with("bf16.bf16_") || key.path == "bf16.stochastic_rounding" ||
        key.path.starts_with("data_types."))
      set.push_back("bf16.enabled=true");
    if (key.path == "bf16.stochastic_rounding") set.push_back("bf16.bf16_master_weights_and_grads=true");
    for (const std::string_view monitor : {"tensorboard", "csv_monitor", "comms_logger", "flops_profiler"}) {
      const std::string enabled = fmt::format("{}.enabled", monitor);
      if (key.path.starts_with(fmt::format("{}.", monitor)) && key.path != enabled) set.push_back(enabled + "=true");
    }
    if (key.path == "comms_logger.prof_all") set.push_back("comms_logger.prof_ops=all_gather");
    if (key.path == "prometheus.job_name") set.push_back("prometheus.file=text");
    if (key.path.starts_with("data.mlm."))
      set.push_back(R"(model={"type": "bert", "vocab_size": 9, "hidden_size": 2, "num_hidden_layers": 1,
                       "num_attention_heads": 1, "intermediate_size": 2})");
    if (key.path == "optimizer.router_bias_update_rate")
      set.push_back(R"(model={"type": "glm4_moe", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1,
                       "num_attention_heads": 1, "intermediate_size": 2, "n_routed_experts": 2,
                       "num_experts_per_tok": 1, "moe_intermediate_size": 2, "num_key_value_heads": 1})");
    if ((key.path.starts_with("expert_parallel.") && key.path != "expert_parallel.enabled") ||
        key.path == "use_data_before_expert_parallelism")
      set.push_back("expert_parallel.enabled=true");
    if (key.path == "expert_parallel.autoep_size") set.push_back("train_batch_size=3");
    for (const std::string_view degree : {"expert_parallel.autoep_size", "pipeline.stages", "tensor_parallel.tp_size",
                                          "tensor_parallel.autotp_size", "sequence_parallel_size"}) {
      if (key.path == degree) world = 3;
    }
    if (key.path == "pipeline.virtual_stages") {
      world = 2;
      for (const char* s : {"pipeline.stages=2", "pipeline.schedule=interleaved", "gradient_accumulation_steps=2"})
        set.push_back(s);
    }
    if (key.path == "pipeline.memory_limit") {
      world = 16;
      for (const char* s : {"pipeline.stages=16", "pipeline.schedule=zb-v"}) set.push_back(s);
    }
    if (key.path == "pipeline.schedule" || key.path == "pipeline.partition") {
      world = 2;
      set.push_back("pipeline.stages=2");
    }
    if (key.path.starts_with("diloco.") && key.path != "diloco.enabled") set.push_back("diloco.enabled=true");
    if (key.path == "diloco.workers") {
      world = 3;
      set.push_back("train_batch_size=3");
    }
    if (key.path == "diloco.overlap_steps" || key.path == "diloco.local_share") {
      world = 3;
      for (const char* s : {"train_batch_size=3", "diloco.workers=3"}) set.push_back(s);
      if (key.path == "diloco.local_share") set.push_back("diloco.overlap_steps=2");
    }
    if (key.path.starts_with("zero_optimization.zeropp_loco_param.")) {
      set.push_back("zero_optimization.stage=3");
      set.push_back("zero_optimization.zero_quantized_gradients=true");
    }
    if (key.path == "zero_optimization.zero_hpz_partition_size") {
      world = 3;
      set.push_back("train_batch_size=3");
    }
    if (key.path == "sequence_parallel_mode") {
      world = 2;
      set.push_back("sequence_parallel_size=2");
    }
  }
  bool sets(std::string_view path) const {
    return std::ranges::any_of(set, [&](const std::string& s) { return s.starts_with(fmt::format("{}=", path)); });
  }

  Json value;
  std::vector<std::string> set;
  int world = 1;
};

// Moves every Effect key off its default through --set and expects it in resolved_json and back: a row whose slot is
// wrong, or that the writer forgets, fails here.
TEST(ConfigResolved, EveryRowOfTheTableIsLive) {
  for (const Key& key : effects()) {
    const Moved moved(key);
    const Json resolved = Json::parse(resolved_json(good("{}", moved.world, moved.set)));
    const Json::json_pointer at = pointer_to(key.path);
    ASSERT_TRUE(resolved.contains(at)) << key.path;
    const Json got = resolved.at(at);
    EXPECT_EQ(got.is_array() && moved.value.is_string() ? got[0] : got, moved.value) << key.path;
  }
}

TEST(ConfigResolved, OldFormsOfOffloadAreTheNewOnes) {
  const ConfigResult r = parse(R"({"train_batch_size": 4, "zero_optimization": {"stage": 3, "cpu_offload": true,
    "cpu_offload_params": true}})");
  EXPECT_TRUE(r.ok());
  EXPECT_EQ(r.diagnostics.size(), 2u);
  EXPECT_EQ(r.config.zero.offload_optimizer.device, OffloadDevice::Cpu);
  EXPECT_EQ(r.config.zero.offload_param.device, OffloadDevice::Cpu);
  const ConfigResult again = parse(resolved_json(r.config));
  EXPECT_EQ(again.diagnostics.size(), 0u) << (again.diagnostics.empty() ? "" : to_string(again.diagnostics[0]));
}

// A single stage with several chunks: the keys that decide its schedule are written out, and read back without
// diagnostics.
TEST(ConfigResolved, BreadthFirstIsReadBack) {
  const ConfigResult r = parse(R"({"train_batch_size": 4,
    "pipeline": {"schedule": "breadth-first", "virtual_stages": 2, "partition": "uniform"}})");
  EXPECT_TRUE(r.ok());
  const ConfigResult again = parse(resolved_json(r.config));
  EXPECT_EQ(again.diagnostics.size(), 0u) << (again.diagnostics.empty() ? "" : to_string(again.diagnostics[0]));
  EXPECT_EQ(again.config.pipeline.schedule, PipelineSchedule::BreadthFirst);
  EXPECT_EQ(again.config.pipeline.virtual_stages, 2);
  EXPECT_EQ(again.config.pipeline.partition, "uniform");
}

// Keys that ask for a report, or for another way to the same numbers, cause a warning; values that ask for neither are
// silent.
TEST(ConfigResolved, WhatNoNumberDependsOnIsAWarning) {
  const ConfigResult r = parse(
      R"({"train_batch_size": 4, "comms_logger": {"enabled": false, "debug": true}, "comms_config": {"verbose": true},
    "flops_profiler": {"enabled": true, "profile_step": 3, "top_modules": 3}, "fp16": {"auto_cast": true, "opt_level": "O1", "min_loss_scale": 0},
    "aio": {"num_threads": 4}, "zero_optimization": {"stage": 2, "round_robin_gradients": true, "contiguous_gradients": false,
    "reduce_scatter": false, "sub_group_size": 0, "reduce_bucket_size": 0, "allgather_bucket_size": 0,
    "stage3_module_granularity_threshold": 9}})");
  EXPECT_TRUE(r.ok()) << r.message();
  // One line for all of them.
  ASSERT_EQ(std::ssize(r.diagnostics), 1) << r.message();
  const std::string line = to_string(r.diagnostics[0]);
  EXPECT_EQ(r.diagnostics[0].severity, Severity::Warning);
  for (const char* name : {"has no effect here, nor have: ", "and 2 more; ds-config-keys(5) says why", "comms_config"})
    EXPECT_THAT(line, HasSubstr(name));
  const ConfigResult silent = parse(R"({"train_batch_size": 4, "comms_logger": {"debug": false}, "flops_profiler":
    {"top_modules": 1, "module_depth": -1, "recompute_fwd_factor": 0.0}, "zero_optimization": {"round_robin_gradients": false, "contiguous_gradients": true}})");
  EXPECT_TRUE(silent.diagnostics.empty()) << silent.message();
}

TEST(ConfigResolved, NoKeyIsListedTwiceAndEveryAliasLeadsSomewhere) {
  std::set<std::string_view> paths;
  for (const Key& k : config_keys()) EXPECT_TRUE(paths.insert(k.path).second) << k.path;
  const auto is_target = [&](std::string_view name) {
    return paths.contains(name) || std::any_of(paths.begin(), paths.end(), [&](std::string_view p) {
             return p.starts_with(name) && p.size() > name.size() && p[name.size()] == '.';
           });
  };
  for (const Key& k : config_keys()) {
    if (k.kind == KeyKind::Alias || k.kind == KeyKind::Deprecated) {
      EXPECT_TRUE(is_target(k.name)) << k.path;
    } else if (k.kind == KeyKind::NotYet || k.kind == KeyKind::NotYetSection) {
      EXPECT_TRUE(Json::parse(k.values).is_array()) << k.path;
    }
  }
}

std::string slurp(const std::string& path) {
  std::ifstream in(path);
  EXPECT_TRUE(in) << path;
  std::stringstream s;
  s << in.rdbuf();
  return s.str();
}

TEST(ConfigFiles, TheAnnotatedExampleIsGood) {
  const ConfigResult r = load_config(DS_TEST_DATA "/../../configs/tiny.json", {}, 2);
  EXPECT_TRUE(r.diagnostics.empty()) << r.message();
  EXPECT_EQ(r.config.batch.accumulation, 2);
  EXPECT_EQ(r.config.model.layers, 2);
  EXPECT_EQ(r.config.model.embd_dropout, 0);
}

// ds-config-keys(5) writes a key that has an effect as ".It Sy KEY", then its type, with ", auto" if it takes that, and
// "default VALUE" or, where it depends on other keys, "default: words" or "required".
constexpr const char* kManualPage = DS_TEST_DATA "/../../man/ds-config-keys.5";
std::string manual_page() { return slurp(kManualPage); }

std::string manual_entry(const std::string& page, std::string_view path) {
  const size_t at = page.find(fmt::format("\n.It Sy {}\n", path));
  if (at == page.npos) return {};
  return page.substr(at, std::min(page.find("\n.It ", at + 1), page.find("\n.El", at)) - at);
}

std::string default_of(const Key& key) {
  Config defaults;
  return slot_json(key.slot(&defaults)).dump();
}

bool has_constant_default(const std::string& entry, const Key& key) {
  return entry.find(fmt::format("default {}", default_of(key))) != entry.npos;
}

// Every other key is somewhere on the page.
TEST(ConfigFiles, TheManualPageHasEveryKeyWithItsDefault) {
  const std::string page = manual_page();
  const auto has_word = [&](std::string_view word) {
    for (size_t at = page.find(word); at != page.npos; at = page.find(word, at + 1))
      if (page[at - 1] == ' ' && std::string_view(" \n").find(page[at + word.size()]) != std::string_view::npos)
        return true;
    return false;
  };
  for (const Key& key : config_keys()) {
    if (key.kind == KeyKind::Alias) continue;  // one sentence covers them all
    EXPECT_TRUE(has_word(key.path)) << key.path;
    if (key.kind != KeyKind::Effect) continue;
    const std::string entry = manual_entry(page, key.path);
    ASSERT_FALSE(entry.empty()) << key.path;
    const size_t type = entry.find('\n', 1) + 1;
    const std::string type_line = entry.substr(type, entry.find('\n', type) - type);
    EXPECT_EQ(type_line.find(", auto") != type_line.npos, key.takes_auto) << entry;
    const bool derived = entry.find("default: ") != entry.npos || entry.find("required") != entry.npos;
    EXPECT_NE(has_constant_default(entry, key), derived) << entry << "\nneeds: default " << default_of(key);
  }
  for (const FamilySpec* family : families())
    for (const Key& key : model_keys(family->family, ModelSource::Inline))
      if (key.kind == KeyKind::Effect) {
        EXPECT_TRUE(has_word(key.path.substr(key.path.rfind('.') + 1))) << key.path;
      }
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  std::istringstream in{std::string(text)};
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// "false or true"; roff takes no quotes amiss.
std::string values_text(const Key& key) {
  std::string text;
  for (const Json& v : Json::parse(key.values)) text += fmt::format("{}{}", text.empty() ? "" : " or ", v.dump());
  return text;
}

// "Sums are in fp32." of "sums are in fp32"; a name of a key or file keeps its first letter.
std::string sentence(std::string text) {
  const std::string first = text.substr(0, text.find(' '));
  if (first.find_first_of("._0123456789") == first.npos) text[0] = static_cast<char>(std::toupper(text[0]));
  return text + ".";
}

// The tables of keys that have no entry of their own, in the order of the page.
enum Table { kIgnoredTable, kNotYetTable, kAliasTable, kRefusedTable, kNumTables };
constexpr std::string_view kTableHeads[] = {
    ".Ss Keys of DeepSpeed without effect\n.\\\" Made by tests/unit/config_keys_test.cc.\n"
    "These keys are accepted and do not affect results.\n"
    "One warning lists those that a configuration contains, unless their value is the one that describes what is done "
    "anyway.\n",
    ".Ss Keys of DeepSpeed that are not supported\n"
    "Any value but the one given here, and null, exits with 4.\n",
    ".Ss Other names\n"
    "Each name is accepted instead of the key below it.\n",
    ".Ss Misplaced keys\n"
    "These keys are errors.\n"};
static_assert(std::size(kTableHeads) == kNumTables);

// The table that lists a key, and the text about it; no text: the key has an entry of its own.
std::pair<Table, std::string> fate(const Key& key) {
  const auto must_be = [&](std::string what) {
    return std::pair(kNotYetTable, sentence(key.note.empty() ? what : fmt::format("{}: {}", what, key.note)));
  };
  const auto ignored = [&] { return std::pair(kIgnoredTable, sentence(std::string(key.note))); };
  const std::string values = key.values.empty() ? "" : values_text(key);
  switch (key.kind) {
    case KeyKind::Effect:
    case KeyKind::Subtable: return {kIgnoredTable, ""};
    case KeyKind::NotYet:
      if (key.harmless || values == "false or true" || values == "true or false") return ignored();
      return must_be(fmt::format("must be {}", values));
    case KeyKind::NotYetSection:
      if (key.name.empty()) return must_be("must be an empty object");
      if (key.harmless) return ignored();
      return must_be(fmt::format("its {} must be {}", fmt::join(words_of(key.name), ", "), values));
    case KeyKind::Ignored:
    case KeyKind::IgnoredSection: return ignored();
    case KeyKind::Silent: return {kIgnoredTable, "Kept for the program that wrote the file."};
    case KeyKind::Alias: {
      const bool plain = key.name.ends_with(fmt::format(".stage3_{}", key.path.substr(key.path.find('.') + 1)));
      return {kAliasTable, plain ? "" : fmt::format(".Cm {}", key.name)};  // a sentence covers all of these
    }
    case KeyKind::Deprecated: return {kAliasTable, fmt::format("(deprecated)\n.Cm {}", key.name)};
    case KeyKind::Refused: return {kRefusedTable, sentence(std::string(key.note))};
  }
  return {kIgnoredTable, ""};
}

// Every field of the classes that DeepSpeed reads with pydantic is known, and passes with DeepSpeed's own default.
TEST(ConfigFiles, DeepSpeedsOwnDefaultsPass) {
  const Json rows = Json::parse(slurp(DS_TEST_DATA "/deepspeed_keys.json"));
  EXPECT_GT(rows.size(), 140u);
  for (const Json& row : rows) {
    const std::string path = row.at(0).get<std::string>();
    if (path.starts_with("zero_optimization.zenflow.")) continue;  // the section alone asks for ZenFlow
    Json config = {{"train_batch_size", 4}};
    config[pointer_to(path)] = row.at(1);
    const ConfigResult r = parse(config.dump());
    EXPECT_TRUE(r.ok()) << r.message();
  }
}

// The tables of the other keys are made from the rows of the reader; keys with the same text share a line.
// DS_UPDATE_MANUAL=1 rewrites them.
TEST(ConfigFiles, TheTableOfOtherKeysIsThatOfTheReader) {
  std::map<std::string_view, std::pair<Table, std::string>> fates;
  for (const Key& key : config_keys()) {
    if (auto of_key = fate(key); !of_key.second.empty()) fates[key.path] = std::move(of_key);
  }
  std::string tables;
  for (int table = 0; table < kNumTables; ++table) {
    std::vector<std::pair<std::string, std::vector<std::string_view>>> rows;
    for (const auto& [path, of_key] : fates) {
      if (of_key.first != table) continue;
      const auto row = std::ranges::find(rows, of_key.second, [](const auto& r) { return r.first; });
      if (row == rows.end())
        rows.push_back({of_key.second, {path}});
      else
        row->second.push_back(path);
    }
    tables += fmt::format("{}.Bl -tag -width Ds\n", kTableHeads[table]);
    for (const auto& [text, paths] : rows) tables += fmt::format(".It Sy {}\n{}\n", fmt::join(paths, " , "), text);
    tables += ".El\n";
  }
  std::string page = manual_page();
  const size_t begin = page.find(".Ss Keys of DeepSpeed without effect\n"), end = page.find(".Sh EXIT STATUS\n");
  ASSERT_LT(begin, end);
  if (std::getenv("DS_UPDATE_MANUAL") != nullptr) {
    page.replace(begin, end - begin, tables);
    std::ofstream(kManualPage) << page;
    return;
  }
  EXPECT_EQ(page.substr(begin, end - begin), tables);
  EXPECT_GT(fates.size(), 100u);
}

// If a key is left out, the reader takes the default that the page gives as a value, whatever else its section
// contains: writing it out changes nothing, and a mistake stays one.
TEST(ConfigFiles, DefaultsOfTheManualPageAreWhatAbsentKeysMean) {
  const std::string page = manual_page();
  const auto section = [](const Key& key) { return key.path.substr(0, key.path.find('.')); };
  const auto meaning = [](const Moved& moved, const std::vector<std::string>& set) {
    const ConfigResult r = parse("{}", moved.world, set);
    return r.ok() ? resolved_json(r.config) : "refused";
  };
  int pairs = 0;
  for (const Key& key : effects()) {
    if (!has_constant_default(manual_entry(page, key.path), key)) continue;
    for (const Key& other : effects()) {
      const Moved moved(other);
      if (section(other) != section(key) || moved.sets(key.path)) continue;
      std::vector<std::string> written = moved.set;
      written.push_back(fmt::format("{}={}", key.path, default_of(key)));
      const std::string absent = meaning(moved, moved.set);
      if (Json::accept(absent) && !Json::parse(absent).contains(pointer_to(key.path))) continue;  // another choice's
      EXPECT_EQ(absent, meaning(moved, written)) << key.path << " beside " << other.path;
      ++pairs;
    }
  }
  EXPECT_GT(pairs, 200);
}

// Defaults that depend on other keys: the words of the page, for each of them.
TEST(ConfigFiles, DerivedDefaultsAreThoseOfTheManualPage) {
  const struct {
    std::string_view key, words, config, value;  // no value: nothing is resolved
  } cases[] = {
      {"train_batch_size", "default: derived", R"("train_micro_batch_size_per_gpu": 3)", "6"},
      {"train_micro_batch_size_per_gpu", "default: derived", R"("train_batch_size": 8)", "4"},
      {"gradient_accumulation_steps", "default: derived",
       R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 2)", "2"},
      {"data.train", "required", "", ""},
      {"data.validation", "default: the end of the training data", R"("data": {"train": "a"})", ""},
      {"data.tokenizer", "default: the tokenizer in the directory of", R"("data": {"train": "a"})", R"("bytes")"},
      {"data.seq_length", "default: 1024 or the model's positions, whichever is less", "", "1024"},
      {"data.seq_length", "default: 1024 or the model's positions, whichever is less", kModel, "64"},
      {"data.mlm.mask_token", "default: the tokenizer's", kBert, ""},
      {"data.mlm.cls_token", "default: the tokenizer's", kBert, ""},
      {"data.mlm.sep_token", "default: the tokenizer's", kBert, ""},
      {"data.seed", "default: the key\n.Cm seed", R"("seed": 7)", "7"},
      {"steps", "required", "", ""},
      {"reduce_order", "default: \"micro\" at ZeRO stages 2 and 3 and when deterministic, else \"boundary\"",
       R"("zero_optimization": {"stage": 1})", R"("boundary")"},
      {"reduce_order", "", R"("zero_optimization": {"stage": 2})", R"("micro")"},
      {"reduce_order", "", R"("deterministic": true)", R"("micro")"},
      {"optimizer.params.lr", "default: 0.001, of Lion 0.0001, of Adagrad 0.01, of Muon 0.02", "", "0.001"},
      {"optimizer.params.lr", "", R"("optimizer": {"type": "Lion"})", "0.0001"},
      {"optimizer.params.lr", "", R"("optimizer": {"type": "Adagrad"})", "0.01"},
      {"optimizer.params.betas", "default: [0.9,0.999], of Lion [0.9,0.99], of Muon [0.9,0.95]", "", "[0.9,0.999]"},
      {"optimizer.params.betas", "", R"("optimizer": {"type": "Lion"})", "[0.9,0.99]"},
      {"optimizer.params.eps", "default: 1e-08, of Adagrad and Muon 1e-10", "", "1e-08"},
      {"optimizer.params.eps", "", R"("optimizer": {"type": "Adagrad"})", "1e-10"},
      {"optimizer.params.momentum", "default: 0.0, of Muon 0.95", R"("optimizer": {"type": "Muon"})", "0.95"},
      {"optimizer.params.nesterov", "default: false, of Muon true", R"("optimizer": {"type": "Muon"})", "true"},
      {"optimizer.params.muon_lr", "default: lr", R"("optimizer": {"type": "Muon", "params": {"lr": 0.25}})", "0.25"},
      {"optimizer.params.adam_lr", "default: lr", R"("optimizer": {"type": "Muon"})", "0.02"},
      {"scheduler.type", "default: none", "", ""},
      {"data.document_token", "default: none, and a sample is one text", "", ""},
      {"data.separate_documents", "default: true with\n.Cm data.document_token\nor\n.Cm data.packing ,\nelse false",
       R"("data": {"document_token": 7})", ""},
      {"data.separate_documents", "", R"("data": {"document_token": 7, "separate_documents": false})", "false"},
      {"data.separate_documents", "", R"("data": {"separate_documents": true})", "true"},
      {"data.weights", "default: none, and the files are one stream", "", ""},
      {"scheduler.params.warmup_max_lr", "default: the optimizer's lr",
       R"("optimizer": {"params": {"lr": 0.25}}, "scheduler": {"type": "WarmupLR"})", "0.25"},
      {"scheduler.params.total_num_steps", "default: the key\n.Cm steps",
       R"("steps": 5000, "scheduler": {"type": "WarmupCosineLR"})", "5000"},
      {"scheduler.params.cycle_min_lr", "required", "", ""},
      {"scheduler.params.cycle_max_lr", "required", "", ""},
      {"scheduler.params.cycle_second_step_size", "default: the first half's",
       R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1,
          "cycle_first_step_size": 7}})",
       "7"},
      {"scheduler.params.cycle_second_stair_count", "default: the first half's",
       R"("scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1,
          "cycle_first_stair_count": 7}})",
       "7"},
      {"scheduler.params.decay_num_steps", "default: a tenth of all", R"("steps": 5000, "scheduler": {"type": "WSD"})",
       "500"},
      {"scheduler.params.timescale", "default: as many as warm up",
       R"("scheduler": {"type": "InverseSqrt", "params": {"warmup_num_steps": 7}})", "7"},
      {"communication_data_type", "default: the type of the parameters", R"("bf16": {"enabled": true})", R"("bf16")"},
      {"zero_optimization.overlap_comm", "default: true at stage 3, else false", R"("zero_optimization": {"stage": 2})",
       "false"},
      {"zero_optimization.overlap_comm", "", R"("zero_optimization": {"stage": 3})", "true"},
      {"activation_checkpointing.granularity",
       "default: \"layer\" where one of the four keys below asks for it, else \"none\"", "", R"("none")"},
      {"activation_checkpointing.granularity", "", R"("activation_checkpointing": {"interval": 1})", R"("layer")"},
      {"activation_checkpointing.interval", "default: 1 where another key asks for \"layer\"",
       R"("activation_checkpointing": {"cpu_checkpointing": true})", "1"},
      {"activation_checkpointing.interval", "", "", ""},
      {"activation_checkpointing.granularity", "", R"("activation_checkpointing": {"nvme_path": "disk"})",
       R"("layer")"},
      {"activation_checkpointing.nvme_path", "default: none", "", ""},
      {"sparse_attention.mode", "default: \"fixed\" where the section is there", "", ""},
      {"sparse_attention.mode", "", R"("sparse_attention": {"block": 32})", R"("fixed")"},
      {"sparse_attention.mode", "", R"("sparse_attention": {})", R"("fixed")"},
      {"sparse_attention.attention", "default: \"unidirectional\" where the model is causal, else \"bidirectional\"",
       R"("sparse_attention": {"mode": "fixed"})", R"("unidirectional")"},
      {"sparse_attention.attention", "",
       R"("sparse_attention": {"mode": "fixed"}, "train_batch_size": 8, "model": {"type": "bert", "vocab_size": 259,
       "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64})",
       R"("bidirectional")"},
      {"sparse_attention.num_random_blocks", "default: 1 with mode \"bigbird\"",
       R"("sparse_attention": {"mode": "bigbird"})", "1"},
      {"sparse_attention.num_random_blocks", "", R"("sparse_attention": {"mode": "variable"})", "0"},
      {"sparse_attention.global_block_end_indices", "default: none", R"("sparse_attention": {"mode": "variable"})", ""},
      {"sparse_attention.layout", "default: none", "", ""},
      {"curriculum_learning.max_difficulty", "required", "", ""},
      {"curriculum_learning.schedule_config.total_curriculum_step", "required", "", ""},
      {"curriculum_learning.schedule_config.difficulty", "required", "", ""},
      {"curriculum_learning.schedule_config.max_step", "required", "", ""},
      {"data.chat_template.begin", "default: none", "", ""},
      {"data.chat_template.system", "default: none", "", ""},
      {"data.chat_template.user", "default: none", "", ""},
      {"data.chat_template.assistant", "default: none", "", ""},
      {"data.chat_template.tool", "default: none", "", ""},
      {"data_efficiency.data_routing.random_ltd.total_layer_num", "default: the layers of the model", "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_layer_num", "default: the length of the next one", "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_layer_id", "default: all layers but the first and the last",
       "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_schedule.min_value", "required", "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_schedule.max_value", "required", "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.require_steps", "required", "", ""},
      {"data_efficiency.data_routing.random_ltd.random_ltd_schedule.schedule_config.seq_per_step", "required", "", ""},
      {"cuda.autotune_file", "default: none", "", ""},
      {"tensorboard.output_path", "default: the directory tensorboard in the run directory", "", ""},
      {"csv_monitor.output_path", "default: the directory csv_monitor in the run directory", "", ""},
      {"prometheus.file", "default: none", "", ""},
      {"flops_profiler.output_file", "default: none", R"("flops_profiler": {"enabled": true})", ""},
      {"optimizer.params.bias_correction", "default: true, of OneBitAdam, ZeroOneAdam and OneBitLamb false", "",
       "true"},
      {"optimizer.params.bias_correction", "", R"("optimizer": {"type": "OneBitAdam"})", "false"},
      {"comms_logger.enabled", "default: true where the section is there", "", "false"},
      {"comms_logger.enabled", "", R"("comms_logger": {})", "true"},
      {"comms_logger.enabled", "", R"("comms_logger": {"enabled": false, "verbose": true})", "false"},
      {"zero_optimization.offload_optimizer.nvme_path", "default: none", "", ""},
      {"zero_optimization.offload_param.nvme_path", "default: none", "", ""},
      {"zero_optimization.offload_optimizer.name", "default: none", "", ""},
  };
  const std::string page = manual_page();
  for (const auto& c : cases) {
    EXPECT_THAT(manual_entry(page, c.key), HasSubstr(c.words));
    const bool sized = c.config.find("train_") != c.config.npos;
    const Config config = good(fmt::format("{{{}{}{}}}", c.config, sized || c.config.empty() ? "" : ", ",
                                           sized ? "" : R"("train_batch_size": 2)"),
                               2);
    const Json resolved = Json::parse(resolved_json(config));
    const Json::json_pointer at = pointer_to(c.key);
    ASSERT_EQ(resolved.contains(at), !c.value.empty()) << c.key;
    if (c.value.empty()) continue;
    EXPECT_EQ(resolved.at(at), Json::parse(c.value)) << c.key;
  }
  for (const Key& key : effects()) {
    if (has_constant_default(manual_entry(page, key.path), key)) continue;
    EXPECT_TRUE(std::ranges::any_of(cases, [&](const auto& c) { return c.key == key.path; })) << key.path;
  }
}

}  // namespace config_keys_test
}  // namespace ds
