// SPDX-License-Identifier: Apache-2.0
// A run before its first step: its ranks, data, engine and directory.

#include <fmt/format.h>

#include <filesystem>
#include <optional>
#include <utility>

#include "base/file.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/run_lock.h"
#include "checkpoint/run_names.h"
#include "checkpoint/together.h"
#include "comm/message_tag.h"
#include "config/model_config.h"
#include "ds/log.h"
#include "mesh/from_config.h"
#include "probe/host.h"
#include "run/connect.h"
#include "run/gpu_kernels.h"
#include "run/predict.h"
#include "run/run_state.h"
#include "run/weights.h"

namespace ds {
namespace {

// The published config.json, where the model comes from one, with the model's keys as this library writes them: keys
// that do not describe the shape of the model, such as begin and end tokens, stay with the weights.
std::string published_config(const Config& config) {
  constexpr i64 kMaxConfig = i64{1} << 20;
  Json json = Json::object();
  if (const std::string& model = config.published.path; !model.empty()) {
    const std::string path = std::filesystem::is_directory(model) ? model + "/config.json" : model;
    const std::string stored = stored_config(path);
    const std::string text = stored.empty() ? read_text_file(path, kMaxConfig, Errc::Config) : stored;
    json = parse_json(text, path, {.places = false}).root;
  }
  return publish_model(json, config.model).dump();
}

// The line of the last step, where the run was ended after its commit with the server and before the line.
void write_lost_line(const offload::ServedRecord& r, i64 last_step, run::Journal& journal) {
  if (r.step == 0 || last_step != r.step - 1 || r.tokens == 0) return;
  const StepRecord lost{.step = r.step,
                        .loss = r.loss,
                        .grad_norm = r.grad_norm,
                        .lr = r.lr,
                        .loss_scale = r.loss_scale,
                        .skipped = r.skipped != 0,
                        .tokens = r.tokens};
  journal.append(run::step_line(lost, /*recovered=*/true));
}

}  // namespace

// Ranks first, then what a run reads, then memory, and the directory last: a run that does not start writes nothing.
void TrainingRun::State::open() {
  const auto& [config, ranks, options] = request;
  device = run::open_device(config, ranks);
  if (options.draft) run::check_draft(config, *options.draft);
  run::Plans plans(config, mesh_shape(config, ranks.world_size), device->kind(), ranks.local_world_size,
                   device->gpu_kernels(), options.session, options.draft ? &*options.draft : nullptr);
  run::check_memory(*device, plans, ranks);
  const plan::RunPlan& own = plans.of(ranks.rank)->plan;
  DS_CHECK(own.offload.states.device != OffloadDevice::Server || ranks.local_world_size == ranks.world_size,
           Errc::Unavailable, "{} ranks of {} are on this node: a server has the states of a run on one node",
           ranks.local_world_size, ranks.world_size);
  offload::check_places(own.offload, own.memory.files, ranks.local_world_size);
  if (!options.trace.empty()) {
    trace = std::make_unique<Trace>();
    if (request.is_root()) monitor::check_file(options.trace, "--trace", config, request.places());
  }
  mesh = run::make_mesh(plans, ranks, *device, trace.get());
  run::choose_attention(config, plans.of(ranks.rank)->model, own, *device, mesh->world(), request.is_root());
  if (request.is_root()) {
    std::string why;
    if (device->is_host() && config.device == DeviceKind::Auto && num_cuda_devices(why) == 0)
      log_message(LogLevel::Verbose, fmt::format("device \"auto\" takes the CPU: {}", why));
    log_message(LogLevel::Verbose, fmt::format("device: {}; communication: {}", device->name(), mesh->dp().backend()));
  }
  data = run::open_data(request, mesh->data_size());
  run::check_same_files(data, mesh->world());
  // Rank 0 looks: all resume from the same step, and what is wrong with others is reported once.
  start.step_dir = gather_text(mesh->world(), request.is_root() ? request.find_step() : "").front();
  if (start.step_dir.empty()) start.weights = request.find_weights();
  if (request.writes() && request.is_root()) run::RunDirectory::check(options.out_dir, options.resume, start.step_dir);
  if (trains(config.use) && request.is_root()) monitor::Monitors::check(config, request.places());
  // The product that measures the device needs memory of its own, so it runs before the engine takes any.
  const double peak_flops = options.read_only ? 0 : probe::matmul_rate(*device, config.work_dtype());
  record = std::make_unique<run::RunRecord>(*mesh, *device, peak_flops);
  if (request.is_root() && run::trains_nothing(own))
    log_message(LogLevel::Warning, "optimizer.param_groups: every parameter is frozen: the run trains nothing");
  trained.engine = std::make_unique<engine::Engine>(
      config, *mesh, ledger, *device,
      engine::EngineParts{
          .planned = plans.of(ranks.rank), .host_threads = run::thread_count(config, ranks), .trace = trace.get()});
  if (const std::string caveat = engine().offload().caveat(); request.is_root() && !caveat.empty())
    log_message(LogLevel::Warning, caveat);
  trained.table = engine::make_param_table(config, engine().model(), engine().plan());
  trained.model_json = published_config(config);
  start.load(request, data, trained);
  if (options.draft) {
    run::check_same_kernels(*device, mesh->world());
    draft = std::make_unique<run::Draft>(*options.draft, ranks, plans.draft(), ledger, *device);
  }
  take_directory();
  if (request.writes()) record->gather_stages(engine());
}

void TrainingRun::State::take_directory() {
  const RunOptions& options = request.options;
  const i64 step = engine().progress().step;
  if (request.writes() && request.is_root()) {
    auto directory = std::make_unique<run::RunDirectory>(options.out_dir, options.resume, start.step_dir);
    const run::RunDirectory::Kept kept = directory->cut_metrics(step);
    start.evaluated_before = kept.evaluated;
    journal.open(std::move(directory));
    if (start.is_from_server()) write_lost_line(engine().server()->found().record, kept.last_step, journal);
  }
  mesh->world().barrier(kStatsText);  // nobody trains before the directory is ours
  saver = std::make_unique<run::Saver>(engine(), request.writes() ? options.out_dir : "", journal.directory(),
                                       trained.table.params, [this](const Json& line) { journal.append(line); });
  if (const std::string& dir = start.step_dir; !dir.empty())
    saver->resumed_from(dir, parse_step_name(std::filesystem::path(dir).filename().string()).value_or(step));
}

void check_report(const std::string& file, std::string_view option, const Config& config, const RunOptions& options) {
  monitor::check_file(file, option, config, run::Request{config, {}, options}.places());
}

RunDocuments TrainingRun::check(const Config& config, const RankInfo& ranks, const RunOptions& options) {
  const run::Request request{config, ranks, options};
  const plan::Planned planned(config, mesh_shape(config, ranks.world_size), ranks.rank, run::resolve_device(config));
  const auto& [model, plan] = planned;
  offload::check_places(plan.offload, plan.memory.files, ranks.local_world_size);
  const run::RunData data = run::open_data(request, plan.mesh.data_size());
  RunDocuments documents;
  if (request.is_root()) documents = run::survey_documents(data);
  run::Start start{.step_dir = request.find_step()};
  if (request.writes()) {
    RunLock::check_free(options.out_dir);
    run::RunDirectory::check(options.out_dir, options.resume, start.step_dir);
  }
  if (trains(config.use)) monitor::Monitors::check(config, request.places());
  if (!start.step_dir.empty()) {
    start.check_step(request, data, engine::make_param_table(config, model, plan));
  } else if (const std::string weights = request.find_weights(); !weights.empty()) {
    run::check_weights(model, weights, config.published.new_head, request.is_root());
  }
  return documents;
}

TrainingRun::TrainingRun(const Config& config, const RankInfo& ranks, const RunOptions& options)
    : state_(std::make_unique<State>()) {
  state_->request = {config, ranks, options};
  Config& c = state_->request.config;
  if (options.read_only && trains(c.use)) c.use = ConfigUse::Evaluate;
  std::optional<DraftModel>& draft = state_->request.options.draft;
  if (draft) draft = run::beside(c, std::move(*draft));
  if (!state_->request.writes()) c.save.async = false;  // no snapshot, so no memory for one
  state_->journal = run::Journal(c.save.on_error);
  state_->collective([&] { state_->open(); });
}

TrainingRun::~TrainingRun() = default;

i64 TrainingRun::step() const noexcept { return state_->engine().progress().step; }
std::string_view TrainingRun::backend() const noexcept { return state_->mesh->dp().backend(); }

}  // namespace ds
