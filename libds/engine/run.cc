// SPDX-License-Identifier: Apache-2.0
// A run before its first step: what it will take; its ranks, data, directory and engine; what it goes on from.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <optional>

#include "base/file.h"
#include "checkpoint/deepspeed.h"
#include "checkpoint/manifest.h"
#include "checkpoint/reader.h"
#include "checkpoint/run_names.h"
#include "checkpoint/together.h"
#include "config/model_config.h"
#include "config/optimizer.h"
#include "data/objective.h"
#include "data/tokenizer.h"
#include "ds/log.h"
#include "ds/units.h"
#include "engine/connect.h"
#include "engine/host_state.h"
#include "engine/run_state.h"
#include "engine/served.h"
#include "engine/weights.h"
#include "probe/host.h"

namespace ds {
namespace {

RunPrediction predict_on(const Device& device, engine::Plans& plans, const RankInfo& ranks) {
  const Config& config = plans.config();
  const engine::WholePlan& planned = *plans.of(ranks.rank);
  const model::Model& model = planned.model;
  const report::RunPlan& plan = planned.plan;
  RunPrediction p;
  p.stages = engine::plan_stages(plans);
  p.bubble_fraction = engine::bubble_fraction(config);
  p.num_params = model.num_params();
  p.flops_per_token = model.flops_per_token(config.data.seq_length);
  p.memory = engine::memory_table(planned.memory(), {});
  p.files = engine::memory_table(plan.files, {});
  p.total_bytes = planned.total_memory();
  p.process_bytes = planned.process.own;
  p.momentary_bytes = planned.process.momentary_of(ranks.rank);
  for (const auto& [name, count] : plan.traffic) p.comm_bytes[name] = count.bytes;
  p.mean_comm_bytes = plan.mean_traffic;
  p.host_bytes = device.is_host() ? 0 : plan.memory[static_cast<size_t>(Tag::Host)];
  const probe::AvailableMemory node = probe::available_memory();
  p.available_bytes = device.is_host() ? node.bytes : device.memory().free;
  p.limited_by = device.is_host() ? node.limited_by : fmt::format("free on {}", device.name());
  p.device = device.is_host() ? "cpu" : "cuda";
  // Of the ranks of the node, every so many'th has the memory that this one has.
  const int first = ranks.rank - ranks.local_rank;
  std::string ignored;
  const int places = device.is_host() ? 1 : num_cuda_devices(ignored);
  p.sharers = device.is_host() ? ranks.local_world_size : engine::ranks_on_gpu(ranks, places);
  p.needed_bytes = engine::plan_memory(plans, first + ranks.local_rank % places, p.sharers, places).device;
  return p;
}

}  // namespace

RunPrediction predict_run(const Config& config, const RankInfo& ranks, const EncodedPrompts* writing) {
  const std::unique_ptr<Device> device = engine::open_device(config, ranks);
  engine::Plans plans(config, report::mesh_shape(config, ranks.world_size), device->kind(), ranks.local_world_size,
                      writing);
  return predict_on(*device, plans, ranks);
}

namespace {

// The published config.json, where the model comes from one, with all that we make of it: what it says beside the shape
// of the model (its begin and end tokens, say) stays with the weights.
std::string published_config(const Config& config) {
  constexpr i64 kMaxConfig = i64{1} << 20;
  Json json = Json::object();
  if (!config.model_path.empty()) {
    const std::string path =
        std::filesystem::is_directory(config.model_path) ? config.model_path + "/config.json" : config.model_path;
    json = parse_json(read_text_file(path, kMaxConfig, Errc::Config), path, {.places = false}).root;
  }
  return publish_model(json, config.model).dump();
}

}  // namespace

namespace {

void check_memory(const Device& device, engine::Plans& plans, const RankInfo& ranks) {
  const RunPrediction p = predict_on(device, plans, ranks);
  const bool on_cpu = device.is_host();
  if (p.needed_bytes > p.available_bytes) {
    std::string message =
        fmt::format("this run needs {} on this {} ({} rank{}), {} are there ({}); rank {}:", bytes_text(p.needed_bytes),
                    on_cpu ? "node" : "GPU", p.sharers, p.sharers == 1 ? "" : "s", bytes_text(p.available_bytes),
                    p.limited_by, ranks.rank);
    for (const TagMemory& row : p.memory)
      message += fmt::format("\n  {:<12} {:>14}", row.tag, bytes_text(row.predicted));
    throw Error(Errc::OutOfMemory, message);
  }
  const probe::AvailableMemory node = probe::available_memory();
  const i64 host =
      on_cpu ? 0 : engine::plan_memory(plans, ranks.rank - ranks.local_rank, ranks.local_world_size, 1).host;
  DS_CHECK(host <= node.bytes, Errc::OutOfMemory,
           "the {} ranks of this node need {} of its memory beside their GPUs, for checkpoints and for inputs that "
           "layers keep there, and {} are there ({})",
           ranks.local_world_size, bytes_text(host), bytes_text(node.bytes), node.limited_by);
}

}  // namespace

// Where this run reads, and may not write.
monitor::Places TrainingRun::State::places() const {
  monitor::Places p;
  p.run_directory = options.out_dir;
  p.resumed = options.resume == "latest" ? options.out_dir : options.resume;
  for (const std::string* input :
       {&options.config, &options.weights, &config.model_path, &config.data.tokenizer, &config.cuda.autotune_file}) {
    if (!input->empty()) p.inputs.push_back(*input);
  }
  return p;
}

void TrainingRun::State::open() {
  device = engine::open_device(config, ranks);
  plans.emplace(config, report::mesh_shape(config, ranks.world_size), device->kind(), ranks.local_world_size,
                options.writing);
  check_memory(*device, *plans, ranks);
  const report::RunPlan& own = plans->of(ranks.rank)->plan;
  DS_CHECK(own.offload.states.device != OffloadDevice::Server || ranks.local_world_size == ranks.world_size,
           Errc::Unavailable, "{} ranks of {} are on this node: a server has the states of a run on one node",
           ranks.local_world_size, ranks.world_size);
  offload::check_places(own.offload, own.files, ranks.local_world_size);
  if (!options.trace.empty()) {
    trace = std::make_unique<Trace>();
    if (is_root()) monitor::check_file(options.trace, "--trace", plans->config(), places());
  }
  mesh = engine::make_mesh(*plans, ranks, *device, trace.get());
  backend = mesh->dp().backend();
  if (is_root()) {
    std::string why;
    if (device->is_host() && config.device == DeviceKind::Auto && num_cuda_devices(why) == 0)
      log_message(LogLevel::Verbose, fmt::format("device \"auto\" takes the CPU: {}", why));
    log_message(LogLevel::Verbose, fmt::format("device: {}; communication: {}", device->name(), backend));
  }
  open_data(mesh->data_size());
  check_same_files();
  // Rank 0 looks: all go on from the same step, and what is wrong with others is said once.
  step_dir = gather_text(mesh->world(), is_root() ? find_resumed() : "").front();
  if (step_dir.empty()) weights = find_weights();
  if (writes() && is_root()) engine::RunDirectory::check(options.out_dir, options.resume, step_dir);
  if (trains(config.use) && is_root()) monitor::Monitors::check(config, places());
  // Before anything else is there: the product that measures the device has memory of its own for its time.
  if (!options.read_only) peak_flops = probe::matmul_rate(*device, config.work_dtype());
  record = std::make_unique<engine::RunRecord>(*mesh, *device);
  if (is_root() && engine::trains_nothing(plans->of(ranks.rank)->plan))
    log_message(LogLevel::Warning, "optimizer.param_groups: every parameter is frozen: the run trains nothing");
  engine = std::make_unique<engine::Engine>(
      config, *mesh, ledger, *device,
      engine::EngineParts{
          .planned = plans->of(ranks.rank), .host_threads = engine::thread_count(config, ranks), .trace = trace.get()});
  if (const std::string caveat = engine->offload().caveat(); is_root() && !caveat.empty())
    log_message(LogLevel::Warning, caveat);
  table = engine::make_param_table(config, engine->model(), engine->plan());
  model_json = published_config(config);
  load();
  take_directory();
  if (directory) stages = engine::stages_json(*plans, *mesh, *device);
  plans.reset();  // the engine has its own
}

// Last: a run that does not start leaves nothing behind.
void TrainingRun::State::take_directory() {
  if (writes() && is_root()) {
    directory = std::make_unique<engine::RunDirectory>(options.out_dir, options.resume, step_dir);
    const engine::RunDirectory::Kept kept = directory->cut_metrics(engine->progress().step);
    evaluated_before = kept.evaluated;
    write_lost_line(kept.last_step);
  }
  mesh->world().barrier("dp.stats");  // nobody trains before the directory is ours
  saver = std::make_unique<engine::Saver>(*engine, writes() ? options.out_dir : "", directory.get(), table.params,
                                          [this](const Json& line) { append(line); });
  if (!step_dir.empty())
    saver->resumed_from(
        step_dir,
        parse_step_name(std::filesystem::path(step_dir).filename().string()).value_or(engine->progress().step));
}

void TrainingRun::State::open_data(i64 num_ranks) {
  if (config.data.train.empty()) return;  // generation needs none
  // Files of tokens need it first when the run writes text: the mistake is told now.
  std::error_code ignored;
  DS_CHECK(config.data.tokenizer == "bytes" || std::filesystem::exists(config.data.tokenizer, ignored), Errc::Config,
           "data.tokenizer '{}': no such file or directory", config.data.tokenizer);
  // Masking alone asks for the tokenizer's special tokens.
  const auto tokenizer = config.model.causal() ? nullptr : open_tokenizer(config.data.tokenizer);
  const std::shared_ptr<const Objective> objective = make_objective(config.model, config.data, tokenizer.get());
  Dataset data = open_dataset(config.data, *objective, engine::thread_count(config, ranks));
  const BatchShape shape{.micro = config.batch.micro,
                         .num_ranks = num_ranks,
                         .seq_length = config.data.seq_length,
                         .workers = config.optimizer.diloco.workers,
                         .micro_batches = config.batch.accumulation};
  const u32 seed = static_cast<u32>(config.data.seed);
  train_data = std::make_unique<BatchLoader>(std::move(data.train), shape, seed, config.model.vocab_size, objective,
                                             config.data.weights);
  if (data.validation) {
    validation_data =
        std::make_unique<BatchLoader>(std::move(*data.validation), shape, seed, config.model.vocab_size, objective);
  }
}

// Stages and parts of a sequence read the same samples, each for itself.
void TrainingRun::State::check_same_files() {
  std::string mine;
  if (train_data) {
    DataIdentity identity = train_data->identity();
    for (FileFingerprint& file : identity.files) file.name.clear();  // files may be found elsewhere
    mine = data_identity_json(identity);
  }
  const std::vector<std::string> all = gather_text(mesh->world(), mine);
  for (size_t r = 1; r < all.size(); ++r)
    DS_CHECK(all[r] == all[0], Errc::Config,
             "data.train: rank {} reads other data than rank 0, or with another tokenizer: all ranks of a run read the "
             "same files",
             r);
}

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
  DS_CHECK(!config.new_head || !options.read_only, Errc::Config,
           "model.new_head: a head of random values has nothing to evaluate");
  if (!options.weights.empty()) return options.weights;
  const std::string published = engine::published_weights(config.model_path);
  if (!published.empty()) return published;
  DS_CHECK(
      !options.read_only, Errc::Config,
      "there are no weights to evaluate or to write text with: give --resume DIR or --weights FILE, or a model.path "
      "with model.safetensors");
  if (is_root() && std::filesystem::is_directory(config.model_path))
    log_message(LogLevel::Warning,
                fmt::format("model.path {} has no weights: the model starts from random ones", config.model_path));
  return "";
}

// Calls load(), which reads step_dir. Where that is damaged, a run that goes on from its own latest step takes the one
// before; whoever asked for one step, or only reads, gets the error.
template <class F>
auto TrainingRun::State::from_newest(F&& load) {
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
    log_message(options.resume.empty() ? LogLevel::Warning : LogLevel::Info,
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
  const CheckpointMeta meta =
      load_checkpoint(dir, engine->plan().work, table.params, state.pieces(), mesh->world(), table.optimizers,
                      [&](const CheckpointMeta& there) { check_same_run(there, dir); });
  state.upload();
  engine->publish_params();
  engine::Progress& progress = engine->progress();
  progress = {meta.step, meta.optimizer_step, meta.skipped_steps, meta.consumed_samples};
  const LossScalerState& s = meta.loss_scaler;
  if (meta.work_dtype == engine->plan().work)
    engine->scaler().restore({s.scale, s.iteration, s.last_overflow, s.hysteresis});
  set_param_numbers(meta, dir);
  engine->begin_outer();
  load_rank_local(dir, meta);
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
std::map<std::string, std::vector<double>> TrainingRun::State::param_numbers() {
  std::map<std::string, std::vector<double>> named;
  const optim::Groups& groups = engine->plan().groups;
  std::vector<i64> bits;
  const std::vector<std::span<double>> own = engine->param_numbers();
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

void TrainingRun::State::set_param_numbers(const CheckpointMeta& meta, const std::string& dir) {
  if (meta.optimizer_step == 0) return;
  const optim::Groups& groups = engine->plan().groups;
  const std::vector<std::span<double>> own = engine->param_numbers();
  for (size_t p = 0; p < own.size(); ++p) {
    const i64 each = groups.groups[groups.of_params[p]].numbers_per_param();
    if (each == 0) continue;
    const auto there = meta.param_numbers.find(table.params[p].name);
    DS_CHECK(there != meta.param_numbers.end() && std::ssize(there->second) == each, Errc::Mismatch,
             "{}: holds no optimizer_numbers of '{}', which {} needs", dir, table.params[p].name,
             optimizer_name(config.optimizer.type));
    if (!own[p].empty()) std::ranges::copy(there->second, own[p].begin());
  }
}

// What ranks of the same layout kept beside states. Others begin without, and so does who has no use for it: it is
// said.
void TrainingRun::State::load_rank_local(const std::string& dir, const CheckpointMeta& meta) {
  if (!engine->plan().trains()) return;
  const auto wanted = engine->has_rank_local() ? engine->rank_local() : update::SignAverage::RankLocal();
  const auto is_wanted = [&](const RankLocalRecord& r) {
    return std::ranges::any_of(wanted, [&](const auto& w) { return w.first == r.name; });
  };
  std::optional<CheckpointReader> reader;
  i64 fits = meta.layout_id == engine->plan().dp().layout.id() && meta.mesh == mesh->shape() ? 1 : 0, lost = 0;
  together(mesh->world(), [&] {
    reader.emplace(dir);
    const auto is_there = [&](const auto& array) {
      return reader->has_rank_local(ranks.rank, array.first, array.second.numel());
    };
    if (fits == 1 && !std::ranges::all_of(wanted, is_there)) fits = 0;
  });
  mesh->world().all_reduce(&fits, 1, DType::I64, ReduceOp::Min, "dp.stats").wait();
  const std::vector<FileRecord>& files = reader->manifest().files;
  together(mesh->world(), [&] {
    std::vector<float> copy;
    for (const auto& [name, view] : wanted) {
      if (fits == 0) break;
      copy.resize(static_cast<size_t>(view.numel()));
      reader->read_rank_local(ranks.rank, name, copy);
      device->upload(view.data, copy.data(), view.bytes());
    }
    if (fits == 1)
      lost = !std::ranges::all_of(files[static_cast<size_t>(ranks.rank)].rank_local, is_wanted);
    else
      lost = !wanted.empty() || std::ranges::any_of(files, [](const FileRecord& f) { return !f.rank_local.empty(); });
  });
  if (fits == 1 && engine->has_rank_local()) engine->rank_local_was_set();
  mesh->world().all_reduce(&lost, 1, DType::I64, ReduceOp::Max, "dp.stats").wait();
  if (lost == 0 || !is_root()) return;
  bool any = false, errors = false, steps = false, workers = false;
  for (const FileRecord& f : files) {
    for (const RankLocalRecord& r : f.rank_local) {
      any = true;
      const bool of_errors = r.name.find("_error") != r.name.npos,
                 of_steps = r.name.find('@') != r.name.npos;  // of a group: what is no error of 0/1 Adam's ranks
      (of_errors ? errors : of_steps ? steps : workers) = true;
    }
  }
  constexpr std::string_view kErrors = "compression had lost", kWorkers = "workers of diloco had of their own";
  if (!any)
    return log_message(LogLevel::Warning, fmt::format("{} holds nothing that {}: the run begins without", dir,
                                                      config.optimizer.diloco.enabled ? kWorkers : kErrors));
  std::vector<std::string_view> what;
  if (errors) what.push_back(kErrors);
  if (steps) what.push_back("ranks' own steps had made");
  if (workers) what.push_back(kWorkers);
  log_message(LogLevel::Warning, fmt::format("{} was made by another layout of ranks, or with another optimizer, or "
                                             "other intervals or groups of it: what {} there is lost",
                                             dir, fmt::join(what, " and ")));
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
    DS_CHECK(saved.empty() || saved == now, Errc::Mismatch, "data.tokenizer is {}, but {} was trained with {}", now,
             source, saved);
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

// A run that goes on when it cannot save goes on when it cannot write a line either: on a full disk these are one.
void TrainingRun::State::append(const Json& line) {
  if (!directory) return;
  directory->check_ours();
  tell([&] { directory->append_metrics(line); }, lines_lost);
}

void TrainingRun::State::tell(const std::function<void()>& write, bool& said) {
  try {
    write();
  } catch (const Error& e) {
    if (config.save.on_error == SaveFailure::Stop) throw;
    if (!std::exchange(said, true)) log_message(LogLevel::Warning, e.what());
  }
}

void TrainingRun::State::record_step(const StepRecord& taken) {
  append(engine::step_line(taken));
  tell([&] { monitors.step(taken); }, monitors_lost);
}

void TrainingRun::State::record_validation(i64 step, double loss) {
  append({{"type", "eval"}, {"step", step}, {"val_loss", loss}});
  tell([&] { monitors.validation(step, loss); }, monitors_lost);
}

void TrainingRun::check(const Config& config, const RankInfo& ranks, const RunOptions& options) {
  State s;
  s.config = config;
  s.ranks = ranks;
  s.options = options;
  const MeshShape mesh = report::mesh_shape(config, ranks.world_size);
  const report::Planned planned(config, mesh, ranks.rank, engine::resolve_device(config));
  const auto& [model, plan] = planned;
  offload::check_places(plan.offload, plan.files, ranks.local_world_size);
  s.open_data(plan.mesh.data_size());
  s.step_dir = s.find_resumed();
  if (s.writes()) {
    engine::RunDirectory::check_free(options.out_dir);
    engine::RunDirectory::check(options.out_dir, options.resume, s.step_dir);
  }
  if (trains(config.use)) monitor::Monitors::check(config, s.places());
  if (!s.step_dir.empty()) {
    const engine::ParamTable table = engine::make_param_table(config, model, plan);
    const CheckpointMeta meta =
        s.from_newest([&] { return check_checkpoint(s.step_dir, table.params, table.optimizers); });
    s.check_same_run(meta, s.step_dir);
  } else if (const std::string weights = s.find_weights(); !weights.empty()) {
    engine::check_weights(model, weights, config.new_head);
  }
}

TrainingRun::TrainingRun(const Config& config, const RankInfo& ranks, const RunOptions& options)
    : state_(std::make_unique<State>()) {
  state_->config = config;
  state_->ranks = ranks;
  state_->options = options;
  if (options.read_only && trains(config.use)) state_->config.use = ConfigUse::Evaluate;
  if (!state_->writes()) state_->config.save.async = false;  // no snapshot, so no memory for one
  state_->collective([&] { state_->open(); });
}

TrainingRun::~TrainingRun() = default;

i64 TrainingRun::step() const noexcept { return state_->engine->progress().step; }
const std::string& TrainingRun::backend() const noexcept { return state_->backend; }

}  // namespace ds
