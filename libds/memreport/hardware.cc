// SPDX-License-Identifier: Apache-2.0
#include "memreport/hardware.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/file.h"
#include "base/json.h"
#include "config/optimizer.h"
#include "memreport/models.h"
#include "pipeline/simulate.h"
#include "plan/planned.h"

namespace ds::memreport {
namespace {

constexpr i64 kMaxDocument = i64{64} << 20;

struct Gpu {
  const char* name;
  Hardware::Peaks peaks;
};
// NVIDIA's data sheets (SXM modules; NVLink and PCI Express each way), and DGX systems: one network card of 200 or
// 400 Gbit/s for each GPU.
constexpr Gpu kGpus[] = {{"a100", {312e12, 2.039e12, 300e9, 25e9, 32e9}},
                         {"h100", {989e12, 3.35e12, 450e9, 50e9, 64e9}},
                         {"h200", {989e12, 4.8e12, 450e9, 50e9, 64e9}},
                         {"b200", {2250e12, 8e12, 900e9, 50e9, 64e9}}};

std::optional<Links> links_of(const std::string& file) {
  if (file.empty()) return std::nullopt;
  return read_links(read_text_file(file, kMaxDocument, Errc::Config), file);
}

}  // namespace

Hardware::Peaks Hardware::gpu(const std::string& name) {
  for (const Gpu& g : kGpus) {
    if (g.name == name) return g.peaks;
  }
  throw Error(Errc::Config, fmt::format("no data sheet of a GPU \"{}\": {} are known", name, fmt::join(gpus(), ", ")));
}

std::vector<std::string> Hardware::gpus() {
  std::vector<std::string> names;
  for (const Gpu& g : kGpus) names.emplace_back(g.name);
  return names;
}

Hardware Hardware::read(const std::string& machine, const std::string& links) {
  State s{read_machine(read_text_file(machine, kMaxDocument, Errc::Config), machine), links_of(links)};
  return Hardware(std::make_shared<const State>(std::move(s)));
}

Hardware Hardware::of_peaks(const Peaks& peaks, int ranks_per_node, const std::string& links) {
  State s{machine_of_peaks(DType::BF16, peaks.flops, peaks.memory, ranks_per_node), links_of(links)};
  s.machine.host_link = peaks.host;
  for (const DType t : {DType::F16, DType::F32}) {
    for (auto& [op, rates] : s.machine.flops) rates[t] = rates.at(DType::BF16);
  }
  if (!s.links && (peaks.link > 0 || peaks.network > 0)) {
    s.links.emplace();
    const auto add = [&](const char* name, double bandwidth) {
      if (bandwidth > 0)
        s.links->links.push_back(
            {.backend = "peaks", .link = name, .latency_s = 0, .bandwidth = bandwidth, .pairs = 0});
    };
    add("host", peaks.link);
    add("network", peaks.network);
  }
  return Hardware(std::make_shared<const State>(std::move(s)));
}

Hardware Hardware::measure(int ranks, int threads) {
  return Hardware(std::make_shared<const State>(State{measure_machine({.ranks = ranks, .threads = threads}), {}}));
}

Hardware Hardware::with_disk(const std::string& file) const {
  State s = *state_;
  const std::string text = read_text_file(file, kMaxDocument, Errc::Config);
  double best = 0;
  try {
    const Json document = Json::parse(text);
    DS_CHECK(document.at("schema") == "ds-offload/1", Errc::Config, "{}: not a document of ds-offload bench", file);
    for (const Json& row : document.at("files")) {
      const double read = 1e9 * row.at("read_gb_per_s").get<double>(),
                   write = 1e9 * row.at("write_gb_per_s").get<double>();
      if (read <= 0 || write <= 0 || 1 / (1 / read + 1 / write) <= best) continue;
      best = 1 / (1 / read + 1 / write);
      s.machine.disk_read = read;
      s.machine.disk_write = write;
    }
    s.disk = document.value("path", "");
    for (const Json& row : document.value("updates", Json::array())) {
      const bool is_adamw = row.at("optimizer") == optimizer_name(OptimizerType::AdamW);
      if (is_adamw || s.machine.host_updates == 0) s.machine.host_updates = 1e9 * row.at("gb_per_s").get<double>();
    }
  } catch (const Json::exception&) {
    throw Error(Errc::Config, fmt::format("{}: not a document of ds-offload bench --path DIR --json", file));
  }
  DS_CHECK(best > 0, Errc::Config, "{}: has no rates of a disk; ds-offload bench --path DIR measures one", file);
  return Hardware(std::make_shared<const State>(std::move(s)));
}

const std::string& Hardware::disk() const noexcept { return state_->disk; }

std::string Hardware::json() const { return machine_json(state_->machine); }

StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware) {
  Models models;
  return predict_time(config, world, device, hardware, models);
}

namespace {

// The stages of a pipeline, each kind of them once.
class Stages {
 public:
  Stages(const Config& config, const World& world, DeviceKind device, const Hardware& hardware, Models& models)
      : model_(models.of(config, plan::mesh_shape(config, world.ranks), {})),
        links_(hardware.state().links ? &*hardware.state().links : nullptr),
        machine_(hardware.state().machine) {
    machine_.ranks_per_node = world.ranks / world.nodes;
    const MeshShape mesh = plan::mesh_shape(config, world.ranks);
    // Stages of as many layers do the same work, but for the ends. What they gather may differ while the pipeline
    // fills.
    const std::vector<i64> cuts = models.cuts(config, mesh);
    for (int stage = 0; stage < mesh.pp; ++stage) {
      std::vector<i64> layers = {stage == 0 ? 0 : stage == mesh.pp - 1 ? 2 : 1};
      for (int chunk = 0; chunk < config.pipeline.virtual_stages; ++chunk) {
        const size_t block = static_cast<size_t>(pipeline::block_of(mesh.pp, stage, chunk));
        layers.push_back(cuts[block + 1] - cuts[block]);
        if (config.model.sliding_window == 0) continue;
        for (i64 l = std::max<i64>(cuts[block], 1); l < std::min(cuts[block + 1], config.model.layers + 1); ++l)
          layers.push_back(config.model.sliding_layers[l - 1]);
      }
      auto at = works_.find(layers);
      if (at == works_.end()) {
        plan::RunPlan plan = models.plan(config, mesh, {.pp = stage}, device, cuts);
        plan::StepWork work = plan::tally_step(model_, plan);
        at = works_.emplace(std::move(layers), std::pair(std::move(plan), std::move(work))).first;
      }
      stages_.push_back({&at->second.first, &at->second.second});
    }
  }

  StepTime predicted(const Config& config) const {
    return predict_step(model_, stages_, pipeline::make_schedules(plan::schedule_of(config)), machine_, links_);
  }
  LeastTime least() const { return least_step(model_, stages_, machine_, links_); }

 private:
  const model::Model& model_;
  const Links* links_;
  Machine machine_;
  std::map<std::vector<i64>, std::pair<plan::RunPlan, plan::StepWork>> works_;
  std::vector<StageWork> stages_;
};

// As of_any_length() wants it.
StepTime extended(const StepTime& a, const StepTime& b, double times) {
  const auto at = [&](double of_a, double of_b) { return of_b + (of_b - of_a) * times; };
  StepTime t;
  for (double StepTime::*field :
       {&StepTime::compute_s, &StepTime::recompute_s, &StepTime::in_layer_communication_s, &StepTime::pipeline_s,
        &StepTime::communication_s, &StepTime::hidden_s, &StepTime::optimizer_s, &StepTime::publish_s,
        &StepTime::files_s, &StepTime::copies_s, &StepTime::cores_s, &StepTime::step_s})
    t.*field = at(a.*field, b.*field);
  for (const auto& [name, seconds] : b.messages_s) {
    const auto in_a = a.messages_s.find(name);
    t.messages_s[name] = at(in_a == a.messages_s.end() ? 0 : in_a->second, seconds);
  }
  for (const auto& [name, op] : b.ops) {
    const auto in_a = a.ops.find(name);
    const OpTime less = in_a == a.ops.end() ? OpTime() : in_a->second;
    t.ops[name] = {op.calls + (op.calls - less.calls) * static_cast<i64>(times), at(less.flops, op.flops),
                   at(less.bytes, op.bytes), at(less.seconds, op.seconds)};
  }
  // Quotients: their dividends grow evenly.
  const auto ratio = [&](double StepTime::*r, double StepTime::*by) {
    return t.*by > 0 ? at(a.*r * a.*by, b.*r * b.*by) / (t.*by) : 0;
  };
  t.bubble_fraction = ratio(&StepTime::bubble_fraction, &StepTime::pipeline_s);
  t.tokens_per_s = ratio(&StepTime::tokens_per_s, &StepTime::step_s);
  t.mfu = ratio(&StepTime::mfu, &StepTime::step_s);
  return t;
}
LeastTime extended(const LeastTime& a, const LeastTime& b, double times) {
  return {extended(a.own, b.own, times), extended(a.any_cut, b.any_cut, times)};
}

// Whole sequences, and no evaluations between steps, which leave second shards to the next one.
Config with_alike_steps(const Config& config) {
  Config alike = plan::of_whole_sequences(config);
  alike.eval.every = 0;
  return alike;
}

}  // namespace

StepTime predict_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                      Models& models) {
  return of_any_length(
      with_alike_steps(config),
      [&](const Config& c) { return Stages(c, world, device, hardware, models).predicted(c); },
      [](const auto&... of) { return extended(of...); });
}

LeastTime least_time(const Config& config, const World& world, DeviceKind device, const Hardware& hardware,
                     Models& models) {
  return of_any_length(
      with_alike_steps(config), [&](const Config& c) { return Stages(c, world, device, hardware, models).least(); },
      [](const auto&... of) { return extended(of...); });
}

std::string text(const StepTime& t) {
  std::string out;
  const auto line = [&](const char* name, double seconds, const char* what) {
    out += fmt::format("  {:<20} {:>12.3f} ms{}\n", name, 1e3 * seconds, what);
  };
  out += "time of a step\n";
  line("pipeline", t.pipeline_s, "  all passes, of all stages");
  line("  computing", t.compute_s, "  of the busiest stage");
  if (t.recompute_s > 0) line("  computed again", t.recompute_s, "  part of it");
  if (t.in_layer_communication_s > 0) line("  inside layers", t.in_layer_communication_s, "  sent by tp and sp");
  line("communication", t.communication_s, t.hidden_s > 0 ? "  exposed" : "");
  if (t.hidden_s > 0) line("  hidden", t.hidden_s, "  behind the passes");
  line("optimizer", t.optimizer_s, "");
  line("publication", t.publish_s, "  of parameters");
  if (t.copies_s > 0) line("copies", t.copies_s, "  of what is offloaded, between the GPU and its host");
  if (t.files_s > 0) line("files", t.files_s, "  of what is offloaded, exposed");
  if (t.cores_s > 0) line("waiting for cores", t.cores_s, "  the node has fewer than its ranks have threads");
  line("step", t.step_s, "");
  if (t.bubble_fraction > 0) out += fmt::format("  {:<20} {:>12.1f} %\n", "bubble", 100 * t.bubble_fraction);
  out += fmt::format("  {:<20} {:>12.6g}\n  {:<20} {:>12.1f} %\n", "tokens/s", t.tokens_per_s, "MFU", 100 * t.mfu);
  if (t.lacks_offload)
    out += "  without what is copied between the GPU and the host for what is offloaded, and updates there\n";
  return out;
}

std::string json(const StepTime& t) {
  Json ops = Json::object();
  for (const auto& [name, op] : t.ops)
    ops[name] = {{"calls", op.calls}, {"flops", op.flops}, {"bytes", op.bytes}, {"seconds", op.seconds}};
  Json document({{"step_s", t.step_s},
                 {"pipeline_s", t.pipeline_s},
                 {"compute_s", t.compute_s},
                 {"recompute_s", t.recompute_s},
                 {"in_layer_communication_s", t.in_layer_communication_s},
                 {"communication_s", t.communication_s},
                 {"hidden_s", t.hidden_s},
                 {"optimizer_s", t.optimizer_s},
                 {"publish_s", t.publish_s},
                 {"cores_s", t.cores_s},
                 {"bubble_fraction", t.bubble_fraction},
                 {"tokens_per_s", t.tokens_per_s},
                 {"mfu", t.mfu},
                 {"messages_s", t.messages_s},
                 {"ops", ops}});
  if (t.files_s > 0) document["files_s"] = t.files_s;
  if (t.copies_s > 0) document["copies_s"] = t.copies_s;
  if (t.lacks_offload) document["lacks_offload"] = true;
  return document.dump();
}

}  // namespace ds::memreport
