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
