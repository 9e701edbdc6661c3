// SPDX-License-Identifier: Apache-2.0
#include "probe/resident.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>

namespace ds::probe {
namespace {

// A file in /proc that is read into preallocated memory, since nothing may be allocated while a run steps.
class ProcFile {
 public:
  explicit ProcFile(const char* path) noexcept {
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    for (ssize_t n = 1; n > 0 && bytes_ < text_.size(); bytes_ += static_cast<size_t>(n > 0 ? n : 0))
      n = ::read(fd, text_.data() + bytes_, text_.size() - bytes_);
    ::close(fd);
  }
  bool empty() const noexcept { return bytes_ == 0; }
  // The value of a line "Key:   123 kB" in bytes; 0 if there is none.
  i64 bytes_of(std::string_view key) const noexcept {
    const std::string_view text(text_.data(), bytes_);
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string_view line = text.substr(at, end - at);
      at = end + 1;
      if (!line.starts_with(key) || line.size() <= key.size() || line[key.size()] != ':') continue;
      const size_t digits = line.find_first_of("0123456789");
      i64 kib = 0;
      if (digits != line.npos) std::from_chars(line.data() + digits, line.data() + line.size(), kib);
      return kib * 1024;
    }
    return 0;
  }

 private:
  std::array<char, 8192> text_{};
  size_t bytes_ = 0;
};

}  // namespace

ResidentMemory resident_memory() noexcept {
  const ProcFile status("/proc/self/status");
  ResidentMemory memory{.all = status.bytes_of("VmRSS"), .highest = status.bytes_of("VmHWM")};
  const ProcFile rollup("/proc/self/smaps_rollup");
  memory.own = rollup.empty() ? status.bytes_of("RssAnon") + status.bytes_of("RssShmem")
                              : rollup.bytes_of("Anonymous") + rollup.bytes_of("Pss_Shmem");
  return memory;
}

ResidentMeter::ResidentMeter() noexcept {
  begin_peaks();
  base_ = last_;
}

void ResidentMeter::begin_peaks() noexcept {
  peak_own_ = peak_all_ = 0;
  read();
  highest_before_ = last_.highest;
}

i64 ResidentMeter::read() noexcept {
  const Clock::time_point start = Clock::now();
  last_ = resident_memory();
  const Clock::time_point end = Clock::now();
  peak_own_ = std::max(peak_own_, last_.own);
  peak_all_ = std::max(peak_all_, last_.all);
  due_ = end + std::max<Clock::duration>(std::chrono::seconds(1), 1000 * (end - start));
  return last_.own;
}

i64 ResidentMeter::sample() noexcept { return Clock::now() >= due_ ? read() : last_.own; }

ResidentMeter::Peaks ResidentMeter::peaks() const noexcept {
  const i64 highest = resident_memory().highest;
  return {.own = peak_own_, .momentary = highest > highest_before_ ? std::max<i64>(highest - peak_all_, 0) : 0};
}

}  // namespace ds::probe
