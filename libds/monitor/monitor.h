// SPDX-License-Identifier: Apache-2.0
#pragma once
// What looks on while a run trains, as its configuration asks: the files and reports of DeepSpeed's monitors, and a
// text file for Prometheus. Of rank 0 alone, and after metrics.jsonl has its line.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ds/config.h"
#include "ds/step_record.h"
#include "plan/op_tally.h"

namespace ds::monitor {

// Each call throws Errc::Io when it cannot write; what was written before stays whole.
class Monitor {
 public:
  virtual ~Monitor() = default;
  virtual void step(const StepRecord&) = 0;
  virtual void validation(i64 /*step*/, double /*loss*/) {}
  virtual void end() {}  // no step will follow
};

// The run that is looked on.
struct Run {
  std::string directory{};  // empty: it has none
  int world_size = 1;
  i64 step = 0;  // that it goes on from
  i64 num_params = 0;
  std::function<plan::StepWork()> work{};  // of rank 0 in a step
  std::function<void(std::string_view)> tell{};
};

// What a run has beside what its configuration names.
struct Places {
  std::string run_directory;        // empty: it has none
  std::vector<std::string> inputs;  // files, and directories, in which no file that is there is written over
  std::string resumed;              // a step, or the directory of a run; empty: none
};

// Throws Errc::Config, naming the key or option, if there is no directory for the file, or none that can be written; if
// something is there that is no regular file, or is an input of the run or a part of a model; if a run writes it
// itself, for another key or as a file of another monitor; if it is where a directory of the run will be.
void check_file(const std::string& file, std::string_view key, const Config& config, const Places& places);

class Monitors {
 public:
  // Throws Errc::Config, naming the key, if something cannot be written where the configuration says, would change an
  // input, or has a name that the run gives itself. Touches nothing.
  static void check(const Config& config, const Places& places);
  // Whether the phases of this step are to be timed.
  static bool wants_phases(const Config& config, i64 step) noexcept;

  Monitors() = default;  // none
  // Makes directories and opens files. Throws Errc::Config, Errc::Io.
  Monitors(const Config& config, const Run& run);

  // Every monitor is called, whatever becomes of the others; then the first error is thrown.
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
