// SPDX-License-Identifier: Apache-2.0
#include "base/launchers.h"

#include <fmt/format.h>

#include <charconv>

#include "base/check.h"
#include "base/variables.h"
#include "ds/launchers.h"

namespace ds {
namespace {

// Empty: the variable is not set.
std::optional<std::string_view> value_in(const std::vector<std::string>& environment, std::string_view name) {
  for (const std::string_view variable : environment)
    if (!name.empty() && variable.size() > name.size() && variable.starts_with(name) && variable[name.size()] == '=')
      return variable.substr(name.size() + 1);
  return std::nullopt;
}

int number(std::optional<std::string_view> text) {
  int value = 0;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

}  // namespace

std::optional<OtherLauncher> other_launcher(const std::vector<std::string>& environment, bool on_terminal) {
  for (const Launcher& launcher : kLaunchers) {
    const int size = number(value_in(environment, launcher.size)), rank = number(value_in(environment, launcher.rank));
    if (size <= 1 && rank <= 0) continue;
    if (rank == 0 && on_terminal && value_in(environment, launcher.terminal)) continue;
    return OtherLauncher{
        .name = std::string(launcher.name),
        .variable = size > 1 ? fmt::format("{}={}", launcher.size, size) : fmt::format("{}={}", launcher.rank, rank),
        .processes = size > 1 ? size : 0};
  }
  return std::nullopt;
}

void require_mpi_launcher(int rank, int ranks) {
  DS_CHECK(ranks == 1 || variables::mpi_has_launcher(), Errc::Config,
           "RANK and WORLD_SIZE say that this is rank {} of {}, but it was not started by a launcher through which "
           "MPI finds the others: start with ds-launch -n {}",
           rank, ranks, ranks);
}

}  // namespace ds
