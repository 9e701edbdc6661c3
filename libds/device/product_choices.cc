// SPDX-License-Identifier: Apache-2.0
#include "device/product_choices.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string_view>
#include <utility>

#include "base/file.h"
#include "base/limits.h"
#include "ds/log.h"

namespace ds {
namespace {

constexpr std::string_view kHeader = "# ds-autotune/1\n";
constexpr i64 kMostBytes = i64{16} << 20;
constexpr i64 kFields = 4;

// Length of the whole lines in a text; the last line may be incomplete after a full disk.
size_t whole_lines(std::string_view text) { return text.rfind('\n') + 1; }

// The same for an open file of `size` bytes; -1: it is not a file of choices.
i64 whole_lines(int fd, i64 size) {
  std::array<char, 4096> bytes{};  // longer than any line
  const auto read_at = [&](i64 begin) {
    const ssize_t n = pread(fd, bytes.data(), bytes.size(), begin);
    return std::string_view(bytes.data(), n < 0 ? 0 : static_cast<size_t>(n));
  };
  const std::string_view head = read_at(0).substr(0, kHeader.size());
  if (!kHeader.starts_with(head)) return -1;
  if (head.size() < kHeader.size()) return 0;
  const i64 begin = std::max<i64>(0, size - std::ssize(bytes));
  const size_t end = whole_lines(read_at(begin));
  return end > 0 ? begin + static_cast<i64>(end) : -1;
}

// Appends to an open file under a lock; returns 0 or errno. Removes a line that cannot be written completely.
int append_whole(int fd, const std::string& product, const std::string& algorithm) {
  struct stat st {};
  if (flock(fd, LOCK_EX) != 0 || fstat(fd, &st) != 0) return errno;
  const i64 size = whole_lines(fd, st.st_size);
  if (size < 0) return EEXIST;
  if (size < st.st_size && ftruncate(fd, size) != 0) return errno;
  const std::string line = fmt::format("{}{}\t{}\n", size == 0 ? kHeader : "", product, algorithm);
  const ssize_t written = write(fd, line.data(), line.size());
  if (written == static_cast<ssize_t>(line.size())) return 0;
  const int reason = written < 0 ? errno : ENOSPC;
  return written > 0 && ftruncate(fd, size) != 0 ? errno : reason;
}

}  // namespace

ProductChoices::ProductChoices(std::string file, bool may_be_new) : file_(std::move(file)) {
  std::error_code error;
  const bool exists = std::filesystem::exists(file_, error);
  DS_CHECK(exists || may_be_new, Errc::Config, "cuda.autotune_file: there is no {}; a run with cuda.autotune makes one",
           file_);
  if (!exists) return;
  std::string text = read_text_file(file_, kMostBytes, Errc::Config);
  if (const size_t whole = whole_lines(text); whole < text.size() && (whole > 0 || kHeader.starts_with(text))) {
    log_message(LogLevel::Warning, fmt::format("{}: ignoring its incomplete last line", file_));
    text.resize(whole);
  }
  if (text.empty()) return;
  DS_CHECK(text.starts_with(kHeader), Errc::Config, "{}: is not an autotune file: its first line is not \"{}\"", file_,
           kHeader.substr(0, kHeader.size() - 1));
  i64 number = 2;
  for (size_t begin = kHeader.size(); begin < text.size(); ++number) {
    const size_t end = text.find('\n', begin), tab = text.rfind('\t', end);
    DS_CHECK(end != std::string::npos && tab != std::string::npos && tab > begin && tab + 1 < end &&
                 std::count(text.begin() + static_cast<std::ptrdiff_t>(begin),
                            text.begin() + static_cast<std::ptrdiff_t>(end), '\t') == kFields - 1,
             Errc::Config, "{}:{}: expected GPU, library, product and algorithm; remove this line", file_, number);
    choices_.try_emplace(text.substr(begin, tab - begin), text.substr(tab + 1, end - tab - 1));
    begin = end + 1;
  }
}

void ProductChoices::check_machine(const std::string& machine) const {
  const std::lock_guard lock(mutex_);
  const auto next = choices_.lower_bound(machine);
  if (choices_.empty() || (next != choices_.end() && next->first.starts_with(machine))) return;
  std::set<std::string> machines;
  const auto text_of = [](const std::string& product) {
    const size_t gpu = product.find('\t'), library = product.find('\t', gpu + 1);
    return fmt::format("{} with cuBLASLt {}", product.substr(0, gpu), product.substr(gpu + 1, library - gpu - 1));
  };
  for (const auto& [product, ignored] : choices_) machines.insert(text_of(product));
  log_message(
      LogLevel::Warning,
      fmt::format("cuda.autotune_file: {} has choices for {}, and none for {}: bits are not those of runs there", file_,
                  fmt::join(machines, ", "), text_of(machine)));
}

std::string ProductChoices::find(const std::string& product) const {
  const std::lock_guard lock(mutex_);
  const auto at = choices_.find(product);
  return at == choices_.end() ? "" : at->second;
}

void ProductChoices::add(const std::string& product, const std::string& algorithm) {
  const std::lock_guard lock(mutex_);
  if (!choices_.try_emplace(product, algorithm).second) return;
  const int fd = open(file_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  const int reason = fd < 0 ? errno : append_whole(fd, product, algorithm);
  if (fd >= 0) close(fd);
  if (reason != 0 && !std::exchange(warned_, true))
    log_message(
        LogLevel::Warning,
        fmt::format("cuda.autotune_file: {} cannot be written: {}; other runs will not have the choices of this one",
                    file_, system_reason(reason)));
}

}  // namespace ds
