// SPDX-License-Identifier: Apache-2.0
// What a run goes on from: weights, a step of its directory or a server's states, whatever layout made them; and what
// its own steps say for those that come.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>

#include "base/file.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/run_names.h"
#include "checkpoint/together.h"
#include "config/model_config.h"
#include "config/named_files.h"
#include "config/optimizer.h"
#include "config/trainer_output.h"
#include "ds/log.h"
#include "engine/connect.h"
#include "engine/host_state.h"
#include "engine/run_state.h"
#include "engine/served.h"
#include "engine/weights.h"

namespace ds {

// The step directory to go on from; empty: from the start.
std::string TrainingRun::State::find_resumed() const {
  if (options.resume.empty()) return "";
  std::error_code failed;
  if (options.resume != "latest") {
    std::error_code error;
    const std::filesystem::file_type type = std::filesystem::status(options.resume, error).type();
    DS_CHECK(type == std::filesystem::file_type::directory, Errc::Config, "--resume {}: {}", options.resume,
             type == std::filesystem::file_type::not_found ? "no such directory"
             : type == std::filesystem::file_type::none
                 ? error.message()
                 : "not a directory; a checkpoint is one, and --weights takes files");
    DS_CHECK(!is_deepspeed(options.resume), Errc::Unavailable,
             "--resume {}: a DeepSpeed checkpoint; make one of ours of it with ds-shard, or give it to --weights",
             options.resume);
    if (!is_checkpoint(options.resume)) {
      const std::string saves = trainer_checkpoints(options.resume);
      DS_CHECK(saves.empty(), Errc::Config,
               "--resume {}: Hugging Face's Trainer has saved {} in it, which hold weights but no state that a run "
               "resumes from: start from the weights of one with --weights",
               options.resume, saves);
      const std::vector<std::string> files = published_weights_in(options.resume);
      DS_CHECK(files.empty(), Errc::Config,
               "--resume {0}: holds {1}, weights but no state that a run resumes from: start from them with --weights "
               "{0}",
               options.resume, fmt::join(files, " and "));
      DS_CHECK(!std::filesystem::is_directory(options.resume), Errc::Config,
               "--resume {}: there is no checkpoint in this directory", options.resume);
    }
    return find_checkpoint(options.resume);
  }
  DS_CHECK(!options.out_dir.empty(), Errc::Config, "--resume latest goes on in the directory of --out: give one");
  // What cannot be listed may have a checkpoint.
  std::filesystem::directory_iterator entry(options.out_dir, failed), end;
  for (; !failed && entry != end; entry.increment(failed)) {
    const std::string name = entry->path().filename();
    if (name == kLatestName || name.starts_with(kStepPrefix)) return find_checkpoint(options.out_dir);
  }
  const bool none = failed == std::errc::no_such_file_or_directory || failed == std::errc::not_a_directory;
  DS_CHECK(!failed || none, Errc::Io, "cannot list {}: {}", options.out_dir, system_reason(failed.value()));
  DS_CHECK(!options.read_only, Errc::Config, "{} has no checkpoint", options.out_dir);
  // A first start of a command line that always says --resume latest: said, not silent.
  // A server may have a state, and says so.
  if (is_root() && config.zero.offload_optimizer.device != OffloadDevice::Server)
    log_message(LogLevel::Warning, fmt::format("{} has no checkpoint yet: starting from step 0", options.out_dir));
  return "";
}

// The weights to start from; empty: random ones.
std::string TrainingRun::State::find_weights() const {
  DS_CHECK(!config.published.new_head || !options.read_only, Errc::Config,
           "model.new_head: a head of random values has nothing to evaluate");
  if (!options.weights.empty()) {
    const std::string why = why_not_input({"--weights", options.weights, true});
    DS_CHECK(why.empty(), Errc::Config, "--weights: {} {}", options.weights, why);
    const bool is_model = !std::filesystem::is_directory(options.weights) || is_checkpoint(options.weights) ||
                          !published_weights_in(options.weights).empty();
    DS_CHECK(is_model, Errc::Config, "--weights {}: there is no {} in this directory, and no checkpoint{}",
             options.weights, fmt::join(kPublishedWeights, ", no "), trainer_hint(options.weights));
  }
  const std::string path = options.weights.empty() ? engine::published_weights(config.published.path) : options.weights;
  if (!path.empty()) {
    if (is_root() && !is_checkpoint(path)) warn_of_several_weights(path);
    return path;
  }
  DS_CHECK(
      !options.read_only, Errc::Config,
      "there are no weights to evaluate or to write text with: give --resume DIR or --weights FILE, or a model.path "
      "with model.safetensors");
  if (is_root() && std::filesystem::is_directory(config.published.path))
    log_message(LogLevel::Warning,
                fmt::format("model.path {} has no weights: the model starts from random ones", config.published.path));
  return "";
}

// Calls load(), which reads step_dir. Where that is damaged, a run that goes on from its own latest step takes the one
// before; whoever asked for one step, or only reads, gets the error.
void TrainingRun::State::from_newest(FunctionRef<void()> load) {
  for (;;) {
    try {
      return load();
    } catch (const Error& e) {
      if (e.code() != Errc::Corrupt || options.resume != "latest" || !writes()) throw;
      const auto before = [&] { return is_root() ? step_before(options.out_dir, step_dir) : std::string(); };
      const std::string older = mesh ? gather_text(mesh->world(), before()).front() : before();
      if (older.empty()) throw;
      if (is_root())
        log_message(LogLevel::Warning, fmt::format("{}; going on from the step before, {}", e.what(), older));
      step_dir = older;
    }
  }
}

void TrainingRun::State::load() {
  offload::ServerLink* const server = engine->server();
  if (server == nullptr || !load_from_server(*server)) {
    if (!step_dir.empty()) {
      from_newest([&] { load_step(step_dir); });
      from = step_dir;
    } else if (weights.empty()) {
      engine->init_weights();
    } else {
      engine::load_weights(*engine, weights);
    }
  }
  if (server == nullptr) return;
  if (!is_from_server()) {
    const std::optional<i64> began = parse_step_name(std::filesystem::path(from).filename().string());
    history =
        fmt::format("{}@{}", gather_text(mesh->world(), random_hex64()).front(), began ? std::to_string(*began) : "");
  }
  publish_to_server(*server);
}

// Whether the run goes on with the state that the server has: that of its last whole step. A step that was asked for by
// its name takes its place.
bool TrainingRun::State::load_from_server(offload::ServerLink& server) {
  using Has = offload::ServerLink::Has;
  const auto& [has, there, text, dir] = server.found();
  if (has == Has::Nothing) return false;
  const std::string name = fmt::format("server '{}'", server.name());
  if (!options.resume.empty() && options.resume != "latest") {
    if (is_root())
      log_message(LogLevel::Warning,
                  fmt::format("the state of step {} that {} has gives way to {}", there.step, name, step_dir));
    server.clear();
    return false;
  }
  DS_CHECK(
      options.weights.empty(), Errc::Config,
      "--weights {}: {} has the state of step {}, with which the run would go on; remove it first (ds-offload rm {})",
      options.weights, name, there.step, server.name());
  const std::optional<i64> saved = parse_step_name(std::filesystem::path(step_dir).filename().string());
  DS_CHECK(!saved || *saved <= there.step, Errc::Mismatch,
           "{} is newer than the state that {} has, which is of step {}: remove that (ds-offload rm {}), or say from "
           "which step to go on with --resume {}",
           step_dir, name, there.step, server.name(), step_dir);
  const CheckpointMeta meta_there = parse_meta(text, name);
  check_same_run(meta_there, name);
  // A step that was trained meanwhile without the server is another continuation of what both began from.
  if (saved) {
    std::string of_step = meta_there.history;
    try {
      of_step = CheckpointReader(step_dir).meta().history;
    } catch (const Error& e) {
      if (e.code() != Errc::Corrupt) throw;
      if (is_root()) log_message(LogLevel::Warning, fmt::format("{}; going on with the state of {}", e.what(), name));
    }
    DS_CHECK(of_step == meta_there.history || meta_there.history.ends_with(fmt::format("@{}", *saved)), Errc::Mismatch,
             "{} is not of the run whose state {} has: remove that state (ds-offload rm {}), or say from which step to "
             "go on with --resume {}",
             step_dir, name, server.name(), step_dir);
  }
  history = meta_there.history;
  DS_CHECK(meta_there.optimizer == table.optimizer || there.optimizer_step == 0, Errc::Mismatch,
           "{} has the state of {}, and this run updates by {}: set the optimizer to what it was, or remove that state "
           "(ds-offload rm {})",
           name, meta_there.optimizer, table.optimizer, server.name());
  if (has == Has::Same) {
    engine->go_on_from(there);
  } else {
    load_step(dir);
  }
  from = name;
  // Who did not ask to go on may have meant a new run.
  if (is_root())
    log_message(options.resume.empty() ? LogLevel::Warning : LogLevel::Verbose,
                fmt::format("going on from step {} of {}", there.step, name));
  return true;
}

void TrainingRun::State::publish_to_server(offload::ServerLink& server) {
  DS_CHECK(train_data != nullptr, Errc::Config, "data.train: there is nothing to train on");
  // What is known of the last step is the server's; the loss scale is that of this run, which may have another dtype.
  offload::ServedRecord now = engine->served_record();
  if (is_from_server()) {
    const offload::ServedRecord own = now;
    now = server.found().record;
    now.scale = own.scale, now.scaler_iteration = own.scaler_iteration;
    now.last_overflow = own.last_overflow, now.hysteresis = own.hysteresis;
  }
  engine::publish_states(*engine, now, meta(), table.params);
}

// The line of the last step, where the run was ended between its commit with the server and the line.
void TrainingRun::State::write_lost_line(i64 last_step) {
  if (!is_from_server()) return;
  const offload::ServedRecord& r = engine->server()->found().record;
  if (r.step == 0 || last_step != r.step - 1 || r.tokens == 0) return;
  append({{"type", "step"},
          {step_field::kStep, r.step},
          {step_field::kLoss, r.loss},
          {step_field::kGradNorm, r.grad_norm},
          {step_field::kLr, r.lr},
          {step_field::kLossScale, r.loss_scale},
          {step_field::kSkipped, r.skipped != 0},
          {step_field::kTokens, r.tokens},
          {step_field::kRecovered, true}});
}

void TrainingRun::State::load_step(const std::string& dir) {
  engine::HostState state(*engine, engine->held_pieces(), engine::HostState::Memory::InParts);
  std::set<std::string> rank_local;
  const CheckpointMeta meta = load_checkpoint(dir, engine->plan().work, table.params, state.pieces(), mesh->world(),
                                              table.optimizers, [&](const Manifest& there) {
                                                check_same_run(there.meta, dir);
                                                rank_local = there.rank_local_names();
                                              });
  state.upload();
  engine->publish_params();
  engine::Progress& progress = engine->progress();
  progress = {meta.step, meta.optimizer_step, meta.skipped_steps, meta.consumed_samples};
  const LossScalerState& s = meta.loss_scaler;
  if (meta.work_dtype == engine->plan().work)
    engine->scaler().restore({s.scale, s.iteration, s.last_overflow, s.hysteresis});
  set_optimizer_numbers(meta);
  engine->begin_outer();
  load_rank_local(dir, meta, rank_local);
  if (is_root()) {
    const std::string isa(device->name());
    if (meta.isa != isa && !meta.isa.empty()) {
      log_message(
          LogLevel::Warning,
          fmt::format("{} was made with {}, this machine runs {}: results agree, bits may not", dir, meta.isa, isa));
    }
    if (engine->plan().dp().layout.options().block > 1 && meta.mesh && meta.mesh->tp != mesh->shape().tp)
      log_message(
          LogLevel::Warning,
          fmt::format("{} was made with tensor_parallel.tp_size {}, this run has {}: the blocks of 8-bit states "
                      "are others, and are encoded again",
                      dir, meta.mesh->tp, mesh->shape().tp));
  }
}

// Of a stage of a pipeline these are the numbers of its own layers alone: the largest bits of all are what some have.
std::map<std::string, std::vector<double>> TrainingRun::State::optimizer_numbers() {
  std::map<std::string, std::vector<double>> named;
  const optim::Groups& groups = engine->plan().groups;
  std::vector<i64> bits;
  const std::vector<std::span<double>> own = engine->optimizer_numbers();
  for (size_t p = 0; p < own.size(); ++p) {
    const i64 each = groups.groups[groups.of_params[p]].numbers_per_param();
    for (i64 i = 0; i < each; ++i) bits.push_back(own[p].empty() ? 0 : std::bit_cast<i64>(own[p][i]));
  }
  if (bits.empty()) return named;
  mesh->world().all_reduce(bits.data(), std::ssize(bits), DType::I64, ReduceOp::Max, "dp.stats").wait();
  size_t at = 0;
  for (size_t p = 0; p < own.size(); ++p) {
    const i64 each = groups.groups[groups.of_params[p]].numbers_per_param();
    for (i64 i = 0; i < each; ++i) named[table.params[p].name].push_back(std::bit_cast<double>(bits[at++]));
  }
  return named;
}

void TrainingRun::State::set_optimizer_numbers(const CheckpointMeta& meta) {
  if (meta.optimizer_step == 0) return;
  const std::vector<std::span<double>> own = engine->optimizer_numbers();
  for (size_t p = 0; p < own.size(); ++p) {
    if (!own[p].empty()) std::ranges::copy(meta.optimizer_numbers.at(table.params[p].name), own[p].begin());
  }
}

namespace {

// What ranks have of their own beside states, by its names in a step.
std::string named_for_people(const std::set<std::string>& names) {
  bool errors = false, steps = false, workers = false;
  for (const std::string& name : names) {
    const bool of_errors = name.find("_error") != name.npos, of_group = name.find('@') != name.npos;
    (of_errors ? errors : of_group ? steps : workers) = true;
  }
  std::vector<std::string_view> what;
  if (errors) what.push_back("compression had lost");
  if (steps) what.push_back("ranks' own steps had made");
  if (workers) what.push_back("workers of diloco had of their own");
  return fmt::format("{}", fmt::join(what, " and "));
}

}  // namespace

// What ranks of the same layout kept beside states. Others begin without, and so does who has no use for it: it is
// said.
void TrainingRun::State::load_rank_local(const std::string& dir, const CheckpointMeta& meta,
                                         const std::set<std::string>& there) {
  if (!engine->plan().trains() || (!engine->has_rank_local() && there.empty())) return;
  const auto wanted = engine->has_rank_local() ? engine->rank_local() : update::SignAverage::RankLocal();
  std::optional<CheckpointReader> reader;
  i64 fits = meta.layout_id == engine->plan().dp().layout.id() && meta.mesh == mesh->shape() ? 1 : 0;
  together(mesh->world(), [&] {
    reader.emplace(dir);
    const auto is_there = [&](const auto& array) {
      return reader->has_rank_local(ranks.rank, array.first, array.second.numel());
    };
    if (fits == 1 && !std::ranges::all_of(wanted, is_there)) fits = 0;
  });
  mesh->world().all_reduce(&fits, 1, DType::I64, ReduceOp::Min, "dp.stats").wait();
  i64 lost = fits == 0 ? 1 : 0;
  if (fits == 1) {
    together(mesh->world(), [&] {
      std::vector<float> copy;
      for (const auto& [name, view] : wanted) {
        copy.resize(static_cast<size_t>(view.numel()));
        reader->read_rank_local(ranks.rank, name, copy);
        device->upload(view.data, copy.data(), view.bytes());
      }
    });
    if (engine->has_rank_local()) engine->rank_local_was_set();
    const auto is_wanted = [&](const RankLocalRecord& r) {
      return std::ranges::any_of(wanted, [&](const auto& w) { return w.first == r.name; });
    };
    lost = !std::ranges::all_of(reader->manifest().files[static_cast<size_t>(ranks.rank)].rank_local, is_wanted);
    mesh->world().all_reduce(&lost, 1, DType::I64, ReduceOp::Max, "dp.stats").wait();
  }
  if (lost == 0 || !is_root()) return;
  if (!there.empty())
    return log_message(LogLevel::Warning,
                       fmt::format("{} was made by another layout of ranks, or with another optimizer, or other "
                                   "intervals or groups of it: what {} there is lost",
                                   dir, named_for_people(there)));
  std::set<std::string> names;
  for (const auto& [name, view] : engine->rank_local()) names.insert(name);
  if (config.optimizer.diloco.workers > 1) names.insert("worker");
  log_message(LogLevel::Warning,
              fmt::format("{} holds nothing that {}: the run begins without", dir, named_for_people(names)));
}

// A run goes on with the samples and the dropout that it began with.
void TrainingRun::State::check_same_run(const CheckpointMeta& meta, const std::string& source) const {
  if (!meta.model_config_json.empty()) check_same_model(Json::parse(meta.model_config_json), config.model, source);
  // A step that another program made says nothing of it.
  if (const std::string now = engine::attention_identity(config); meta.seed || !meta.attention_json.empty()) {
    const auto said = [](const std::string& what) {
      return what.empty() ? "no sparse_attention and no documents" : what;
    };
    DS_CHECK(meta.attention_json == now, Errc::Mismatch,
             "{}: a checkpoint of another attention: {} there and {} here; --weights takes its weights alone", source,
             said(meta.attention_json), said(now));
  }
  if (train_data && !options.read_only && !meta.data_json.empty())
    check_same_data(parse_data_identity(meta.data_json), train_data->identity());
  if ((options.read_only || !train_data) && config.model.causal() && !meta.data_json.empty()) {
    const std::string saved = parse_data_identity(meta.data_json).tokenizer;
    const std::string now =
        train_data ? train_data->identity().tokenizer : open_tokenizer(config.data.tokenizer)->identity();
    DS_CHECK(saved.empty() || is_same_tokenizer(saved, now), Errc::Mismatch,
             "data.tokenizer is {}, but {} was trained with {}", now, source, saved);
  }
  if (options.read_only) return;  // which has neither dropout nor samples that go on
  DS_CHECK(meta.seed.value_or(static_cast<u32>(config.seed)) == static_cast<u32>(config.seed), Errc::Mismatch,
           "{} was made with seed {}, this run has {}", source, *meta.seed, config.seed);
  if (meta.step > 0 && (meta.data_json.empty() || !meta.seed) && is_root())
    log_message(LogLevel::Warning, fmt::format("{} was converted, and does not know the data and the seed of its run: "
                                               "going on with those of this configuration",
                                               source));
}

CheckpointMeta TrainingRun::State::meta() const {
  const engine::Progress& progress = engine->progress();
  const LossScaler::State& s = engine->scaler().state();
  CheckpointMeta meta;
  meta.step = progress.step;
  meta.work_dtype = engine->plan().work;
  meta.layout_id = engine->plan().dp().layout.id();
  meta.zero_stage = narrow<int>(config.zero.stage);
  meta.mesh = mesh->shape();
  meta.consumed_samples = progress.consumed_samples;
  meta.seed = static_cast<u32>(config.seed);
  meta.loss_scaler = {s.scale, s.iteration, s.last_overflow, s.hysteresis};
  meta.skipped_steps = progress.skipped_steps;
  meta.optimizer_step = progress.optimizer_step;
  meta.optimizer = table.optimizer;
  meta.history = history;
  meta.isa = device->name();
  meta.attention_json = engine::attention_identity(config);
  meta.config_json = engine::compact_json(resolved_json(engine::with_absolute_paths(config)));
  meta.model_config_json = model_json;
  meta.data_json = engine::compact_json(data_identity_json(train_data->identity()));
  return meta;
}

}  // namespace ds
