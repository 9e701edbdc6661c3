// SPDX-License-Identifier: Apache-2.0
#pragma once
// The last step, as a file for the textfile collector of Prometheus's node exporter.

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "monitor/monitor.h"

namespace ds::monitor {

inline constexpr std::string_view kPrometheusBegin = "# HELP ds_train_";  // of every file
// In Prometheus's text format. `updated`: seconds since 1970.
std::string prometheus_text(const StepRecord& record, std::optional<double> validation_loss, const std::string& job,
                            double updated);

// Replaces the file, whole, at every printed step and at the end.
std::unique_ptr<Monitor> make_prometheus_file(const PrometheusConfig& config, i64 steps_per_print);

}  // namespace ds::monitor
