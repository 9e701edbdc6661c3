// SPDX-License-Identifier: Apache-2.0
#include "monitor/prometheus_file.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <map>

#include "base/file.h"

namespace ds::monitor {
namespace {

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '\\' || c == '"') out += '\\';
      out += c;
    }
  }
  return out;
}

std::string number_text(const StepField::Number& number) {
  if (const auto* const n = std::get_if<i64>(&number)) return fmt::format("{}", *n);
  const double x = std::get<double>(number);
  if (std::isnan(x)) return "NaN";
  return std::isinf(x) ? x > 0 ? "+Inf" : "-Inf" : fmt::format("{}", x);
}

class Text {
 public:
  explicit Text(const std::string& job) : job_(fmt::format("job=\"{}\"", escaped(job))) {}

  // `metric`: without the prefix that all have.
  void add(std::string_view metric, std::string_view help, const StepField::Number& value) {
    head(metric, help);
    text_ += fmt::format("ds_train_{}{{{}}} {}\n", metric, job_, number_text(value));
  }
  void add(std::string_view metric, std::string_view help, std::string_view label, const StepField::Named& values) {
    if (values.empty()) return;
    head(metric, help);
    for (const auto& [name, value] : values)
      text_ += fmt::format("ds_train_{}{{{},{}=\"{}\"}} {}\n", metric, job_, label, escaped(name), number_text(value));
  }
  std::string take() { return std::move(text_); }

 private:
  void head(std::string_view metric, std::string_view help) {
    const std::string_view type = metric.ends_with("_total") ? "counter" : "gauge";
    text_ += fmt::format("# HELP ds_train_{} {}\n# TYPE ds_train_{} {}\n", metric, help, metric, type);
  }
  const std::string job_;
  std::string text_;
};

class PrometheusFile final : public Monitor {
 public:
  PrometheusFile(const PrometheusConfig& config, i64 steps_per_print) : config_(config), every_(steps_per_print) {
    const PendingFile tried(
        follow_links(config.file));  // a directory that takes no file is known before the first step
  }

  void step(const StepRecord& record) override {
    last_ = record;
    is_written_ = false;
    if (record.step % every_ == 0) write();
  }
  void validation(i64, double loss) override {
    validation_loss_ = loss;
    is_written_ = false;
  }
  void end() override {
    if (last_ && !is_written_) write();
  }

 private:
  void write() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    replace_text_file(follow_links(config_.file), prometheus_text(*last_, validation_loss_, config_.job_name,
                                                                  std::chrono::duration<double>(now).count()));
    is_written_ = true;
  }

  const PrometheusConfig config_;
  const i64 every_;
  std::optional<StepRecord> last_;
  std::optional<double> validation_loss_;
  bool is_written_ = false;
};

}  // namespace

std::string prometheus_text(const StepRecord& r, std::optional<double> validation_loss, const std::string& job,
                            double updated) {
  Text text(job);
  for (const StepField& f : step_fields()) {
    if (f.metric == nullptr) continue;
    const StepField::Value value = f.value(r);
    if (const auto* const n = std::get_if<i64>(&value)) text.add(f.metric, f.help, *n);
    if (const auto* const x = std::get_if<double>(&value)) text.add(f.metric, f.help, *x);
    if (const auto* const named = std::get_if<StepField::Named>(&value)) text.add(f.metric, f.help, f.label, *named);
  }
  if (validation_loss) text.add("validation_loss", "Loss of the last evaluation.", *validation_loss);
  text.add("updated_timestamp_seconds", "When this was written.", updated);
  return text.take();
}

std::unique_ptr<Monitor> make_prometheus_file(const PrometheusConfig& config, i64 steps_per_print) {
  return std::make_unique<PrometheusFile>(config, steps_per_print);
}

}  // namespace ds::monitor
