// SPDX-License-Identifier: Apache-2.0
#include "monitor/csv_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/appended_file.h"
#include "base/json.h"
#include "monitor/scalars.h"

namespace ds::monitor {
namespace {

// As Python prints it.
std::string python_text(double x) {
  if (std::isnan(x)) return "nan";
  return std::isinf(x) ? x > 0 ? "inf" : "-inf" : Json(x).dump();
}

class CsvFiles final : public Monitor {
 public:
  CsvFiles(std::string directory, bool has_loss_scale)
      : directory_(std::move(directory)), has_loss_scale_(has_loss_scale) {
    file_of(kTrainLossTag);  // a directory that takes no file is known before the first step
  }

  void step(const StepRecord& record) override {
    for (const Scalar& s : scalars_of(record, has_loss_scale_)) write(s);
  }
  void validation(i64 step, double loss) override { write(validation_scalar(step, loss)); }

 private:
  void write(const Scalar& s) { file_of(s.tag).append(fmt::format("{},{}\r\n", s.at, python_text(s.value))); }

  AppendedFile& file_of(const std::string& tag) {
    if (const auto there = files_.find(tag); there != files_.end()) return there->second;
    std::string name = tag;
    std::ranges::replace_if(
        name, [](char c) { return c == '/' || c == ' '; }, '_');
    AppendedFile& file = files_.try_emplace(tag, fmt::format("{}/{}.csv", directory_, name)).first->second;
    file.cut_torn_line();
    if (file.is_empty()) file.append(fmt::format("step,{}\r\n", tag.substr(tag.rfind('/') + 1)));
    return file;
  }

  const std::string directory_;
  const bool has_loss_scale_;
  std::map<std::string, AppendedFile> files_;
};

}  // namespace

std::unique_ptr<Monitor> make_csv_files(const std::string& directory, bool has_loss_scale) {
  return std::make_unique<CsvFiles>(directory, has_loss_scale);
}

}  // namespace ds::monitor
