// SPDX-License-Identifier: Apache-2.0
#include "launch/environment.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace ds::launch {
namespace {

constexpr std::array<std::string_view, 23> kOfHere = {"HOME",          "HOSTNAME",
                                                      "HOST",          "LOGNAME",
                                                      "MAIL",          "OLDPWD",
                                                      "SHELL",         "SHLVL",
                                                      "TMPDIR",        "TMP",
                                                      "TEMP",          "TTY",
                                                      "USER",          "WINDOWID",
                                                      "DISPLAY",       "_",
                                                      "XAUTHORITY",    "WAYLAND_DISPLAY",
                                                      "KRB5CCNAME",    "NOTIFY_SOCKET",
                                                      "INVOCATION_ID", "JOURNAL_STREAM",
                                                      "PE_HOSTFILE"};
constexpr std::array<std::string_view, 11> kOfHerePrefixes = {
    "SSH_",           "XDG_",         "DBUS_",     "SLURM", "PBS_", "LSB_", "PMIX_", "OMPI_COMM_WORLD_",
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "DS_LAUNCH_"};

// Numbers of GPUs mean something on every host, names do not.
bool names_gpus(std::string_view variable) {
  const auto holds = [&](std::string_view text) { return variable.find(text) != std::string_view::npos; };
  return variable.starts_with("CUDA_VISIBLE_DEVICES=") && (holds("GPU-") || holds("MIG-"));
}

}  // namespace

Environment parse_environment(const std::vector<std::string>& strings) {
  Environment environment;
  add(environment, strings);
  return environment;
}

void add(Environment& environment, const std::vector<std::string>& strings) {
  for (const std::string& s : strings) {
    const std::size_t equals = s.find('=');
    if (equals != std::string::npos) environment[s.substr(0, equals)] = s.substr(equals + 1);
  }
}

std::string value_or(const Environment& environment, const std::string& name, std::string fallback) {
  const auto found = environment.find(name);
  return found != environment.end() ? found->second : std::move(fallback);
}

void forget_other_jobs(Environment& environment) {
  std::erase_if(environment, [](const auto& variable) {
    const std::string& name = variable.first;
    return name.starts_with("PMIX_") || name.starts_with("OMPI_COMM_WORLD_") || name.starts_with("OMPI_MCA_orte_") ||
           name.starts_with("OMPI_MCA_ess");
  });
}

std::vector<std::string> portable_environment(const std::vector<std::string>& environment) {
  std::vector<std::string> portable;
  for (const std::string& variable : environment) {
    const std::string_view name = std::string_view(variable).substr(0, variable.find('='));
    const auto begins = [&](std::string_view prefix) { return name.starts_with(prefix); };
    if (std::find(kOfHere.begin(), kOfHere.end(), name) == kOfHere.end() &&
        std::none_of(kOfHerePrefixes.begin(), kOfHerePrefixes.end(), begins) && !names_gpus(variable))
      portable.push_back(variable);
  }
  return portable;
}

}  // namespace ds::launch
