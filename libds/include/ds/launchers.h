// SPDX-License-Identifier: Apache-2.0
#pragma once
// Detects launchers of parallel programs other than ds-launch.

#include <optional>
#include <string>
#include <vector>

#include "ds/error.h"

namespace ds {

// A launcher that started this process as one of several copies.
struct OtherLauncher {
  std::string name;      // of its command: "srun"
  std::string variable;  // the environment variable that shows it, as "NAME=value"
  int processes = 0;     // 0: the launcher states only the rank
};
// Returns nothing if this process is the only one, or was started by hand. `environment` holds "NAME=value" strings;
// `on_terminal` is true if standard input is a terminal. The known launchers are listed in base/launchers.h.
DS_API std::optional<OtherLauncher> other_launcher(const std::vector<std::string>& environment, bool on_terminal);

}  // namespace ds
