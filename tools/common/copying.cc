// SPDX-License-Identifier: Apache-2.0
#include "common/copying.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>

#include "common/internal.h"
#include "ds/error.h"
#include "ds/signals.h"

namespace ds::tools {
namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stopped_by = 0;

extern "C" void note_signal(int signal) { stopped_by = signal; }

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

}  // namespace

CopyLine::CopyLine() : start_(Clock::now()) {
  for (const int signal : ending_signals()) {
    const auto before = std::signal(signal, note_signal);
    if (before != SIG_DFL) std::signal(signal, before);  // ignored, as by nohup(1), or another's
  }
}

CopyLine::~CopyLine() {
  for (const int signal : ending_signals()) {
    const auto before = std::signal(signal, SIG_DFL);
    if (before != note_signal) std::signal(signal, before);
  }
}

std::function<void(i64, i64)> CopyLine::hook() {
  return [this](i64 done, i64 total) {
    if (stopped_by != 0) throw StoppedBySignal{stopped_by};
    if (!line_.is_due()) return;
    if (total == 0) return line_.show("verifying");
    if (done == 0) return line_.show("laying out the files");
    const double rate = static_cast<double>(done) / seconds(Clock::now() - start_);
    line_.show(fmt::format("{:.1f} of {:.1f} GB  {:.2f} GB/s  ETA {}", static_cast<double>(done) / 1e9,
                           static_cast<double>(total) / 1e9, rate / 1e9,
                           duration(static_cast<double>(total - done) / rate)));
  };
}

void check_outputs_differ(const Output& out, const std::string& model) {
  if (out.replaces(model))
    throw Error(Errc::Config, "--out and --output name the same file, but one is the model and the other the report");
}

void claim_stdout(const Output& out) {
  if (::isatty(STDOUT_FILENO) == 1)
    throw Error(Errc::Config, "standard output is a terminal: name a file, or give the model to a pipe");
  if (out.json() && !out.to_file())
    throw Error(Errc::Config, "the model goes to standard output: give --json an --output FILE");
  struct stat model = {}, report = {};
  if (out.to_file() && ::fstat(STDOUT_FILENO, &model) == 0 && ::stat(out.file().c_str(), &report) == 0 &&
      model.st_dev == report.st_dev && model.st_ino == report.st_ino && !S_ISCHR(model.st_mode))
    throw Error(Errc::Config,
                "standard output and --output name the same file, but one is the model and the other the report");
  std::signal(SIGPIPE, SIG_DFL);
}

i64 parse_bytes(std::string_view option, std::string_view text) {
  struct Unit {
    std::string_view name;
    double bytes;
  };
  static constexpr Unit kUnits[] = {{"", 1},         {"B", 1},    {"K", 1e3},      {"KB", 1e3},    {"KiB", 0x1p10},
                                    {"M", 1e6},      {"MB", 1e6}, {"MiB", 0x1p20}, {"G", 1e9},     {"GB", 1e9},
                                    {"GiB", 0x1p30}, {"T", 1e12}, {"TB", 1e12},    {"TiB", 0x1p40}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  const auto same = [](char a, char b) { return (a | 0x20) == (b | 0x20); };
  for (const Unit& u : kUnits) {
    const double bytes = number * u.bytes;
    if (error == std::errc() && std::ranges::equal(unit, u.name, same) && bytes >= 1 && bytes <= 0x1p62)
      return static_cast<i64>(bytes);
  }
  throw Error(Errc::Config, fmt::format("{}: '{}' is not a size such as 5GB, 500MiB or 1000000, of at most 2^62 bytes",
                                        option, text));
}

}  // namespace ds::tools
