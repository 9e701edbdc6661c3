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

std::string sample_text(double x) {
  if (std::isnan(x)) return "NaN";
  return std::isinf(x) ? x > 0 ? "+Inf" : "-Inf" : fmt::format("{}", x);
}

class Text {
 public:
  explicit Text(const std::string& job) : job_(fmt::format("job=\"{}\"", escaped(job))) {}

  void add(const char* name, const char* type, const char* help, double value) {
    head(name, type, help);
    text_ += fmt::format("{}{{{}}} {}\n", name, job_, sample_text(value));
  }
  static i64 sample(i64 value) { return value; }
  static std::string sample(double value) { return sample_text(value); }
  template <class Number>
  void add(const char* name, const char* type, const char* help, const char* label,
           const std::map<std::string, Number>& values) {
    if (values.empty()) return;
    head(name, type, help);
    for (const auto& [key, value] : values)
      text_ += fmt::format("{}{{{},{}=\"{}\"}} {}\n", name, job_, label, escaped(key), sample(value));
  }
  std::string take() { return std::move(text_); }

 private:
  void head(const char* name, const char* type, const char* help) {
    text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
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
  const auto number = [](i64 n) { return static_cast<double>(n); };
  text.add("ds_train_steps_total", "counter", "Steps of the run, skipped ones included.", number(r.step));
  text.add("ds_train_samples_total", "counter", "Samples that the run has seen.", number(r.samples));
  text.add("ds_train_loss", "gauge", "Training loss of the last step.", r.loss);
  if (validation_loss) text.add("ds_train_validation_loss", "gauge", "Loss of the last evaluation.", *validation_loss);
  text.add("ds_train_grad_norm", "gauge", "Norm of the gradient before clipping.", r.grad_norm);
  if (r.outer_grad_norm)
    text.add("ds_train_outer_grad_norm", "gauge", "Norm of what the steps of workers have made of parameters.",
             *r.outer_grad_norm);
  text.add("ds_train_compression_norm", "gauge", "Norms of what compression has lost, after the last step.", "of",
           r.compression);
  text.add("ds_train_learning_rate", "gauge", "Learning rate of the last step.", r.lr);
  text.add("ds_train_loss_scale", "gauge", "Loss scale of the last step.", r.loss_scale);
  text.add("ds_train_step_seconds", "gauge", "Duration of the last step.", r.step_ms / 1e3);
  text.add("ds_train_tokens_per_second", "gauge", "Tokens of all ranks per second in the last step.", r.tokens_per_s);
  text.add("ds_train_mfu_ratio", "gauge", "Model FLOP/s over the measured rate of a matrix product.", r.mfu);
  text.add("ds_train_memory_bytes", "gauge", "Peak memory of rank 0 by tag.", "tag", r.memory_bytes);
  text.add("ds_train_comm_bytes", "gauge", "Bytes that rank 0 sent in the last step.", "operation", r.comm_bytes);
  text.add("ds_train_updated_timestamp_seconds", "gauge", "When this was written.", updated);
  return text.take();
}

std::unique_ptr<Monitor> make_prometheus_file(const PrometheusConfig& config, i64 steps_per_print) {
  return std::make_unique<PrometheusFile>(config, steps_per_print);
}

}  // namespace ds::monitor
