// SPDX-License-Identifier: Apache-2.0
#include "run/run_record.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <type_traits>

#include "checkpoint/together.h"
#include "ds/version.h"
#include "launch/process.h"
#include "model/attention_pattern.h"
#include "plan/own_memory.h"
#include "plan/planned.h"
#include "run/gpu_kernels.h"
#include "run/plans.h"

namespace ds::run {
namespace {

Json bytes_json(const plan::TagBytes& bytes) {
  Json json = Json::object();
  for (size_t t = 0; t < bytes.size(); ++t) {
    if (bytes[t] != 0) json[std::string(tag_name(static_cast<Tag>(t)))] = bytes[t];
  }
  return json;
}

// "2026-11-21T20:15:00Z"
std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

i64 now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

Json bounds_json(const plan::TagBounds& bounds) {
  Json json = Json::object();
  for (size_t t = 0; t < bounds.size(); ++t) {
    if (bounds[t] != Bound::Exact) json[std::string(tag_name(static_cast<Tag>(t)))] = bound_text(bounds[t]);
  }
  return json;
}

plan::Host host_of(const Mesh& mesh, Device& device) {
  const ThreadPool* const pool = device.stream().pool;
  return {mesh.world().backend(), device.ops(), pool != nullptr ? pool->num_threads() : 0, device.gpu_kernels()};
}

plan::TagBytes predicted_bytes(const Config& config, const model::Model& model, const plan::RunPlan& plan,
                               const Mesh& mesh, Device& device) {
  plan::TagBytes bytes = plan.memory.by_tag;
  const plan::TagBytes own = plan::own_memory(config, model, plan, host_of(mesh, device));
  for (size_t t = 0; t < bytes.size(); ++t) bytes[t] += own[t];
  return bytes;
}

plan::TagBounds bounds_of(const Config& config, const plan::RunPlan& plan, const Mesh& mesh, Device& device,
                          bool whole_run) {
  return plan::own_bounds(config, plan, host_of(mesh, device), whole_run);
}

}  // namespace

std::vector<TagMemory> memory_table(const plan::TagBytes& predicted, const plan::TagBytes& counted,
                                    const plan::TagBounds& bounds) {
  std::vector<TagMemory> table;
  for (size_t t = 0; t < predicted.size(); ++t) {
    if (predicted[t] != 0 || counted[t] != 0)
      table.push_back({std::string(tag_name(static_cast<Tag>(t))), predicted[t], counted[t], bounds[t]});
  }
  return table;
}

std::string compact_json(const std::string& text) { return Json::parse(text).dump(); }

std::string attention_identity(const Config& config) {
  Json identity = Json::object();
  const SparseAttentionConfig& sparse = config.sparse_attention;
  // All blocks are no layout, to the bit.
  if (sparse.mode != SparseAttentionMode::None && sparse.mode != SparseAttentionMode::Dense) {
    Json section = Json::parse(resolved_json(config)).at("sparse_attention");
    if (sparse.mode == SparseAttentionMode::Layout) {  // whatever the file is called
      const std::shared_ptr<const model::AttentionLayout> layout = model::attention_layout_of(config);
      const std::vector<u64>& bits = layout->keys();
      section["layout"] = fmt::format("{:016x}", XXH3_64bits(bits.data(), bits.size() * sizeof(u64)));
    }
    if (sparse.num_random_blocks > 0) section["seed"] = config.seed;
    identity["sparse_attention"] = std::move(section);
  }
  if (const DataConfig& d = config.data; d.separate_documents) {
    if (d.document_token >= 0)
      identity["data.document_token"] = d.document_token;
    else
      identity["data.separate_documents"] = true;
    if (d.document_positions == DocumentPositions::Continue) identity["data.document_positions"] = "continue";
  }
  return identity.empty() ? "" : identity.dump();
}

Config with_absolute_paths(Config config) {
  const auto complete = [](std::string& path) {
    if (!path.empty()) path = std::filesystem::absolute(path).lexically_normal();
  };
  for (auto* files : {&config.data.train, &config.data.validation}) std::ranges::for_each(*files, complete);
  complete(config.published.path);
  complete(config.sparse_attention.layout);
  complete(config.zero.offload_optimizer.nvme_path);
  complete(config.zero.offload_param.nvme_path);
  complete(config.activation_checkpointing.nvme_path);
  for (std::string* file : {&config.monitors.tensorboard.output_path, &config.monitors.csv_monitor.output_path,
                            &config.monitors.prometheus.file, &config.monitors.flops_profiler.output_file})
    complete(*file);
  if (config.data.tokenizer != "bytes") complete(config.data.tokenizer);
  return config;
}

Json step_line(const StepRecord& record, bool recovered) {
  Json line = {{"type", "step"}};
  for (const StepField& f : step_fields()) {
    if (f.name == nullptr || (recovered && !f.served)) continue;
    const StepField::Value value = f.value(record);
    if (const auto* const named = std::get_if<StepField::Named>(&value)) {
      Json& object = line[f.name] = Json::object();
      for (const auto& [name, number] : *named) std::visit([&](auto x) { object[name] = x; }, number);
    } else if (!std::holds_alternative<std::monostate>(value)) {
      std::visit(
          [&](const auto& x) {
            if constexpr (std::is_arithmetic_v<std::decay_t<decltype(x)>>) line[f.name] = x;
          },
          value);
    }
  }
  if (recovered) line[step_field::kRecovered] = true;
  return line;
}

plan::TagBytes RunRecord::counted(const MemoryLedger& ledger) const {
  plan::TagBytes bytes{};
  for (size_t t = 0; t < bytes.size(); ++t) bytes[t] = ledger.peak(static_cast<Tag>(t));
  add_own(bytes);
  return bytes;
}

const plan::TagBytes& RunRecord::predicted(const engine::Engine& engine) {
  if (!predicted_) predicted_ = predicted_bytes(engine.config(), engine.model(), engine.plan(), mesh_, device_);
  return *predicted_;
}

plan::TagBounds RunRecord::bounds(const engine::Engine& engine, i64 step) const {
  const bool whole_run = first_step_ == 1 && step >= engine.config().steps;
  return bounds_of(engine.config(), engine.plan(), mesh_, device_, whole_run);
}

void RunRecord::add_own(plan::TagBytes& bytes) const {
  bytes[static_cast<size_t>(Tag::Comm)] += mesh_.staging_bytes();
  bytes[static_cast<size_t>(Tag::Scratch)] += device_.scratch_bytes();
}

void RunRecord::show(const engine::Engine& engine, const std::string& job, const std::string& directory, i64 step) {
  const MeshShape& mesh = mesh_.shape();
  const MeshCoord& coord = mesh_.coord();
  LiveIdentity who{.rank = mesh_.rank(),
                   .world_size = mesh_.world_size(),
                   .mesh = {.pp = mesh.pp, .dp = mesh.dp, .sp = mesh.sp, .tp = mesh.tp, .worker = mesh.workers},
                   .coord = {.pp = coord.pp, .dp = coord.dp, .sp = coord.sp, .tp = coord.tp, .worker = coord.worker},
                   .total_steps = engine.config().steps,
                   .base_bytes = base_bytes(),
                   .predicted = predicted(engine),
                   .bounds = bounds(engine, step)};
  copy_text(who.job, job);
  if (!directory.empty()) copy_text(who.directory, std::filesystem::absolute(directory).lexically_normal().string());
  copy_text(who.device, device_.name());
  // Not of what came before, as what reading weights took for a while.
  resident_.begin_peaks();
  first_step_ = step + 1;
  counters_.reset();  // of an earlier training in this process
  counters_.emplace(who, live_record(engine, {.step = step}, counted(engine.ledger())));
}

void RunRecord::show_step(const engine::Engine& engine, const StepRecord& step, const plan::TagBytes& peak) {
  // The first step has taken what steps take, and what comes after the last one is no training: both are read.
  if (step.step == first_step_ || step.step == engine.config().steps) resident_.read();
  if (counters_) counters_->publish(live_record(engine, step, peak));
}

LiveRecord RunRecord::live_record(const engine::Engine& engine, const StepRecord& step, const plan::TagBytes& peak) {
  LiveRecord r{.step = step.step,
               .loss = step.loss,
               .step_ms = step.step_ms,
               .tokens_per_s = step.tokens_per_s,
               .mfu = step.mfu,
               .resident_bytes = resident_.sample(),
               .updated_ns = now_ns(),
               .peak = peak};
  for (const auto& [name, bytes] : step.comm_bytes) r.comm_bytes += bytes;
  for (size_t t = 0; t < r.current.size(); ++t) r.current[t] = engine.ledger().current(static_cast<Tag>(t));
  add_own(r.current);
  return r;
}

void RunRecord::gather_stages(const engine::Engine& engine) {
  const plan::TagBytes& own = predicted(engine);
  const plan::TagBounds own_bounds = bounds_of(engine.config(), engine.plan(), mesh_, device_, false);
  Json mine = Json::array();
  for (size_t t = 0; t < own.size(); ++t) mine.push_back({own[t], static_cast<int>(own_bounds[t])});
  std::vector<Json> of_ranks;
  for (const std::string& rank : gather_text(mesh_.world(), mine.dump())) of_ranks.push_back(Json::parse(rank));
  for (int stage = 0; stage < mesh_.shape().pp; ++stage) {
    const std::vector<int> ranks = ranks_of_stage(mesh_.shape(), stage);
    plan::TagBytes bytes{};
    plan::TagBounds bounds{};
    for (size_t t = 0; t < bytes.size(); ++t) {
      const auto of_rank = [&](int r) {
        const Json& number = of_ranks[static_cast<size_t>(r)][t];
        return plan::BoundedBytes{number[0].get<i64>(), static_cast<Bound>(number[1].get<int>())};
      };
      plan::BoundedBytes most = of_rank(ranks.front());
      for (const int r : ranks) most = plan::most_of(most, of_rank(r));
      bytes[t] = most.bytes;
      bounds[t] = most.bound;
    }
    stages_.push_back({{"ranks", ranks}, {"predicted_bytes", bytes_json(bytes)}});
    if (Json named = bounds_json(bounds); !named.empty()) stages_.back()["bounds"] = std::move(named);
  }
}

Json RunRecord::run_line(const engine::Engine& engine, i64 step, const std::string& model_json) const {
  const MeshShape& m = mesh_.shape();
  Json mesh = {{"pp", m.pp}, {"dp", m.dp}, {"sp", m.sp}, {"tp", m.tp}};
  if (m.workers > 1) mesh["workers"] = m.workers;
  return {{"type", "run"},
          {"step", step},
          {"version", version()},
          {"world_size", mesh_.world_size()},
          {"mesh", mesh},
          {"device", device_.is_host() ? "cpu" : "cuda"},
          {"device_name", device_.name()},
          {"attention", attention_of(device_)},
          {"backend", mesh_.dp().backend()},
          {"host", launch::host_name()},
          {"start", utc_now()},
          {"peak_flops", peak_flops_},
          {"stages", stages_},
          {"config", Json::parse(resolved_json(with_absolute_paths(engine.config())))},
          {"model", Json::parse(model_json)}};
}

Json RunRecord::memory_line(const engine::Engine& engine, i64 step) {
  const probe::ResidentMeter::Peaks resident = resident_.peaks();
  Json mine = {{"rank", mesh_.rank()},
               {"counted_bytes", bytes_json(counted(engine.ledger()))},
               {"predicted_bytes", bytes_json(predicted(engine))},
               {"resident_bytes", resident.own},
               {"momentary_bytes", resident.momentary},
               {"base_bytes", base_bytes()}};
  if (Json of_tags = bounds_json(bounds(engine, step)); !of_tags.empty()) mine["bounds"] = std::move(of_tags);
  Json ranks = Json::array();
  for (const std::string& rank : gather_text(mesh_.world(), mine.dump())) ranks.push_back(Json::parse(rank));
  return {{"type", "memory"}, {"step", step}, {"ranks", ranks}};
}

}  // namespace ds::run
