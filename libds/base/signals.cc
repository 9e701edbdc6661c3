// SPDX-License-Identifier: Apache-2.0
#include "ds/signals.h"

#include <algorithm>
#include <array>
#include <csignal>

namespace ds {
namespace {

constexpr std::array kFaults = {SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS};
// Signals that are ignored, stop or continue by default; reserved ones; and those treated as errors of write().
constexpr std::array kOthers = {SIGCHLD, SIGURG,  SIGWINCH, SIGCONT, SIGSTOP, SIGTSTP,
                                SIGTTIN, SIGTTOU, SIGKILL,  SIGPIPE, SIGXFSZ};

}  // namespace

std::vector<int> fault_signals() { return {kFaults.begin(), kFaults.end()}; }

std::vector<int> ending_signals() {
  std::vector<int> signals;
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    const bool of_libc = signal >= __SIGRTMIN && signal < SIGRTMIN;
    if (!of_libc && std::ranges::find(kFaults, signal) == kFaults.end() &&
        std::ranges::find(kOthers, signal) == kOthers.end())
      signals.push_back(signal);
  }
  return signals;
}

}  // namespace ds
