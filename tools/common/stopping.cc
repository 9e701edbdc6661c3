// SPDX-License-Identifier: Apache-2.0
#include "common/stopping.h"

#include <csignal>
#include <cstdlib>

#include "ds/signals.h"

namespace ds::tools {
namespace {

volatile std::sig_atomic_t asked_by = 0;

extern "C" void note_stop(int signal) {
  if (asked_by != 0 && signal == SIGINT) {  // the second Ctrl-C
    remove_shared_names();
    std::_Exit(128 + SIGINT);
  }
  asked_by = signal;
}

extern "C" void end_by(int signal) {
  remove_shared_names();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

void stop_after_a_step() {
  for (const std::vector<int>& signals : {ending_signals(), fault_signals()})
    for (const int signal : signals) {
      const auto before = std::signal(signal, end_by);
      if (before != SIG_DFL) std::signal(signal, before);  // ignored, or another's: Open MPI shows where a fault was
    }
  for (const int s : {SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP, SIGXCPU}) {
    if (std::signal(s, note_stop) == SIG_IGN && s == SIGHUP) std::signal(s, SIG_IGN);  // nohup(1)
  }
}

int stop_signal() noexcept { return asked_by; }

}  // namespace ds::tools
