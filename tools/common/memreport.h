// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options of ds-memreport, and what they mean.

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
  // In place of the configuration's; 0, -1 and "": as it says.
  i64 tp = 0, pp = 0, sp = 0, micro = 0, accumulation = 0, batch = 0, seq = 0;
  int stage = -1;
  std::string dtype, checkpointing, device, use;
  std::vector<std::string> set;
  // Times.
  std::string machine, gpu, links, disk, measure;
  memreport::Hardware::Peaks peaks;
  i64 threads = 1;
  // What fits.
  std::string fit, node_memory, write;
  i64 most = 10;
  // What has been taken.
  bool running = false;
  double watch = 0;  // seconds between looks; 0: one
  // Result.
  bool all = false, explain = false;
  std::string plot, memory;
};

void add_memreport_options(CLI::App& app, MemreportOptions& options);

// Throws Errc::Config for options that were given and mean nothing beside `what`: those in place of the
// configuration's, of times and of what fits, and --nodes, but for `taken`.
void refuse_idle(const CLI::App& app, const std::string& what, std::span<const std::string_view> taken);

// What options say of the configuration, as --set would say it.
std::vector<std::string> overrides_of(const MemreportOptions& options);
// The configuration, used as asked. Throws Errc::Config where that has no steps, of which other options speak.
Config used(const MemreportOptions& options, Config config);
DeviceKind device_of(const MemreportOptions& options, const Config& config);
// How fast things are; nothing: not told.
std::optional<memreport::Hardware> hardware_of(const MemreportOptions& options, int ranks_per_node);

}  // namespace ds::tools
