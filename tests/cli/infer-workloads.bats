#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# A few random workloads and kills of ds-infer; the slow set has hundreds (tests/fault/infer-workloads).

bats_require_minimum_version 1.5.0

@test "lines of random workloads have the bytes that they have alone, and killed runs resume to them" {
  cd "$BATS_TEST_TMPDIR"
  timeout 300 "$DS_SOURCE/tests/fault/infer-workloads" --workloads 5 --kills 1
}
