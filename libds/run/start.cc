// SPDX-License-Identifier: Apache-2.0
#include "run/start.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "base/file.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/run_names.h"
#include "checkpoint/together.h"
#include "config/model_config.h"
#include "config/scheduler.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "optim/lr_schedule.h"
#include "run/run_record.h"
#include "run/served.h"
#include "run/weights.h"

namespace ds::run {
namespace {

// Calls load(), which reads step_dir. Where that is damaged, a run that goes on from its own latest step takes the one
// before; whoever asked for one step, or only reads, gets the error.
void from_newest(const Request& request, Communicator* world, std::string& step_dir, FunctionRef<void()> load) {
  for (;;) {
    try {
      return load();
    } catch (const Error& e) {
      if (e.code() != Errc::Corrupt || request.options.resume != "latest" || !request.writes()) throw;
      const auto before = [&] {
        return request.is_root() ? step_before(request.options.out_dir, step_dir) : std::string();
      };
      const std::string older = world != nullptr ? gather_text(*world, before()).front() : before();
      if (older.empty()) throw;
      if (request.is_root())
        log_message(LogLevel::Warning, fmt::format("{}; resuming from the step before, {}", e.what(), older));
      step_dir = older;
    }
  }
}

// Says if the rate of a schedule moves because the number of steps does, on which its end depends unless the
// configuration gives it.
void warn_of_schedule(const Config& now, const CheckpointMeta& meta, const std::string& source) {
  constexpr const char* kHorizon = "total_num_steps";
  if (meta.step == 0 || meta.config_json.empty()) return;
  const Json saved = Json::parse(meta.config_json);
  const auto number = [](const Json& object, const char* key) -> std::optional<i64> {
    const auto it = object.find(key);
    return it != object.end() && it->is_number_integer() ? std::optional(it->get<i64>()) : std::nullopt;
  };
  const auto scheduler = saved.find("scheduler");
  const auto params = scheduler == saved.end() || !scheduler->is_object() ? saved.end() : scheduler->find("params");
  if (scheduler == saved.end() || params == scheduler->end() || !params->is_object()) return;
  const std::optional<i64> before = number(*params, kHorizon);
  // A horizon of its own does not follow the steps, and another type was meant to move the rate.
  if (!before || *before == now.scheduler.total_num_steps || now.scheduler.total_num_steps != now.steps ||
      scheduler->value("type", "") != scheduler_name(now.scheduler.type))
    return;
  SchedulerConfig old = now.scheduler;
  old.total_num_steps = *before;
  if (const auto decay = number(*params, "decay_num_steps")) old.decay_num_steps = *decay;
  // The first step that is left whose rate moves by as much as is shown.
  const LrSchedule schedule(now.optimizer, now.scheduler), schedule_before(now.optimizer, old);
  for (i64 step = meta.step + 1; step <= now.steps; ++step) {
    const i64 updates = step - 1 - meta.step + meta.optimizer_step;  // before this step, unless more are skipped
    const double is = schedule.lr_at(updates - 1), was = schedule_before.lr_at(updates - 1);
    if (std::abs(is - was) <= 1e-3 * std::max(is, was)) continue;
    return log_message(
        LogLevel::Warning,
        fmt::format("{} was trained with a schedule of {} steps, and this run has {}: the learning rate of step {} "
                    "is {:.4g} instead of {:.4g}; scheduler.params.{} {} keeps the schedule",
                    source, *before, now.steps, step, is, was, kHorizon, *before));
  }
}

// Warns if products in FP8, or the gathers of their matrices, are other ones than before.
void warn_of_fp8(const Config& now, const CheckpointMeta& meta, const std::string& source) {
  if (meta.step == 0 || meta.config_json.empty()) return;
  const Json saved = Json::parse(meta.config_json), own = Json::parse(resolved_json(now));
  const auto value = [](const Json& config, const char* key, const char* missing) -> std::string {
    const auto fp8 = config.find("fp8");
    if (fp8 == config.end() || !fp8->is_object()) return missing;
    const auto it = fp8->find(key);
    return it == fp8->end() ? missing : it->is_string() ? it->get<std::string>() : it->dump();
  };
  std::string changed;
  bool bits = false;
  for (const auto& [key, missing] : {std::pair{"enabled", "false"}, {"gradients", ""}, {"gathers", "false"}}) {
    const std::string here = value(own, key, missing), there = value(saved, key, missing);
    if (here == there || here.empty() || there.empty()) continue;
    changed += fmt::format("{}fp8.{} is {} here and {} there", changed.empty() ? "" : ", ", key, here, there);
    bits |= key != std::string_view("gathers");
  }
  if (changed.empty()) return;
  log_message(LogLevel::Warning,
              fmt::format("{} was trained with other products or gathers: {}; {}", source, changed,
                          bits ? "losses differ by roundings from those of an unchanged run" : "no loss changes"));
}

// Warns if the loss that balances experts is formed over other tokens than before.
void warn_of_balance_loss(const Config& now, const CheckpointMeta& meta, const std::string& source) {
  constexpr const char* kKey = "gradient_accumulation_steps";
  if (!now.model.experts.balances_over(BalanceOver::GlobalBatch)) return;
  if (meta.step == 0 || meta.config_json.empty()) return;
  const Json saved = Json::parse(meta.config_json);
  const auto before = saved.find(kKey);
  if (before == saved.end() || !before->is_number_integer() || *before == now.batch.accumulation) return;
  log_message(
      LogLevel::Warning,
      fmt::format("{} was trained with {} {}, and this run has {}: model.moe.loss_over \"global_batch\" counts "
                  "tokens over the micro-batches of a step so far, so another loss is minimised; {} {} keeps it",
                  source, kKey, before->dump(), now.batch.accumulation, kKey, before->dump()));
}

// The values of keys that an attention_identity() states.
std::map<std::string, std::string> attention_keys(const std::string& identity) {
  constexpr const char *kSparse = "sparse_attention", *kToken = "data.document_token",
                       *kSeparate = "data.separate_documents", *kPositions = "data.document_positions";
  const Json json = identity.empty() ? Json::object() : Json::parse(identity);
  const auto value = [&](const char* key, std::string missing) {
    const auto it = json.find(key);
    return it == json.end() ? missing : it->is_string() ? it->get<std::string>() : it->dump();
  };
  std::map<std::string, std::string> keys = {{kSparse, value(kSparse, "none")}};
  const bool is_separate = json.contains(kSeparate) || json.contains(kToken);  // the token implies it
  keys[kSeparate] = is_separate ? "true" : "false";
  if (!is_separate) return keys;
  keys[kToken] = value(kToken, "none");
  keys[kPositions] = value(kPositions, "restart");
  return keys;
}

// Throws Errc::Mismatch, naming the keys that have changed, unless attention is the same.
void check_same_attention(const std::string& saved, const std::string& now, const std::string& source) {
  if (saved == now) return;
  const auto there = attention_keys(saved), here = attention_keys(now);
  std::string changed;
  for (const auto& [key, value] : there) {
    const auto own = here.find(key);
    if (own != here.end() && own->second != value)
      changed += fmt::format("{}{} is {} here and {} there", changed.empty() ? "" : ", ", key, own->second, value);
  }
  if (changed.empty()) changed = fmt::format("{} there and {} here", saved, now);  // keys of another version
  throw Error(
      Errc::Mismatch,
      fmt::format("{}: a checkpoint of another attention: {}; --weights takes its weights alone", source, changed));
}

// A run goes on with the samples and the dropout that it began with.
void check_same_run(const Request& request, const RunData& data, const CheckpointMeta& meta,
                    const std::string& source) {
  const Config& config = request.config;
  const bool reads_only = request.options.read_only;
  if (!meta.model_config_json.empty()) check_same_model(Json::parse(meta.model_config_json), config.model, source);
  // A step that another program made says nothing of it.
  if (meta.seed || !meta.attention_json.empty())
    check_same_attention(meta.attention_json, attention_identity(config), source);
  if (data.train && !reads_only && !meta.data_json.empty()) {
    const DataIdentity saved = parse_data_identity(meta.data_json), now = data.train->identity();
    check_same_data(saved, now);
    if (const std::string differs = difference_of_samples(saved, now); !differs.empty() && request.is_root())
      log_message(LogLevel::Warning, differs);
  }
  if ((reads_only || !data.train) && config.model.causal() && !meta.data_json.empty()) {
    const std::string saved = parse_data_identity(meta.data_json).tokenizer;
    const std::string now =
        data.train ? data.train->identity().tokenizer : open_tokenizer(config.data.tokenizer)->identity();
    DS_CHECK(saved.empty() || is_same_tokenizer(saved, now), Errc::Mismatch, "{}",
             difference_of_tokenizers(now, saved, fmt::format("{} was trained with", source)));
  }
  if (reads_only) return;  // which has neither dropout nor samples that go on
  DS_CHECK(meta.seed.value_or(static_cast<u32>(config.seed)) == static_cast<u32>(config.seed), Errc::Mismatch,
           "{} was made with seed {}, this run has {}", source, *meta.seed, config.seed);
  if (request.is_root()) warn_of_schedule(config, meta, source);
  if (request.is_root()) warn_of_fp8(config, meta, source);
  if (request.is_root()) warn_of_balance_loss(config, meta, source);
  if (meta.step > 0 && (meta.data_json.empty() || !meta.seed) && request.is_root())
    log_message(LogLevel::Warning, fmt::format("{} was converted, and does not know the data and the seed of its run: "
                                               "going on with those of this configuration",
                                               source));
}

void publish_to_server(bool is_from_server, const RunData& data, Trained& trained) {
  engine::Engine& engine = *trained.engine;
  DS_CHECK(data.train != nullptr, Errc::Config, "data.train: there is nothing to train on");
  // The server knows the last step; the loss scale is that of this run, which may have another dtype.
  offload::ServedRecord now = engine.served_record();
  if (is_from_server) {
    const offload::ServedRecord own = now;
    now = engine.server()->found().record;
    now.scale = own.scale, now.scaler_iteration = own.scaler_iteration;
    now.last_overflow = own.last_overflow, now.hysteresis = own.hysteresis;
  }
  publish_states(engine, now, trained.meta(data), trained.table.params);
}

}  // namespace

void Start::load(const Request& request, const RunData& data, Trained& trained) {
  engine::Engine& engine = *trained.engine;
  Communicator& world = engine.mesh().world();
  offload::ServerLink* const server = engine.server();
  if (server == nullptr || !load_from_server(request, data, trained)) {
    if (!step_dir.empty() && request.config.weights.any()) {
      check_same_run(request, data, CheckpointReader(step_dir).meta(), step_dir);
      load_weights(engine, step_dir);
      from = step_dir;
    } else if (!step_dir.empty()) {
      from_newest(request, &world, step_dir, [&] {
        trained.load_step(step_dir,
                          [&](const Manifest& there) { check_same_run(request, data, there.meta, step_dir); });
      });
      from = step_dir;
    } else if (weights.empty()) {
      engine.init_weights();
    } else {
      load_weights(engine, weights);
    }
  }
  if (server == nullptr) return;
  if (!is_from_server()) {
    const std::optional<i64> began = parse_step_name(std::filesystem::path(from).filename().string());
    trained.history =
        fmt::format("{}@{}", gather_text(world, random_hex64()).front(), began ? std::to_string(*began) : "");
  }
  publish_to_server(is_from_server(), data, trained);
}

// Whether the run goes on with the state that the server has: that of its last whole step. A step that was asked for by
// its name takes its place.
bool Start::load_from_server(const Request& request, const RunData& data, Trained& trained) {
  engine::Engine& engine = *trained.engine;
  offload::ServerLink& server = *engine.server();
  const RunOptions& options = request.options;
  using Has = offload::ServerLink::Has;
  const auto& [has, there, text, dir] = server.found();
  if (has == Has::Nothing) return false;
  const std::string name = fmt::format("server '{}'", server.name());
  if (!options.resume.empty() && options.resume != "latest") {
    if (request.is_root())
      log_message(LogLevel::Warning,
                  fmt::format("discarding the state of step {} on {}; resuming from {}", there.step, name, step_dir));
    server.clear();
    return false;
  }
  DS_CHECK(options.weights.empty(), Errc::Config,
           "--weights {}: {} holds the state of step {}, from which the run would resume; remove it first (ds-offload "
           "rm {})",
           options.weights, name, there.step, server.name());
  const std::optional<i64> saved = parse_step_name(std::filesystem::path(step_dir).filename().string());
  DS_CHECK(!saved || *saved <= there.step, Errc::Mismatch,
           "{} is newer than the state that {} has, which is of step {}: remove that (ds-offload rm {}), or say from "
           "which step to go on with --resume {}",
           step_dir, name, there.step, server.name(), step_dir);
  const CheckpointMeta meta_there = parse_meta(text, name);
  check_same_run(request, data, meta_there, name);
  // A step that was trained meanwhile without the server is another continuation of what both began from.
  if (saved) {
    std::string of_step = meta_there.history;
    try {
      of_step = CheckpointReader(step_dir).meta().history;
    } catch (const Error& e) {
      if (e.code() != Errc::Corrupt) throw;
      if (request.is_root())
        log_message(LogLevel::Warning, fmt::format("{}; resuming from the state of {}", e.what(), name));
    }
    DS_CHECK(of_step == meta_there.history || meta_there.history.ends_with(fmt::format("@{}", *saved)), Errc::Mismatch,
             "{} is not of the run whose state {} has: remove that state (ds-offload rm {}), or say from which step to "
             "go on with --resume {}",
             step_dir, name, server.name(), step_dir);
  }
  trained.history = meta_there.history;
  DS_CHECK(meta_there.optimizer == trained.table.optimizer || there.optimizer_step == 0, Errc::Mismatch,
           "{} has the state of {}, and this run updates by {}: set the optimizer to what it was, or remove that state "
           "(ds-offload rm {})",
           name, meta_there.optimizer, trained.table.optimizer, server.name());
  if (has == Has::Same) {
    engine.resume_from(there);
  } else {
    trained.load_step(dir, [&](const Manifest& of_server) { check_same_run(request, data, of_server.meta, dir); });
  }
  from = name;
  // A user who did not ask to resume may have meant a new run.
  if (request.is_root())
    log_message(options.resume.empty() ? LogLevel::Warning : LogLevel::Verbose,
                fmt::format("resuming from step {} of {}", there.step, name));
  return true;
}

void Start::check_step(const Request& request, const RunData& data, const engine::ParamTable& table) {
  from_newest(request, nullptr, step_dir, [&] {
    check_checkpoint(step_dir, table.params, table.optimizers,
                     [&](const Manifest& there) { check_same_run(request, data, there.meta, step_dir); });
  });
}

}  // namespace ds::run
