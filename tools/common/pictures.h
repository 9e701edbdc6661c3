// SPDX-License-Identifier: Apache-2.0
#pragma once
// The pictures that ds-train --check writes.

#include <deque>

#include "common/reports.h"

namespace ds::tools {

class Pictures {
 public:
  void add_options(CLI::App& app, CLI::Option* check) {
    add(app, check, "--plan", "write the plan of the ranks as an SVG picture", plan_svg);
    add(app, check, "--pattern", "write which keys queries attend to as an SVG picture",
        [](const Config& config, int) { return pattern_svg(config); });
  }
  // Before anything is computed: files that cannot be written are refused.
  void open(const CLI::App& app, const ToolInfo& tool) {
    for (Picture& p : pictures_) {
      if (!p.name.empty()) check_report(app, p.file.emplace(tool, p.name, false, p.option));
    }
  }
  // Throws if one of them, or the report, would replace a file of the run.
  void check(const Output& report, const Config& config, const RunOptions& options) const {
    check_reports(config, options, report);
    for (const Picture& p : pictures_) {
      if (p.file) check_reports(config, options, *p.file);
    }
  }
  void write(const Config& config, int world_size) {
    for (Picture& p : pictures_) {
      if (!p.file) continue;
      p.file->data(p.draw(config, world_size));
      p.file->commit();
    }
  }

 private:
  struct Picture {
    std::string option, name;
    std::string (*draw)(const Config&, int world_size);
    std::optional<Output> file = {};
  };
  void add(CLI::App& app, CLI::Option* check, const char* option, const std::string& what,
           std::string (*draw)(const Config&, int)) {
    Picture& p = pictures_.emplace_back(Picture{option, "", draw});
    app.add_option(option, p.name, "with --check: " + what)->type_name("FILE")->needs(check);
  }
  std::deque<Picture> pictures_;  // options refer to its elements, whose addresses do not change
};

}  // namespace ds::tools
