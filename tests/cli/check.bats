#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/check: the repository passes, and each rule finds a planted violation.

setup() {
  bats_load_library bats-support
  bats_load_library bats-assert
  repo=$BATS_TEST_TMPDIR/repo
  mkdir -p "$repo/scripts" "$repo/libds/include/ds" "$repo/tools" "$repo/man"
  cp "$DS_SOURCE/scripts/check" "$repo/scripts/"
  cp "$DS_SOURCE/.clang-format" "$repo/"
  git init -q "$repo"
}

# plant FILE LINE...
plant() {
  local file=$repo/$1
  shift
  mkdir -p "$(dirname "$file")"
  printf '%s\n' "$@" >"$file"
}

SPDX='// SPDX-License-Identifier: Apache-2.0'

@test "the repository keeps every rule" {
  run "$DS_SOURCE/scripts/check"
  assert_success
}

@test "an unknown rule is a usage error" {
  run "$repo/scripts/check" nonsense
  assert_failure 2
}

@test "format" {
  plant libds/base/a.cc "$SPDX" 'int  f( ) ;'
  run "$repo/scripts/check" format
  assert_failure 1
  assert_output --partial libds/base/a.cc
}

@test "spdx" {
  plant libds/base/a.cc 'int f();'
  run "$repo/scripts/check" spdx
  assert_failure 1
  assert_output --partial 'libds/base/a.cc: no SPDX line'
}

@test "layers: upwards, between siblings, and through a public header" {
  plant libds/run/train.cc "$SPDX" '#include "ds/train.h"'
  plant libds/include/ds/train.h "$SPDX" '#include "ds/error.h"'
  plant libds/include/ds/error.h "$SPDX"
  plant libds/include/ds/model_config.h "$SPDX"
  run "$repo/scripts/check" layers
  assert_success
  plant libds/include/ds/unheard_of.h "$SPDX" '#include "ds/error.h"'
  plant libds/base/a.cc "$SPDX" '#include "device/memory.h"'
  plant libds/zero/b.cc "$SPDX" '#include "checkpoint/save.h"'
  plant libds/data/c.cc "$SPDX" '#include "ds/train.h"'
  plant libds/model/d.cc "$SPDX" '#include "zero/zero.h"'
  plant libds/base/e.cc "$SPDX" '#include <ds/model_config.h>'
  plant kernels/ref/f.cc "$SPDX" '#include "ds/error.h"'
  run "$repo/scripts/check" layers
  assert_failure 1
  assert_output --partial 'libds/base/a.cc:2: base must not include device'
  assert_output --partial 'libds/zero/b.cc:2: zero must not include checkpoint'
  assert_output --partial 'libds/data/c.cc:2: data must not include run'
  assert_output --partial 'libds/model/d.cc:2: model must not include zero'
  assert_output --partial 'libds/base/e.cc:2: base must not include config'
  assert_output --partial 'libds/include/ds/unheard_of.h:2: scripts/check knows no level of ds/unheard_of.h'
  assert_output --partial 'kernels/ref/f.cc:2: kernels must not include base'
}

@test "third parties" {
  plant libds/zero/a.cc "$SPDX" '#include <hdf5.h>' '#include <mpi.h>' '#include <CLI/CLI.hpp>' \
    '#include <boost/interprocess/shared_memory_object.hpp>' '#include <oneapi/dnnl/dnnl.hpp>'
  plant libds/formats/b.cc "$SPDX" '#include <hdf5.h>'
  run "$repo/scripts/check" third_parties
  assert_failure 1
  for line in 2 3 4 5 6; do assert_output --partial "libds/zero/a.cc:$line:"; done
  refute_output --partial libds/formats
}

@test "tools" {
  plant tools/ds-x.cc "$SPDX" '#include "ds/error.h"' '#include "common/tool.h"' '#include "comm/communicator.h"'
  yes '//' | head -n 250 >>"$repo/tools/ds-x.cc"
  run "$repo/scripts/check" tool_includes tool_size
  assert_failure 1
  assert_output --partial 'tools/ds-x.cc:4:'
  refute_output --partial 'tools/ds-x.cc:2:'
  assert_output --partial 'tools/ds-x.cc: 254 lines'
}

@test "man, shell and paths" {
  plant man/ds-x.1 '.Dd today' '.Nonsense'
  plant scripts/bad '#!/bin/bash' 'rm $1'
  plant README.md 'cd /'home/somebody/libds
  run "$repo/scripts/check" man shell machine_paths
  assert_failure 1
  assert_output --partial man/ds-x.1
  assert_output --partial SC2086
  assert_output --partial README.md:1
}

@test "test_map: a test file that is missing, an entry that does not exist" {
  plant tests/README.md '| `libds/zero`, `libds/gone` | unit: layout, lost; cli: train |'
  cp "$DS_SOURCE/tests/select" "$repo/tests/"
  plant tests/unit/layout_test.cc "$SPDX"
  plant tests/fuzz/new_fuzz_test.cc "$SPDX"
  plant tests/cli/train.bats "$SPDX"
  plant libds/zero/layout.cc "$SPDX"
  run "$repo/scripts/check" test_map
  assert_failure 1
  assert_line 'libds/gone is in the map of tests/README.md and does not exist'
  assert_line 'unit/lost_test is in the map of tests/README.md and does not exist'
  assert_line 'tests/README.md: the map lacks fuzz/new_fuzz_test'
  refute_output --partial layout_test
  refute_output --partial cli/train
}

@test "tests/select: rooms, paths and changed files" {
  plant tests/README.md '| `libds/zero`, `ds/state.h` | unit: layout; cli: train |' '| `tools` | cli: common |' \
    '| `tools/ds-train.cc` | cli: train |'
  cp "$DS_SOURCE/tests/select" "$repo/tests/"
  plant tests/unit/layout_test.cc "$SPDX" '#include "layouts.h"'
  plant tests/layouts.h "$SPDX"
  plant libds/zero/layout.cc "$SPDX"
  plant libds/include/ds/state.h "$SPDX"
  plant tools/ds-train.cc "$SPDX"
  plant tools/ds-new.cc "$SPDX"
  cd "$repo"
  for name in zero libds/zero/layout.cc ds/state.h; do
    run tests/select "$name"
    assert_success
    assert_output $'cli/train\nunit/layout_test'
  done
  run tests/select ds-new ds-train unit/layout_test
  assert_output $'cli/common\ncli/train\nunit/layout_test'
  run tests/select nowhere
  assert_failure 2
  git add . && git -c user.name=n -c user.email=e commit -qm first
  run tests/select --changed
  assert_output ''
  echo '//' >>tests/layouts.h
  run tests/select --changed HEAD
  assert_output unit/layout_test
  plant tools/ds-newer.cc "$SPDX"
  plant libds/other/x.cc "$SPDX"
  run tests/select --changed
  assert_output --partial cli/common
  assert_output --partial 'tests/README.md maps no tests to libds/other/x.cc'
}
