// SPDX-License-Identifier: Apache-2.0
#include "memreport/arrangement.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"
#include "base/json.h"
#include "config/parallel.h"

namespace ds::memreport {

ConfigResult read_arranged(const Source& source, const Keys& keys, int ranks) {
  Keys overrides = source.overrides;
  overrides.insert(overrides.end(), keys.begin(), keys.end());
  ConfigResult result = parse_config(source.text, source.name, overrides, ranks, ConfigUse::Inspect, source.parts);
  result.config.model.experts.loads = source.expert_loads;
  return result;
}

Frame frame_of(const Arrangement& a) {
  return {
      a.mesh.tp,   a.mesh.pp, a.mesh.sp, a.stage, a.sequence_parallel, {a.schedule, a.virtual_stages, a.memory_limit},
      a.offloaded, a.ep};
}

std::vector<Setting> settings_of(const Config& source, const Frame& f, const Cut& cut, CheckpointGranularity recompute,
                                 const std::string& disk) {
  std::vector<Setting> all = {
      {fmt::format("tensor_parallel.tp_size={}", f.tp)},
      {fmt::format("tensor_parallel.sequence_parallel={}", f.sequence_parallel)},
      {fmt::format("pipeline.stages={}", f.pp)},
      {fmt::format("sequence_parallel_size={}", f.sp)},
      {fmt::format("zero_optimization.stage={}", f.stage)},
      {fmt::format("zero_optimization.overlap_comm={}", f.stage > 0), true},
      {fmt::format("{}={}", kTrain, cut.batch), true, true},
      {fmt::format("{}={}", kMicro, cut.micro), false, true},
      {fmt::format("{}={}", kAccumulation, cut.accumulation), false, true},
      {fmt::format("activation_checkpointing.granularity={}", granularity_name(recompute))},
      {fmt::format("reduce_order={}", f.stage >= 2 || source.deterministic ? "micro" : "boundary"), true}};
  if (source.model.experts.count > 0) {
    all.push_back({fmt::format("expert_parallel.enabled={}", f.ep > 1), true});
    if (f.ep > 1) all.push_back({fmt::format("expert_parallel.autoep_size={}", f.ep)});
  }
  // Its second name.
  if (source.tensor_parallel.autotp_size > 1) all.push_back({"tensor_parallel.autotp_size=1", true});
  if (source.zero.tile_size > 0 && f.stage != 3) all.push_back({"zero_optimization.stage3_tile_size=0", true});
  const ActivationCheckpointingConfig& again = source.activation_checkpointing;
  if (recompute != CheckpointGranularity::Layer) {
    if (again.interval != 1) all.push_back({"activation_checkpointing.interval=1", true});
    if (again.partition_activations) all.push_back({"activation_checkpointing.partition_activations=false", true});
    if (again.cpu_checkpointing) all.push_back({"activation_checkpointing.cpu_checkpointing=false", true});
    if (!again.nvme_path.empty()) all.push_back({"activation_checkpointing.nvme_path=auto", true});
  }
  const bool chunked = source.pipeline.virtual_stages > 1 || source.pipeline.schedule == PipelineSchedule::Interleaved;
  const auto in_files = [&](std::string_view what) {
    all.push_back({fmt::format("zero_optimization.{}.device=nvme", what)});
    all.push_back({fmt::format("zero_optimization.{}.nvme_path={}", what, Json(disk).dump()), true});
  };
  const auto to_host = [&](std::string_view what) {
    all.push_back({fmt::format("zero_optimization.{}.device=cpu", what)});
  };
  switch (f.offloaded) {
    case Offloaded::AsItIs: break;
    case Offloaded::AllToFiles: in_files("offload_param"); [[fallthrough]];
    case Offloaded::StatesToFiles: in_files("offload_optimizer"); break;
    case Offloaded::AllToHost:
      to_host("offload_param");
      all.push_back({"zero_optimization.offload_optimizer.gradients=true"});
      [[fallthrough]];
    case Offloaded::StatesToHost: to_host("offload_optimizer"); break;
  }
  if (f.pp > 1 || chunked || f.schedule != Schedule()) {
    all.push_back({fmt::format("pipeline.schedule={}", schedule_name(f.schedule.kind))});
    all.push_back({fmt::format("pipeline.virtual_stages={}", f.schedule.chunks), true});
    if (f.schedule.kind == PipelineSchedule::ZeroBubbleV)
      all.push_back({fmt::format("pipeline.memory_limit={}", f.schedule.memory_limit)});
  }
  return all;
}

Keys keys_of(const std::vector<Setting>& settings) {
  Keys keys;
  for (const Setting& s : settings) keys.push_back(s.key);
  return keys;
}

bool says(const Source& source, std::string_view key) {
  const std::string set = fmt::format("{}=", key);
  const auto last = std::find_if(source.overrides.rbegin(), source.overrides.rend(),
                                 [&](const std::string& o) { return o.starts_with(set); });
  if (last != source.overrides.rend()) return last->substr(set.size()) != "auto";
  const Json root = parse_json(source.text, source.name, {.places = false}).root;
  return root.is_object() && root.contains(key) && root.at(key) != "auto";
}

ConfigResult read_unarranged(const Source& source) {
  const std::vector<Setting> settings =
      settings_of(source.config.config, {}, {}, source.config.config.activation_checkpointing.granularity, "");
  Keys keys;
  for (const Setting& s : settings) {
    if (!s.is_cut) keys.push_back(s.key);
  }
  keys.insert(keys.end(), {fmt::format("{}=1", kMicro), fmt::format("{}=auto", kAccumulation)});
  return read_arranged(source, keys, 1);
}

i64 batch_of(const Source& source) {
  const Config& c = source.config.config;
  if (source.config.ok() || source.ranks % std::max<i64>(1, c.ranks_per_replica()) == 0) return c.batch.train;
  const i64 batch = read_unarranged(source).config.batch.train;
  DS_CHECK(
      batch > 1, Errc::Config,
      "train_batch_size: nothing says how many samples a step has where the arrangement itself cannot be: give it");
  return batch;
}

}  // namespace ds::memreport
