// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options of ds-memreport, and the values made of them.

#include <optional>
#include <span>
#include <string_view>

#include "common/reports.h"
#include "common/tool.h"
#include "ds/memreport.h"

namespace ds::tools {

struct MemreportOptions {
  std::string source;
  double params = 0;
  int ranks = 0, nodes = 1;  // ranks 0: the source's
  // Instead of values of the configuration; 0, -1 and "": not given.
  i64 tp = 0, pp = 0, sp = 0, micro = 0, accumulation = 0, batch = 0, seq = 0;
  int stage = -1;
  std::string dtype, checkpointing, device, use;
  i64 context = 0, cached = 0, chunk = 0;  // of inference
  std::string stream;
  std::vector<std::string> set;
  // Times.
  std::string machine, gpu, links, disk, measure, expert_load;
  memreport::Hardware::Peaks peaks;
  i64 threads = 1;
  // The search for arrangements that fit.
  std::string fit, node_memory, write;
  i64 most = 10;
  // Runs in progress.
  bool running = false;
  double watch = 0;  // seconds between looks; 0: one
  // Result.
  bool all = false, explain = false;
  std::string plot, memory;
};

void add_memreport_options(CLI::App& app, MemreportOptions& options);

// Throws Errc::Config for options that were given and have no effect with `what`: those instead of values of the
// configuration, of times and of what fits, and --nodes, except for `taken`.
void refuse_idle(const CLI::App& app, const std::string& what, std::span<const std::string_view> taken);

// Throws Errc::Config for --plot and --memory that have no effect. has_bars: there is memory of ranks to draw.
void check_plot(const MemreportOptions& options, bool has_bars);

// Options that replace values of the configuration, as arguments of --set.
std::vector<std::string> overrides_of(const MemreportOptions& options);
// The configuration with the use of --use. Throws Errc::Config if that has no steps and another option is about steps.
Config used(const MemreportOptions& options, Config config);
// Those of --expert-load. Throws Errc::Config if they have no effect.
void take_loads(const MemreportOptions& options, memreport::Source& source);
DeviceKind device_of(const MemreportOptions& options, const Config& config);
memreport::World world_of(const MemreportOptions& options, int ranks);
// Rates of the machine; nothing if no option gives them.
std::optional<memreport::Hardware> hardware_of(const MemreportOptions& options, int ranks_per_node);
// Prints the prediction of --use infer, for a configuration of used(). Returns the exit status.
int report_inference(const MemreportOptions& options, const Config& config, const memreport::World& world,
                     DeviceKind device, const std::optional<memreport::Hardware>& hardware, Output& out);

}  // namespace ds::tools
