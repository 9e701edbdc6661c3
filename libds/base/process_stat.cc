// SPDX-License-Identifier: Apache-2.0
#include "base/process_stat.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

namespace ds {
namespace {

constexpr u64 kExiting = 4;  // PF_EXITING of include/linux/sched.h, in the ninth field of proc(5)

}  // namespace

ProcessStat process_stat(i32 pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = text.rfind(')');  // the name may contain anything
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  ProcessStat stat;
  std::string skipped;
  u64 flags = 0;
  rest >> stat.state;
  for (int field = 4; field < 9; ++field) rest >> skipped;
  rest >> flags;
  stat.exiting = (flags & kExiting) != 0;
  for (int field = 10; field < 22; ++field) rest >> skipped;
  rest >> stat.start;
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
