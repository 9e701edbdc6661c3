// SPDX-License-Identifier: Apache-2.0
#include "monitor/monitor.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
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

// The real path of `path`, which may not exist yet, with its links resolved.
fs::path place_of(const std::string& path) {
  std::error_code error;
  const bool leads_somewhere = fs::status(path, error).type() != fs::file_type::none;  // not to itself
  const fs::path place = fs::weakly_canonical(fs::absolute(leads_somewhere ? follow_links(path) : path), error);
  return place.has_filename() ? place : place.parent_path();
}

// The way from `directory` down to `place`: "." if they are one, empty if it is elsewhere.
fs::path way_inside(const fs::path& place, const fs::path& directory) {
  const fs::path way = place.lexically_relative(directory);
  return way.empty() || *way.begin() == ".." ? fs::path() : way;
}

// The existing part of `directory` must be a directory in which the missing part can be made.
void check_directory(const std::string& directory, std::string_view key, bool may_be_missing) {
  std::error_code error;
  fs::path there = fs::absolute(directory).lexically_normal();
  for (const fs::path& name : there) {
    DS_CHECK(name.native().size() <= NAME_MAX, Errc::Config, "{}: cannot write in {}: {}", key, directory,
             system_reason(ENAMETOOLONG));
  }
  while (may_be_missing && fs::symlink_status(there, error).type() == fs::file_type::not_found &&
         there.has_relative_path())
    there = there.parent_path();
  const fs::file_type type = fs::status(there, error).type();
  const auto why_not = [&] {
    if (type == fs::file_type::directory) return system_reason(errno);
    if (type == fs::file_type::none) return fmt::format("{}: {}", there.string(), system_reason(error.value()));
    const bool exists = type != fs::file_type::not_found;
    return fmt::format("{} {}", there.string(),
                       exists                         ? "is not a directory"
                       : fs::is_symlink(there, error) ? "is a link that leads to nothing"
                                                      : "does not exist");
  };
  DS_CHECK(type == fs::file_type::directory && access(there.c_str(), W_OK | X_OK) == 0, Errc::Config,
           "{}: cannot write in {}: {}", key, directory, why_not());
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

// A directory in which a monitor names the files itself.
struct Kept {
  std::string_view monitor;
  fs::path directory;
  bool (*is_file)(std::string_view name);
};

std::vector<Kept> kept_directories(const Config& config, const Places& places) {
  std::vector<Kept> all;
  const auto add = [&](const MonitorConfig& monitor, std::string_view name, bool (*is_file)(std::string_view)) {
    const bool is_known = !monitor.output_path.empty() || !places.run_directory.empty();
    if (monitor.enabled && is_known)
      all.push_back({name, place_of(directory_of(monitor, name, places.run_directory)), is_file});
  };
  add(config.monitors.tensorboard, kTensorboard, is_event_file);
  add(config.monitors.csv_monitor, kCsv, is_csv_file);
  return all;
}

bool is_file_of(const Kept& kept, const fs::path& place) {
  return place.parent_path() == kept.directory && kept.is_file(place.filename().native());
}

// Nothing that a run has under a name of its own: this one, or that which it goes on from.
void check_not_of_run(const std::string& path, std::string_view key, const Places& places) {
  const fs::path place = place_of(path), resumed(places.resumed);
  for (const fs::path& run : {fs::path(places.run_directory), resumed, resumed.parent_path()}) {
    if (run.empty()) continue;
    const fs::path way = way_inside(place, place_of(run.string()));
    const std::string name = way.empty() ? "" : way.begin()->string();
    const bool is_own = name == kMetricsName || name == kLockName || name == kLatestName || parse_step_name(name);
    DS_CHECK(!is_own, Errc::Config, "{}: {} is a file that {}", key, path,
             run == places.run_directory ? "the run writes itself" : "another run has written");
  }
  DS_CHECK(resumed.empty() || !parse_step_name(resumed.filename().string()) ||
               way_inside(place, place_of(places.resumed)).empty(),
           Errc::Config, "{}: {} is in the checkpoint that this run resumes from", key, path);
}

std::vector<NamedFile> inputs_of(const Config& config, const Places& places) {
  std::vector<NamedFile> inputs = named_inputs(config);
  for (const std::string& input : places.inputs) inputs.push_back({"", input});
  return inputs;
}

Error is_input(std::string_view key, const std::string& file, const NamedFile& input) {
  return Error(Errc::Config, fmt::format("{}: {} is an input of this run{}", key, file,
                                         input.key.empty() ? "" : fmt::format(", by {}", input.key)));
}

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
  const fs::file_type type = fs::status(file, error).type();
  DS_CHECK(type != fs::file_type::none, Errc::Config, "{}: {}: {}", key, file, system_reason(error.value()));
  const bool exists = type != fs::file_type::not_found;
  DS_CHECK(type != fs::file_type::directory, Errc::Config, "{}: {} is a directory", key, file);
  DS_CHECK(!exists || type == fs::file_type::regular, Errc::Config, "{}: {} is not a regular file", key, file);
  check_not_of_run(file, key, places);
  const fs::path place = place_of(file);
  DS_CHECK(places.run_directory.empty() || way_inside(place_of(places.run_directory), place).empty(), Errc::Config,
           "{}: {} is where the run makes its directory", key, file);
  for (const Kept& kept : kept_directories(config, places)) {
    DS_CHECK(!is_file_of(kept, place), Errc::Config, "{}: {} is a file of {}, too", key, file, kept.monitor);
    DS_CHECK(way_inside(kept.directory, place).empty(), Errc::Config, "{}: {} is where {} makes its directory", key,
             file, kept.monitor);
  }
  for (const auto& [other, of_key] : {std::pair(config.monitors.prometheus.file, kPrometheus),
                                      {config.monitors.flops_profiler.output_file, kFlops}}) {
    DS_CHECK(other.empty() || of_key == key || place_of(other) != place, Errc::Config, "{}: {} is the file of {}, too",
             key, file, of_key);
  }
  for (const NamedFile& input : inputs_of(config, places)) {
    const bool inside = input.key.empty() && exists && fs::is_directory(input.path, error) &&
                        !way_inside(place, place_of(input.path)).empty();
    if (inside || fs::equivalent(file, input.path, error) || place == place_of(input.path))
      throw is_input(key, file, input);
  }
  DS_CHECK(!exists || !is_model_file(place.string()), Errc::Config,
           "{}: {} is a file of a model, which a report does not replace", key, file);
  check_directory(parent_directory(follow_links(file)), key, false);
}

void Monitors::check(const Config& config, const Places& places) {
  const auto check_monitor = [&](const MonitorConfig& monitor, std::string_view name) {
    if (!monitor.enabled) return;
    const std::string directory = directory_of(monitor, name, places.run_directory);
    check_directory(directory, key_of(name), true);
    check_not_of_run(directory, key_of(name), places);
  };
  check_monitor(config.monitors.tensorboard, kTensorboard);
  check_monitor(config.monitors.csv_monitor, kCsv);
  if (config.monitors.csv_monitor.enabled)
    check_csv_files(directory_of(config.monitors.csv_monitor, kCsv, places.run_directory), key_of(kCsv));
  for (const Kept& kept : kept_directories(config, places)) {
    for (const NamedFile& input : inputs_of(config, places))
      if (is_file_of(kept, place_of(input.path))) throw is_input(key_of(kept.monitor), input.path, input);
  }
  const auto check_report = [&](const std::string& file, std::string_view key, std::string_view begin) {
    if (file.empty()) return;
    check_file(file, key, config, places);
    check_link(file, key, begin);
  };
  check_report(config.monitors.prometheus.file, kPrometheus, kPrometheusBegin);
  if (config.monitors.flops_profiler.enabled)
    check_report(config.monitors.flops_profiler.output_file, kFlops, kFlopsBegin);
}

bool Monitors::wants_phases(const Config& config, i64 step) noexcept {
  return config.monitors.wall_clock_breakdown ||
         (config.monitors.flops_profiler.enabled && config.monitors.flops_profiler.profile_step == step);
}

Monitors::Monitors(const Config& config, const Run& run) {
  const bool has_scale = config.fp16.enabled;
  Directories directories(run.directory);
  std::string events, csv;
  if (config.monitors.tensorboard.enabled) events = directories.make(config.monitors.tensorboard, kTensorboard);
  if (config.monitors.csv_monitor.enabled) csv = directories.make(config.monitors.csv_monitor, kCsv);
  directories.keep();
  if (config.monitors.tensorboard.enabled) all_.push_back(make_event_file(events, has_scale));
  if (config.monitors.csv_monitor.enabled) all_.push_back(make_csv_files(csv, has_scale));
  if (!config.monitors.prometheus.file.empty())
    all_.push_back(make_prometheus_file(config.monitors.prometheus, config.monitors.steps_per_print));
  if (config.monitors.wall_clock_breakdown) all_.push_back(make_phase_log(config.monitors.steps_per_print, run.tell));
  if (config.monitors.comms_logger.enabled)
    all_.push_back(make_comms_log(config.monitors.comms_logger, config.monitors.steps_per_print, run.tell));
  if (config.monitors.flops_profiler.enabled) all_.push_back(make_flops_report(config, run));
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
