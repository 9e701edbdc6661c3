// SPDX-License-Identifier: Apache-2.0
#pragma once
// Launchers of parallel programs other than ds-launch.

#include <optional>
#include <string>
#include <vector>

#include "ds/error.h"

namespace ds {

// One that started this process as one of several copies.
struct OtherLauncher {
  std::string name;      // of its command: "srun"
  std::string variable;  // "NAME=value" of the environment, which shows it
  int processes = 0;     // 0: the launcher states the rank alone
};
// Nothing: this process is the only one, or was started by hand. environment: "NAME=value" strings; on_terminal:
// standard input is one. Knows the table of base/launchers.h.
DS_API std::optional<OtherLauncher> other_launcher(const std::vector<std::string>& environment, bool on_terminal);

}  // namespace ds
