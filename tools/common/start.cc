// SPDX-License-Identifier: Apache-2.0
#include "common/start.h"

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>

#include "ds/error.h"

namespace ds::tools {

void start_ranks(int ranks, const std::vector<std::string>& options, const std::vector<std::string>& command) {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const std::filesystem::path beside = self.parent_path() / "ds-launch";
  const std::string launcher = std::filesystem::exists(beside) ? beside.string() : "ds-launch";
  std::vector<std::string> words = {launcher, "-n", std::to_string(ranks)};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back(self);
  words.insert(words.end(), command.begin() + 1, command.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);  // run_main ignores them
  ::execvp(launcher.c_str(), pointers.data());
  throw Error(Errc::Unavailable, fmt::format("{} cannot be started: {}", launcher, std::strerror(errno)));
}

}  // namespace ds::tools
