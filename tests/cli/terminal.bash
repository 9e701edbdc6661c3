# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash

# Commands on a terminal: script(1) of Debian's bsdutils makes a pseudo-terminal, where the machine has any to give.
need_terminal() {
  local why
  why=$(script -qec true /dev/null </dev/null 2>&1) || skip "no pseudo-terminal here: $(head -n 1 <<<"$why")"
}
