#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# Tables of Arrow and Parquet (tests/golden/make_arrow.py): where the build has Apache Arrow they train as the same JSONL
# does, and hostile ones are refused; else all are, by what is missing.

bats_require_minimum_version 1.5.0

load tiny

has_arrow() { ds-train --version | grep -q arrow; }
tables=$BATS_TEST_DIRNAME/../golden/arrow

@test "without Apache Arrow tables are refused by what is missing" {
  ! has_arrow || skip 'this build has it'
  for file in texts.parquet texts.arrow texts.feather; do
    refused 4 "$file' is " --set data.train="$tables/$file"
    refused 4 'this build has no Apache Arrow (DS_ARROW of CMake): convert it to JSONL' --set data.train="$tables/$file"
  done
  refused 2 "none.parquet" --set data.train=none.parquet
}

@test "tables train as the same JSONL does, and resume bit for bit" {
  has_arrow || skip 'this build has no Apache Arrow'
  for name in texts prompts messages; do
    ds-train cfg.json --out jsonl --quiet --steps 4 --set data.train="$tables/$name.jsonl"
    for kind in parquet arrow feather; do
      ds-train cfg.json --out r --quiet --steps 2 --set data.train="$tables/$name.$kind"
      ds-launch -n 2 ds-train cfg.json --out r --quiet --steps 4 --resume latest --set data.train="$tables/$name.$kind"
      assert_equal "$(losses r)" "$(losses jsonl)"
      rm -rf r
    done
    rm -rf jsonl
  done
}

@test "hostile tables are refused, and name file and row" {
  has_arrow || skip 'this build has no Apache Arrow'
  for file in bad-bits.parquet bad-cut.parquet bad-cut.arrow bad-empty.arrow; do
    refused 3 "$file': is no " --set data.train="$tables/$file"
  done
  refused 3 'bad-null.parquet: row 2: its column "text" is null' --set data.train="$tables/bad-null.parquet"
  refused 3 "bad-columns.parquet': the table has no column" --set data.train="$tables/bad-columns.parquet"
  refused 4 "bad-type.parquet': its column \"text\" is of type int64" --set data.train="$tables/bad-type.parquet"
  refused 3 'bad-bomb.parquet: row 1: its column "text" is longer than 64 MiB' --set data.train="$tables/bad-bomb.parquet"
}
