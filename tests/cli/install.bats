#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# The installed prefix: it can be moved, its tools run, and a program that knows only find_package(libds) builds and runs.

bats_require_minimum_version 1.5.0

load waiting

setup_file() {
  export PREFIX=$BATS_FILE_TMPDIR/moved
  cmake --install "$(dirname "$DS_BIN")" --prefix "$BATS_FILE_TMPDIR/first" >/dev/null
  mv "$BATS_FILE_TMPDIR/first" "$PREFIX"
}

setup() {
  bats_load_library bats-support
  bats_load_library bats-assert
  bats_load_library bats-file
}

@test "tools run from the moved prefix with their own library" {
  for tool in "$DS_BIN"/ds-*; do
    run -0 env -u LD_LIBRARY_PATH "$PREFIX/bin/$(basename "$tool")" --version
    assert_line --index 0 --regexp "^$(basename "$tool") [0-9]+\.[0-9]+\.[0-9]+"
    run -0 ldd "$PREFIX/bin/$(basename "$tool")"
    assert_output --partial "$PREFIX/"
    refute_output --partial 'not found'
    refute_output --partial "$DS_SOURCE"
  done
}

@test "every tool has its man page and completions" {
  for tool in "$DS_BIN"/ds-*; do
    name=$(basename "$tool")
    assert_file_exist "$PREFIX/share/man/man1/$name.1"
    run -0 bash -n "$PREFIX/share/bash-completion/completions/$name"
    run -0 grep -c -- --version "$PREFIX/share/bash-completion/completions/$name"
    assert_file_not_empty "$PREFIX/share/zsh/site-functions/_$name"
    assert_file_not_empty "$PREFIX/share/fish/vendor_completions.d/$name.fish"
  done
}

@test "no file of the prefix names the source tree" {
  run grep -rlI "$DS_SOURCE" "$PREFIX"
  assert_output ''
}

@test "every installed header compiles on its own" {
  slow_only
  for header in "$PREFIX"/include/ds/*.h "$PREFIX"/include/ds/kernels/*.h; do
    run -0 g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -I "$PREFIX/include" -x c++ - <<<"#include \"$header\""
  done
}

@test "a consumer builds with find_package and runs" {
  mkdir "$BATS_TEST_TMPDIR/app"
  cd "$BATS_TEST_TMPDIR/app"
  cat >CMakeLists.txt <<'END'
cmake_minimum_required(VERSION 3.25)
project(app LANGUAGES CXX)
find_package(libds 0.1 REQUIRED)
add_executable(app app.cc)
target_link_libraries(app PRIVATE libds::ds)
target_compile_features(app PRIVATE cxx_std_20)
END
  cat >app.cc <<'END'
#include <ds/config.h>
#include <ds/version.h>

#include <cstdio>

int main() {
  const auto r = ds::parse_config(R"({"zero_optimization": {"stage": 7}})", "app", {}, 1, ds::ConfigUse::Inspect);
  std::printf("%s\n%s\n", std::string(ds::version()).c_str(), r.message().c_str());
  try {
    ds::load_model_config("nowhere");
  } catch (const ds::Error& e) {
    return ds::exit_code(e.code());
  }
}
END
  local sanitize # a program whose library has sanitizers starts with them only if it has them, too
  sanitize=$(sed -n 's/^DS_SANITIZE:[A-Z]*=//p' "${DS_BIN%/bin}/CMakeCache.txt")
  run -0 cmake -S . -B build -G Ninja -DCMAKE_PREFIX_PATH="$PREFIX" -DCMAKE_CXX_FLAGS="${sanitize:+-fsanitize=$sanitize}"
  run -0 cmake --build build
  run -2 ./build/app # an exception crossed the library's border
  assert_line --index 0 0.1.0
  assert_line --index 1 --partial zero_optimization.stage
}

# The example of a model and samples of a program's own, built outside the source tree.
own_model_setup() {
  export OWN=$BATS_FILE_TMPDIR/own
  cd "$BATS_TEST_TMPDIR"
  export CUDA_VISIBLE_DEVICES= # runs here are of the CPU, also on a machine with a GPU
  cat >run.json <<'END'
{
  "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "steps": 20, "reduce_order": "micro",
  "data": {"seq_length": 16}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
}
END
  [[ ! -x $OWN/build/own_model ]] || return 0
  mkdir "$OWN"
  cp "$PREFIX"/share/doc/libds/examples/own_model.* "$OWN"
  cat >"$OWN/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(own LANGUAGES CXX)
find_package(libds 0.1 REQUIRED)
add_executable(own_model own_model.cc)
target_link_libraries(own_model PRIVATE libds::ds)
target_compile_features(own_model PRIVATE cxx_std_20)
target_compile_options(own_model PRIVATE -Wall -Wextra -Werror)
END
  local sanitize
  sanitize=$(sed -n 's/^DS_SANITIZE:[A-Z]*=//p' "${DS_BIN%/bin}/CMakeCache.txt")
  cmake -S "$OWN" -B "$OWN/build" -G Ninja -DCMAKE_PREFIX_PATH="$PREFIX" -DCMAKE_CXX_FLAGS="${sanitize:+-fsanitize=$sanitize}"
  cmake --build "$OWN/build"
}
own_model() { "$OWN/build/own_model" run.json "$@"; }
own_model_on_two() { "$PREFIX/bin/ds-launch" -n 2 "$OWN/build/own_model" run.json "$@"; }
losses_of() { sed -n 's/.*\(step [0-9]* loss .*\)/\1/p' "$1"; }

@test "a program trains a model and samples of its own on two ranks, as predicted, and resumes bit for bit" {
  own_model_setup
  own_model_on_two whole >whole.txt
  run -0 losses_of whole.txt
  assert_equal "${#lines[@]}" 20
  first=$(awk '$2 == 1 { print $4 }' <(losses_of whole.txt)) last=$(awk '$2 == 20 { print $4 }' <(losses_of whole.txt))
  awk -v first="$first" -v last="$last" 'BEGIN { exit !(last < first / 2) }' || fail "losses $first to $last"

  # Memory: predicted before the run, predicted by the run, and counted.
  RANK=0 WORLD_SIZE=2 own_model other check | sed 's/ counted .*//' | grep -v ' predicted 0$' >check.txt
  grep -o 'memory .*' whole.txt >memory.txt
  sed 's/ counted .*//' memory.txt | grep -v ' predicted 0$' >predicted.txt
  diff check.txt predicted.txt
  grep -q 'memory params predicted [1-9]' memory.txt
  awk '$4 != $6 { print; bad = 1 } END { exit bad }' memory.txt

  own_model_on_two parts steps=8 >first.txt
  own_model_on_two parts resume >second.txt
  diff <(losses_of whole.txt) <(cat <(losses_of first.txt) <(losses_of second.txt))
  # On one rank, the same in "micro" order.
  own_model_on_two moved steps=8 >first.txt
  own_model moved resume >second.txt
  diff <(losses_of whole.txt) <(cat <(losses_of first.txt) <(losses_of second.txt))

  # Other arrangements of ranks compute nearly the same.
  own_model_on_two tensor tensor_parallel.autotp_size=2 >tensor.txt
  diff <(losses_of whole.txt | cut -c-13) <(losses_of tensor.txt | cut -c-13)

  # The tools work on its checkpoint.
  run -0 "$PREFIX/bin/ds-ckpt-merge" parts -o merged.safetensors --quiet
  run -0 "$PREFIX/bin/ds-shard" parts -o sharded --dp 4 --quiet
  run -4 "$PREFIX/bin/ds-memreport" parts
  assert_output --partial 'the model "own-mlp" is built by the program that trained it'
}

@test "a program's run is not resumed with another model or other samples" {
  own_model_setup
  own_model run steps=2
  run -3 own_model run resume steps=4 name=another
  assert_output --partial 'a checkpoint of another model: the model there is "own-mlp", and the model here is "another"'
  run -3 own_model run resume steps=4 name=another check
  assert_output --partial 'the model there is "own-mlp"'
  run -3 own_model run resume steps=4 samples=500
  assert_output --partial "the samples '5 id + 3 modulo 61' of the program are 500, but the run was started with 512"
  cat >zoo.json <<'END'
{"model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 1},
 "data": {"train": "zoo.json", "format": "text", "split": 0, "seq_length": 16}, "train_batch_size": 4, "steps": 3}
END
  run -3 "$PREFIX/bin/ds-train" zoo.json --out run --resume latest
  assert_output --partial 'checkpoint of another model'
  run -2 own_model fresh 'model={"type": "gpt2"}'
  assert_output --partial 'the program brings the model'
  run -0 own_model run resume steps=4
}
