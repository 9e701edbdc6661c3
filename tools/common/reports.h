// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reports beside the files of a run.

#include <optional>

#include "common/tool.h"
#include "ds/train.h"

namespace ds::tools {

// Throws if a report would replace a file that the configuration or the options of a run name.
template <class... More>
void check_reports(const Config& config, const RunOptions& options, const Output& report, const More&... more) {
  if (!report.replaced().empty()) check_report(report.replaced(), report.option(), config, options);
  (..., [&](const std::optional<Output>& file) {
    if (file) check_reports(config, options, *file);
  }(more));
}

}  // namespace ds::tools
