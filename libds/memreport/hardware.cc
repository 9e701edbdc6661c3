// SPDX-License-Identifier: Apache-2.0
#include "memreport/hardware.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/file.h"
#include "base/json.h"
#include "config/optimizer.h"
#include "config/optimizer_table.h"
#include "memreport/models.h"
#include "pipeline/simulate.h"
#include "plan/planned.h"

namespace ds::memreport {
namespace {

constexpr i64 kMaxDocument = i64{64} << 20;

struct Gpu {
  const char* name;
  int compute_capability;
  Hardware::Peaks peaks;
};
// NVIDIA's data sheets (SXM modules; NVLink and PCI Express each way), and DGX systems: one network card of 200 or
// 400 Gbit/s for each GPU.
constexpr Gpu kGpus[] = {{"a100", 8, {312e12, 2.039e12, 300e9, 25e9, 32e9}},
                         {"h100", 9, {989e12, 3.35e12, 450e9, 50e9, 64e9}},
                         {"h200", 9, {989e12, 4.8e12, 450e9, 50e9, 64e9}},
                         {"b200", 10, {2250e12, 8e12, 900e9, 50e9, 64e9}}};

std::optional<Links> links_of(const std::string& file) {
  if (file.empty()) return std::nullopt;
  return read_links(read_text_file(file, kMaxDocument, Errc::Config), file);
}

const Gpu& gpu_of(const std::string& name) {
  for (const Gpu& g : kGpus) {
    if (g.name == name) return g;
  }
  throw Error(Errc::Config,
              fmt::format("no data sheet of a GPU \"{}\": {} are known", name, fmt::join(Hardware::gpus(), ", ")));
}

}  // namespace

Hardware::Peaks Hardware::gpu(const std::string& name) { return gpu_of(name).peaks; }
int Hardware::compute_capability(const std::string& name) { return gpu_of(name).compute_capability; }

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
  s.machine.disk_read = s.machine.disk_write = peaks.disk;
  for (const DType t : {DType::F16, DType::F32}) {
    for (auto& [op, rates] : s.machine.flops) rates[t] = rates.at(DType::BF16);
  }
  s.machine.flops["matmul"][DType::F8E4M3] = Rate(2 * peaks.flops);
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
      const bool is_adamw = row.at("optimizer") == optimizer_row(OptimizerType::AdamW).name;
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

}  // namespace ds::memreport
