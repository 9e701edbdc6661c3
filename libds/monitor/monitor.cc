// SPDX-License-Identifier: Apache-2.0
#include "monitor/monitor.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "checkpoint/run_names.h"
#include "config/named_files.h"
#include "ds/checkpoint.h"
#include "ds/limits.h"
#include "monitor/comms_log.h"
#include "monitor/csv_files.h"
#include "monitor/event_file.h"
#include "monitor/flops_report.h"
#include "monitor/phase_log.h"
#include "monitor/prometheus_file.h"

namespace ds::monitor {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTensorboard = "tensorboard", kCsv = "csv_monitor", kPrometheus = "prometheus.file",
                           kFlops = "flops_profiler.output_file";

std::string directory_of(const MonitorConfig& config, std::string_view name, const std::string& run_directory) {
  DS_CHECK(!config.output_path.empty() || !run_directory.empty(), Errc::Config,
           "{}.output_path: is missing, and there is no run directory: give it, or --out DIR", name);
  const fs::path above = config.output_path.empty() ? fs::path(run_directory) / name : fs::path(config.output_path);
  const fs::path directory = above / config.job_name;
  if (std::ranges::find(directory, "..") == directory.end()) return directory.string();
  std::error_code error;  // "a/.." also where there is no a yet
  const fs::path there = fs::weakly_canonical(fs::absolute(directory), error);
  return (error ? directory : there).string();
}

// What is there of `directory` is one, and takes what is missing.
void check_directory(const std::string& directory, std::string_view key, bool may_be_missing) {
  std::error_code error;
  fs::path there = fs::absolute(directory).lexically_normal();
  while (may_be_missing && !fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  const bool is_directory = fs::is_directory(there, error);
  DS_CHECK(is_directory && access(there.c_str(), W_OK | X_OK) == 0, Errc::Config, "{}: cannot write in {}: {}", key,
           directory,
           is_directory ? system_reason(errno)
                        : fmt::format("{} {}", there.string(),
                                      fs::exists(there, error) ? "is not a directory" : "does not exist"));
}

// The user has named a link, not what it leads to: that is replaced only if it is empty, or a report of the same kind.
void check_link(const std::string& file, std::string_view key, std::string_view begin) {
  std::error_code error;
  if (!fs::is_symlink(file, error) || !fs::is_regular_file(file, error)) return;
  const std::string there = follow_links(file);
  std::ifstream in(there, std::ios::binary);
  std::string first(begin.size(), '\0');
  in.read(first.data(), std::ssize(first));
  first.resize(static_cast<size_t>(in.gcount()));
  DS_CHECK(first.empty() || first == begin, Errc::Config,
           "{}: {} is a link to {}, which holds something else: name a file, or remove the link", key, file, there);
}

std::string key_of(std::string_view monitor) { return fmt::format("{}.output_path", monitor); }

// Directories of monitors: all of them, or none.
class Directories {
 public:
  explicit Directories(const std::string& run_directory) : run_directory_(run_directory) {}
  ~Directories() {
    std::error_code error;
    for (auto it = made_.rbegin(); !keep_ && it != made_.rend(); ++it) fs::remove(*it, error);
  }
  std::string make(const MonitorConfig& config, std::string_view name) {
    const std::string directory = directory_of(config, name, run_directory_);
    std::vector<fs::path> missing;
    std::error_code error;
    for (fs::path d = fs::absolute(directory).lexically_normal(); !fs::exists(d, error) && d.has_relative_path();
         d = d.parent_path())
      missing.push_back(d);
    for (auto it = missing.rbegin(); it != missing.rend(); ++it) {
      DS_CHECK(!it->has_filename() || fs::create_directory(*it, error) || !error, Errc::Config,
               "{}: cannot create {}: {}", key_of(name), directory,
               fs::is_symlink(*it, error) ? "a link leads to nothing" : error.message());
      made_.push_back(*it);
    }
    return directory;
  }
  void keep() noexcept { keep_ = true; }

 private:
  const std::string run_directory_;
  std::vector<fs::path> made_;
  bool keep_ = false;
};

}  // namespace

void check_file(const std::string& file, std::string_view key, const Config& config, const Places& places) {
  std::error_code error;
  DS_CHECK(!fs::is_directory(file, error), Errc::Config, "{}: {} is a directory", key, file);
  DS_CHECK(!fs::exists(file, error) || fs::is_regular_file(file, error), Errc::Config, "{}: {} is not a regular file",
           key, file);
  const auto place_of = [&](const std::string& path) {
    return fs::weakly_canonical(fs::absolute(follow_links(path)), error);
  };
  const fs::path place = place_of(file);
  const fs::path resumed(places.resumed);
  for (const fs::path& run : {fs::path(places.run_directory), resumed, resumed.parent_path()}) {
    if (run.empty()) continue;
    const fs::path inside = place.lexically_relative(place_of(run.string()));
    const std::string name = inside.empty() ? "" : inside.begin()->string();
    const bool is_own = name == kMetricsName || name == kLockName || name == kLatestName || parse_step_name(name);
    DS_CHECK(!is_own, Errc::Config, "{}: {} is a file that {}", key, file,
             run == places.run_directory ? "the run writes itself" : "another run has written");
  }
  DS_CHECK(resumed.empty() || !parse_step_name(resumed.filename().string()) ||
               place.lexically_relative(place_of(places.resumed)).string().starts_with(".."),
           Errc::Config, "{}: {} is in the checkpoint that this run goes on from", key, file);
  for (const auto& [other, of_key] :
       {std::pair(config.prometheus.file, kPrometheus), {config.flops_profiler.output_file, kFlops}}) {
    DS_CHECK(other.empty() || of_key == key || place_of(other) != place, Errc::Config, "{}: {} is the file of {}, too",
             key, file, of_key);
  }
  std::vector<NamedFile> inputs = named_inputs(config);
  for (const std::string& input : places.inputs) inputs.push_back({"", input});
  for (const NamedFile& input : inputs) {
    const bool inside = fs::is_directory(input.path, error) && fs::exists(file, error) &&
                        (input.key.empty() || is_model_file(file)) &&
                        !place.lexically_relative(place_of(input.path)).string().starts_with("..");
    DS_CHECK(!inside && !fs::equivalent(file, input.path, error) && place != place_of(input.path), Errc::Config,
             "{}: {} is an input of this run{}", key, file, input.key.empty() ? "" : fmt::format(", by {}", input.key));
  }
  check_directory(parent_directory(follow_links(file)), key, false);
}

void Monitors::check(const Config& config, const Places& places) {
  const auto check_monitor = [&](const MonitorConfig& monitor, std::string_view name) {
    if (monitor.enabled) check_directory(directory_of(monitor, name, places.run_directory), key_of(name), true);
  };
  check_monitor(config.tensorboard, kTensorboard);
  check_monitor(config.csv_monitor, kCsv);
  if (config.csv_monitor.enabled)
    check_csv_files(directory_of(config.csv_monitor, kCsv, places.run_directory), key_of(kCsv));
  const auto check_report = [&](const std::string& file, std::string_view key, std::string_view begin) {
    if (file.empty()) return;
    check_file(file, key, config, places);
    check_link(file, key, begin);
  };
  check_report(config.prometheus.file, kPrometheus, kPrometheusBegin);
  if (config.flops_profiler.enabled) check_report(config.flops_profiler.output_file, kFlops, kFlopsBegin);
}

bool Monitors::wants_phases(const Config& config, i64 step) noexcept {
  return config.wall_clock_breakdown || (config.flops_profiler.enabled && config.flops_profiler.profile_step == step);
}

Monitors::Monitors(const Config& config, const Run& run) {
  const bool has_scale = config.fp16.enabled;
  Directories directories(run.directory);
  std::string events, csv;
  if (config.tensorboard.enabled) events = directories.make(config.tensorboard, kTensorboard);
  if (config.csv_monitor.enabled) csv = directories.make(config.csv_monitor, kCsv);
  directories.keep();
  if (config.tensorboard.enabled) all_.push_back(make_event_file(events, has_scale));
  if (config.csv_monitor.enabled) all_.push_back(make_csv_files(csv, has_scale));
  if (!config.prometheus.file.empty()) all_.push_back(make_prometheus_file(config.prometheus, config.steps_per_print));
  if (config.wall_clock_breakdown) all_.push_back(make_phase_log(config.steps_per_print, run.tell));
  if (config.comms_logger.enabled)
    all_.push_back(make_comms_log(config.comms_logger, config.steps_per_print, run.tell));
  if (config.flops_profiler.enabled) all_.push_back(make_flops_report(config, run));
}

void Monitors::for_each(const std::function<void(Monitor&)>& call) {
  std::exception_ptr first;
  for (const std::unique_ptr<Monitor>& monitor : all_) {
    try {
      call(*monitor);
    } catch (const Error&) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace ds::monitor
