// SPDX-License-Identifier: Apache-2.0
// A run before its first step: what it will take; its ranks, data, directory and engine.

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
#include "checkpoint/run_lock.h"
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
  p.memory = engine::memory_table(planned.memory(), {}, planned.bounds);
  p.files = engine::memory_table(plan.files, {});
  p.total_bytes = planned.total_memory();
  p.process_bytes = planned.process.own;
  p.momentary_bytes = planned.process.momentary_of(ranks.rank);
  for (const auto& [name, count] : plan.traffic) p.comm_bytes[name] = count.bytes;
  p.mean_comm_bytes = plan.mean_traffic;
  p.most_comm_bytes = plan.most_traffic;
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
  if (!config.published.path.empty()) {
    const std::string path = std::filesystem::is_directory(config.published.path)
                                 ? config.published.path + "/config.json"
                                 : config.published.path;
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
  for (const std::string* input : {&options.config, &options.weights}) {
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
  if (writes()) stages = record->stages_json(*engine);
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
  data.train.check_width(config.model.vocab_size);
  if (data.validation) data.validation->check_width(config.model.vocab_size);
  if (is_root()) {
    std::vector<Remark> remarks = data.train.remarks();
    if (!config.data.validation.empty()) std::ranges::move(data.validation->remarks(), std::back_inserter(remarks));
    for (const Remark& remark : remarks) log_message(remark.level, remark.text);
  }
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
  if (is_root() && !options.read_only) warn_of_uneven_targets();
}

// The mean over micro-batches of their own means is that of one batch only where all have as many targets.
void TrainingRun::State::warn_of_uneven_targets() const {
  const BatchShape& shape = train_data->shape();
  const i64 replicas = shape.num_ranks / shape.workers, passes = config.batch.accumulation * replicas;
  if (config.loss.norm != LossNorm::Micro || passes == 1 || !train_data->has_uneven_targets()) return;
  constexpr i64 kMost = 32;  // micro-batches that are looked at, of as many steps as it takes
  const i64 rows = shape.micro * shape.seq_length;
  std::vector<i32> inputs(static_cast<size_t>(rows)), targets(static_cast<size_t>(rows));
  i64 least = rows, most = 0;
  for (i64 k = 0; k < kMost; ++k) {
    const i64 step = k / passes, pass = k % passes;
    train_data->load(step * passes * shape.micro * shape.workers, pass / replicas, pass % replicas, inputs, targets);
    const i64 count = rows - std::ranges::count(targets, kIgnoredTarget);
    least = std::min(least, count);
    most = std::max(most, count);
  }
  if (least == most) return;
  log_message(
      LogLevel::Warning,
      fmt::format("loss_norm \"micro\": the micro-batches of a step have different numbers of targets ({} to {} in the "
                  "first ones) but the same weight, so the loss is not that of the same samples in one batch; "
                  "loss_norm \"token\"{} gives each target the same weight",
                  least, most,
                  config.gradient_reduce == GradientReduce::Sum ? ", with gradient_allreduce_op \"mean\"," : ""));
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

void check_report(const std::string& file, std::string_view option, const Config& config, const RunOptions& options) {
  TrainingRun::State s;
  s.config = config;
  s.options = options;
  monitor::check_file(file, option, config, s.places());
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
    RunLock::check_free(options.out_dir);
    engine::RunDirectory::check(options.out_dir, options.resume, s.step_dir);
  }
  if (trains(config.use)) monitor::Monitors::check(config, s.places());
  if (!s.step_dir.empty()) {
    const engine::ParamTable table = engine::make_param_table(config, model, plan);
    CheckpointMeta meta;
    s.from_newest([&] { meta = check_checkpoint(s.step_dir, table.params, table.optimizers); });
    s.check_same_run(meta, s.step_dir);
  } else if (const std::string weights = s.find_weights(); !weights.empty()) {
    engine::check_weights(model, weights, config.published.new_head, s.is_root());
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
