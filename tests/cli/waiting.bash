# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash

until_true() { # seconds command...: within so many seconds
  local tries=$(($1 * 20))
  shift
  until "$@"; do
    ((tries-- > 0)) || return 1
    sleep 0.05
  done
}

# Skips a long test unless the slow set runs (scripts/test --slow).
slow_only() { [[ -n ${DS_SLOW-} ]] || skip "it is in the slow set"; }
