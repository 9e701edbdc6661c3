// SPDX-License-Identifier: Apache-2.0
#include "monitor/csv_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
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

constexpr std::string_view kHeader = "step,", kEnd = ".csv";

std::string name_of(std::string_view tag) {
  std::string name(tag);
  std::ranges::replace_if(
      name, [](char c) { return c == '/' || c == ' '; }, '_');
  return name;
}

// How the name of a file begins; empty: it is none of ours.
std::string family_of(std::string_view name) {
  if (!name.ends_with(kEnd)) return "";
  for (const char* tags : kTagFamilies)
    if (const std::string family = name_of(tags); name.starts_with(family)) return family;
  return "";
}

std::string header_of(std::string_view last) { return fmt::format("{}{}\r\n", kHeader, last); }

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
    const std::string path = fmt::format("{}/{}{}", directory_, name_of(tag), kEnd);
    AppendedFile file(path);
    const std::string header = header_of(tag.substr(tag.rfind('/') + 1));
    DS_CHECK(file.begins(header), Errc::Io,
             "cannot write {}: it is not a file of csv_monitor, which begins with \"{}\"", path,
             header.substr(0, header.size() - 2));
    file.cut_torn_line();
    if (file.is_empty()) file.append(header);
    return files_.try_emplace(tag, std::move(file)).first->second;
  }

  const std::string directory_;
  const bool has_loss_scale_;
  std::map<std::string, AppendedFile> files_;
};

}  // namespace

void check_csv_files(const std::string& directory, std::string_view key) {
  namespace fs = std::filesystem;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string path = it->path(), name = it->path().filename(), family = family_of(name);
    if (family.empty()) continue;
    const std::string why = why_not_appendable(path);
    DS_CHECK(why.empty(), Errc::Config, "{}: {} {}: remove it, or choose another directory", key, path, why);
    const std::string header = header_of(name.substr(family.size(), name.size() - family.size() - kEnd.size()));
    DS_CHECK(AppendedFile(path).begins(header), Errc::Config,
             "{}: {} is not a file of csv_monitor, which begins with \"{}\": choose another directory", key, path,
             header.substr(0, header.size() - 2));
  }
}

bool is_csv_file(std::string_view name) { return !family_of(name).empty(); }

std::unique_ptr<Monitor> make_csv_files(const std::string& directory, bool has_loss_scale) {
  return std::make_unique<CsvFiles>(directory, has_loss_scale);
}

}  // namespace ds::monitor
