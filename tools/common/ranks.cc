// SPDX-License-Identifier: Apache-2.0
#include "common/ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <limits>

#include "ds/error.h"
#include "ds/launchers.h"

namespace ds::tools {
namespace {

int number_of_variable(const char* name, int fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr) return fallback;
  int value = 0;
  const std::string_view view(text);
  const auto [end, error] = std::from_chars(view.begin(), view.end(), value);
  if (error != std::errc{} || end != view.end() || value < 0) {
    throw Error(Errc::Config, fmt::format("environment variable {} is not a whole number from 0 to {}: {}", name,
                                          std::numeric_limits<int>::max(), text));
  }
  return value;
}

}  // namespace

std::vector<std::string> own_environment() {
  std::vector<std::string> strings;
  for (char** variable = environ; *variable != nullptr; ++variable) strings.emplace_back(*variable);
  return strings;
}

RankInfo ranks_of_environment() {
  RankInfo r;
  const std::optional<OtherLauncher> other = other_launcher(own_environment(), ::isatty(STDIN_FILENO) == 1);
  if (other && std::getenv("WORLD_SIZE") == nullptr) {
    const std::string copies = other->processes > 0 ? std::to_string(other->processes) : "several";
    throw Error(Errc::Config,
                fmt::format("{} alone starts {} independent runs ({}): start them with ds-launch -n {}; if that is "
                            "intended, set WORLD_SIZE=1",
                            other->name, copies, other->variable, other->processes > 0 ? copies : "N"));
  }
  r.world_size = number_of_variable("WORLD_SIZE", 1);
  r.rank = number_of_variable("RANK", 0);
  r.local_rank = number_of_variable("LOCAL_RANK", 0);
  r.local_world_size = number_of_variable("LOCAL_WORLD_SIZE", r.world_size);
  if (const char* job = std::getenv("DS_JOB")) r.job = job;
  if (r.world_size < 1 || r.rank >= r.world_size) {
    throw Error(Errc::Config, fmt::format("environment: RANK {} is not below WORLD_SIZE {}", r.rank, r.world_size));
  }
  if (r.local_world_size < 1 || r.local_world_size > r.world_size || r.local_rank >= r.local_world_size) {
    throw Error(Errc::Config, fmt::format("environment: LOCAL_RANK {} and LOCAL_WORLD_SIZE {} do not fit WORLD_SIZE {}",
                                          r.local_rank, r.local_world_size, r.world_size));
  }
  if (r.local_rank > r.rank || r.rank - r.local_rank > r.world_size - r.local_world_size) {
    throw Error(Errc::Config, fmt::format("environment: RANK {} and LOCAL_RANK {} do not fit WORLD_SIZE {} and "
                                          "LOCAL_WORLD_SIZE {}: the ranks of a node have consecutive numbers",
                                          r.rank, r.local_rank, r.world_size, r.local_world_size));
  }
  return r;
}

}  // namespace ds::tools
