// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports of a run while it trains: those of DeepSpeed's monitors, and a text file for Prometheus. On rank 0 only,
// after metrics.jsonl has its line.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"
#include "ds/step_record.h"
#include "plan/op_tally.h"

namespace ds::monitor {

// Each call throws Errc::Io if it cannot write; what was written before stays intact.
class Monitor {
 public:
  virtual ~Monitor() = default;
  virtual void step(const StepRecord&) = 0;
  virtual void validation(i64 /*step*/, double /*loss*/) {}
  virtual void end() {}  // no step will follow
};

// The run that is reported on.
struct Run {
  std::string directory{};  // empty: none
  int world_size = 1;
  i64 step = 0;  // from which it continues
  i64 num_params = 0;
  std::function<plan::StepWork()> work{};  // of rank 0 in a step
  std::function<void(std::string_view)> tell{};
};

// The files of a run besides those that its configuration names.
struct Places {
  std::string run_directory;        // empty: none
  std::vector<std::string> inputs;  // files, and directories whose files must not be replaced
  std::string resumed;              // a step, or the directory of a run; empty: none
};

// Throws Errc::Config, naming the key or option, if the directory of the file does not exist or cannot be written; if
// the file exists and is not a regular file, or is an input of the run or part of a model; if the run writes it for
// another key or monitor; if a directory of the run will be in its place.
void check_file(const std::string& file, std::string_view key, const Config& config, const Places& places);

class Monitors {
 public:
  // Throws Errc::Config, naming the key, if a report cannot be written where the configuration says, would change an
  // input, or has the name of another file of the run. Touches nothing.
  static void check(const Config& config, const Places& places);
  // Whether the phases of this step are to be timed.
  static bool wants_phases(const Config& config, i64 step) noexcept;

  Monitors() = default;  // none
  // Creates directories and opens files. Throws Errc::Config, Errc::Io.
  Monitors(const Config& config, const Run& run);

  // Calls every monitor, even if one fails; then throws the first error.
  void step(const StepRecord& record) {
    for_each([&](Monitor& m) { m.step(record); });
  }
  void validation(i64 step, double loss) {
    for_each([&](Monitor& m) { m.validation(step, loss); });
  }
  void end() {
    for_each([](Monitor& m) { m.end(); });
  }

 private:
  void for_each(const std::function<void(Monitor&)>& call);
  std::vector<std::unique_ptr<Monitor>> all_;
};

}  // namespace ds::monitor
