// SPDX-License-Identifier: Apache-2.0
#include "base/process_stat.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace ds {
namespace {

constexpr u64 kExiting = 4;  // PF_EXITING of include/linux/sched.h, in the ninth field of proc(5)

}  // namespace

// Allocates nothing: ranks that wait for others call it within a training step.
ProcessStat process_stat(i32 pid) {
  char path[32], line[1024];  // proc(5): fields are short, and the name has at most 64 bytes
  *fmt::format_to_n(path, sizeof path - 1, "/proc/{}/stat", pid).out = 0;
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t n = ::read(fd, line, sizeof line);
  ::close(fd);
  const std::string_view text(line, static_cast<size_t>(std::max<ssize_t>(n, 0)));
  const size_t name_end = text.rfind(')');  // the name may contain anything
  if (name_end == text.npos) return {};
  std::string_view rest = text.substr(name_end + 1);
  const auto next = [&] {
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    const std::string_view field = rest.substr(0, rest.find_first_of(" \n"));
    rest.remove_prefix(field.size());
    return field;
  };
  const auto number = [&] {
    const std::string_view field = next();
    u64 value = 0;
    std::from_chars(field.data(), field.data() + field.size(), value);
    return value;
  };
  ProcessStat stat;
  const std::string_view state = next();
  stat.state = state.empty() ? '\0' : state.front();
  for (int field = 4; field < 9; ++field) next();
  stat.exiting = (number() & kExiting) != 0;
  for (int field = 10; field < 22; ++field) next();
  stat.start = number();
  return stat;
}

bool has_ended(const ProcessStat& now, u64 start) noexcept {
  return now.state == 0 || now.state == 'Z' || now.state == 'X' || now.start != start;
}

u64 pid_namespace() noexcept {
  struct stat st {};
  return stat("/proc/self/ns/pid", &st) == 0 ? st.st_ino : 0;
}

}  // namespace ds
