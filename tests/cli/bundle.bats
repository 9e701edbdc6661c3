#!/usr/bin/env bats
# SPDX-License-Identifier: Apache-2.0
# scripts/bundle: the package runs in a root that holds nothing but glibc, a shell and coreutils, at an odd place, and loads
# no library of the machine but glibc's.

bats_require_minimum_version 1.5.0
load tiny

bundle() { "$DS_SOURCE/scripts/bundle" -o "$PACKAGE" --build "$BUILD" ${TESTS:+"$TESTS"}; }

setup_file() {
  export SOURCE_DATE_EPOCH=1700000000 BUILD=${DS_BIN%/bin}
  export PACKAGE=$BATS_FILE_TMPDIR/libds.tar.gz ROOT=$BATS_FILE_TMPDIR/root
  # With the tests where they are built.
  export TESTS=--tests LOG=$BATS_FILE_TMPDIR/log
  local status=0
  bundle >"$LOG" 2>&1 || status=$?
  if [[ $status == 4 ]]; then
    TESTS='' status=0
    bundle >>"$LOG" 2>&1 || status=$?
  fi
  if [[ $status != 0 ]]; then
    cat "$LOG" >&2
    return 1
  fi
  mkdir -p "$ROOT"/{bin,lib64,proc,dev,tmp,"odd place/ä"}
  export BUNDLE="/odd place/ä/$(tar -tzf "$PACKAGE" | sed -n '1s,/.*,,p')"
  tar -xzf "$PACKAGE" -C "$ROOT/odd place/ä"
  # A shell, the programs that mpirun's script and this test call, and the libraries of these.
  for program in bash env readlink cat mkdir; do cp -L "$(command -v "$program")" "$ROOT/bin/"; done
  ln -s bash "$ROOT/bin/sh"
  for library in $(ldd "$ROOT"/bin/* /usr/lib/x86_64-linux-gnu/lib{rt,dl,pthread,m,resolv,util}.so.? | grep -o '/[^ ]*\.so[^ :]*' | sort -u); do
    mkdir -p "$ROOT$(dirname "$library")"
    cp -L "$library" "$ROOT$library"
  done
}

setup() { tiny_setup; }

# in_root COMMAND...: in the bare root, in its /tmp, with an empty environment
in_root() {
  unshare --map-root-user --mount --propagation private -- bash -c '
    mount --rbind /proc "$1/proc" && mount --rbind /dev "$1/dev" && root=$1 && shift &&
    exec chroot "$root" /bin/env -i PATH=/bin /bin/sh -c "cd /tmp && exec \"\$@\"" sh "$@"' - "$ROOT" "$@"
}
needs_root() {
  run in_root env
  [[ $status == 0 ]] || skip "no root of our own here: $output"
}

@test "the package is what its manifest says, and the same when it is made again" {
  slow_only
  cd "$ROOT$BUNDLE"
  run -0 sha256sum --quiet --check MANIFEST
  assert_equal "$(find . -type f ! -name MANIFEST | wc -l)" "$(wc -l <MANIFEST)"
  for file in bin/ds-train share/man/man1/ds-train.1 share/licences/libopenmpi3 share/doc/libds/configs/tiny.json README; do
    assert [ -e "$file" ]
  done
  run grep -rlI "$DS_SOURCE" .
  assert_output ''
  for file in lib/*.so* lib/plugins/*/*.so; do
    run bash -c 'readelf -d "$1" | grep -E "R(UN)?PATH" | grep -v "ORIGIN"' - "$file"
    assert_output ''
  done
  sha256sum <"$PACKAGE" >sum
  run -0 bundle
  assert_output --regexp "$PACKAGE: [0-9]+M, unpacked"
  assert_equal "$(sha256sum <"$PACKAGE")" "$(cat sum)"
  rm sum
}

@test "nothing is in it that nothing asks for" {
  cd "$ROOT$BUNDLE"
  local spare='' needed file name
  needed=$(for file in bin/* libexec/* lib/*.so* lib/plugins/*/*.so tests/bin/*; do
    readelf -d "$file" 2>/dev/null || true
  done | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort -u)
  for file in lib/*.so*; do # libds_cuda.so is opened by its name
    grep -qxF "$(basename "$(readelf -d "$file" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')")" <<<"$needed" ||
      [[ $file == lib/libds_cuda.so ]] || spare+=" $file"
  done
  if [[ -n $TESTS ]]; then
    for file in tests/bin/* tests/bench/gpu/*; do # what parts run, or what that reads
      grep -qE "\b${file##*/}\b|\bimport $(basename "$file" .py)\b" tests/gpu-check tests/run-gpu tests/bench/gpu/* ||
        spare+=" $file"
    done
    for file in tests/golden/*/; do
      name=$(basename "$file") # "gpt2-moe-2" may be made of "gpt2-moe-{}" and "2"
      grep -qE "\"$name[\"/]" "$DS_SOURCE"/tests/parity/*.cc ||
        grep -lE "\"${name%-*}-\{\}[\"/]" "$DS_SOURCE"/tests/parity/*.cc | xargs grep -qF "\"${name##*-}\"" || spare+=" $file"
    done
  fi
  assert_equal "$spare" ''
}

@test "training, shm and mpi, and merging in a bare root give the losses of the build" {
  needs_root
  cp cfg.json text.txt "$ROOT/tmp/"
  run -0 in_root "$BUNDLE/bin/ds-train" --version
  assert_line --index 0 --regexp '^ds-train [0-9]+\.'
  run -0 ds-launch -n 2 ds-train cfg.json --out outside
  for backend in shm mpi; do
    run -0 in_root "$BUNDLE/bin/ds-launch" -n 2 ds-train cfg.json --set communication.backend=$backend --out $backend
    refute_output --partial WARNING
    assert_equal "$(losses "$ROOT/tmp/$backend")" "$(losses outside)"
    run -0 in_root "$BUNDLE/bin/ds-ckpt-merge" $backend -o $backend.safetensors
    ds-ckpt-merge outside -o outside.safetensors --quiet
    run -0 cmp "$ROOT/tmp/$backend.safetensors" outside.safetensors
  done
  # MPI that nobody launched finds its plug-ins, too.
  run -0 in_root "$BUNDLE/bin/ds-train" cfg.json --set communication.backend=mpi --set train_micro_batch_size_per_gpu=4 --out alone
}

@test "a test of whole models finds its data in a bare root" {
  [[ -n $TESTS ]] || skip "$(grep -m 1 error: "$LOG")"
  needs_root
  run -0 in_root env DS_TEST_DATA="$BUNDLE/tests/golden" "$BUNDLE/tests/bin/device_test" --file=model_test --gtest_filter='*gpt2_fp32'
  assert_output --regexp 'PASSED.* [1-9][0-9]* tests?\.'
  for name in $("$DS_SOURCE/tests/run-gpu" --list); do
    run -0 in_root "$BUNDLE/tests/bin/device_test" --file="$name" --gtest_list_tests
  done
}

@test "no library of this machine is loaded but glibc's, and no library path is inherited" {
  run -0 env LD_DEBUG=libs LD_DEBUG_OUTPUT="$PWD/ld" "$ROOT$BUNDLE/bin/ds-launch" -n 2 ds-train cfg.json \
    --set communication.backend=mpi --out run
  local programs=0
  for log in ld.*; do
    if ! grep -qE "calling init: $ROOT$BUNDLE/" "$log"; then continue; fi # a process of the shell
    programs=$((programs + 1))
    run bash -c 'sed -n "s/.*calling init: //p" "$1" | grep -vF "$2/" | grep -vE "/(ld-linux-x86-64|lib(c|m|rt|dl|pthread|resolv|util))\.so\.[0-9]$"' - "$log" "$ROOT$BUNDLE"
    assert_output ''
  done
  assert [ $programs -ge 6 ] # ds-launch, mpirun, two shims, two ranks
  run -0 env LD_LIBRARY_PATH=/of/the/user "$ROOT$BUNDLE/bin/ds-launch" -n 1 env
  assert_line LD_LIBRARY_PATH=/of/the/user
  run -0 env -u LD_LIBRARY_PATH "$ROOT$BUNDLE/bin/ds-launch" -n 1 env
  refute_output --partial LD_LIBRARY_PATH
}

# cublas_at DIR: puts a cuBLASLt of this bundle's plug-in into DIR of the root; its results are not used.
cublas_at() {
  mkdir -p "$ROOT$1"
  nm -D --undefined-only "$ROOT$BUNDLE/lib/libds_cuda.so" | sed -n 's/.* U \(cublasLt[A-Za-z]*\).*/int \1(void) { return 1; }/p' >cublas.c
  echo 'libcublasLt.so.13 { *; };' >versions
  gcc -shared -fPIC -nostdlib -Wl,-soname,libcublasLt.so.13,--version-script=versions -o "$ROOT$1/libcublasLt.so.13" cublas.c
}

@test "cuBLASLt is found in a toolkit, in packages of Python, in both, and missed in words" {
  needs_root
  [[ -e $ROOT$BUNDLE/lib/libds_cuda.so ]] || skip 'this bundle has no CUDA plug-in'
  ! strings "$ROOT$BUNDLE/lib/libds_cuda.so" | grep -q 'libcublasLt.so.1[^3]' || skip 'the stand-in is for CUDA 13'
  cp cfg.json text.txt "$ROOT/tmp/"
  on_gpu() { # VARIABLE=VALUE...: the plug-in loads or not; a GPU there is none
    run -4 in_root env "$@" DS_CUDA_PLUGIN="$BUNDLE/lib/libds_cuda.so" "$BUNDLE/bin/ds-train" cfg.json --set device=cuda -v --out gpu
  }
  on_gpu
  assert_output --partial 'libcublasLt.so.13: cannot open shared object file: No such file or directory; it is in none of these folders either'
  assert_output --partial 'name its folder in LD_LIBRARY_PATH'

  # A library that lacks a called function, in front of a complete one, and one that is cut off.
  mkdir -p "$ROOT/srv/old" "$ROOT/srv/cut" "$ROOT/srv/full"
  echo 'int cublasLtCreate(void) { return 1; }' >old.c
  echo 'libcublasLt.so.13 { *; };' >versions
  gcc -shared -fPIC -nostdlib -Wl,-soname,libcublasLt.so.13,--version-script=versions -o "$ROOT/srv/old/libcublasLt.so.13" old.c
  echo cut >"$ROOT/srv/cut/libcublasLt.so.13"
  on_gpu LD_LIBRARY_PATH=/srv/old
  assert_output --partial 'undefined symbol: cublasLt'
  assert_output --partial ', with /srv/old/libcublasLt.so.13'
  cublas_at /srv/full/lib
  for folder in old cut; do
    on_gpu LD_LIBRARY_PATH=/srv/$folder CUDA_HOME=/srv/full
    assert_output --partial 'matrix products by /srv/full/lib/libcublasLt.so.13'
  done

  local packages=/srv/venv/lib/python3.12/site-packages/nvidia/cu13/lib toolkit=/usr/local/cuda-13.9/lib64
  cublas_at $packages
  on_gpu
  assert_output --partial 'it is in none of these folders'
  on_gpu VIRTUAL_ENV=/srv/venv
  assert_output --partial "matrix products by $packages/libcublasLt.so.13"
  assert_output --partial 'there is no NVIDIA driver on this machine'

  cublas_at $toolkit
  on_gpu
  assert_output --partial "matrix products by $toolkit/libcublasLt.so.13"
  on_gpu VIRTUAL_ENV=/srv/venv
  assert_output --partial "matrix products by $toolkit/libcublasLt.so.13"
  on_gpu LD_LIBRARY_PATH=$packages
  assert_output --partial "matrix products by $packages/libcublasLt.so.13"

  echo no library >"$ROOT$toolkit/libcublasLt.so.13"
  on_gpu
  assert_output --partial "$toolkit/libcublasLt.so.13: file too short"
}

@test "what cannot be bundled is refused and leaves nothing" {
  mkdir empty
  run -2 "$DS_SOURCE/scripts/bundle" --nonsense
  run -2 "$DS_SOURCE/scripts/bundle" -o
  run -4 "$DS_SOURCE/scripts/bundle" -o here/x.tar.gz --build empty
  assert_output --partial 'is not a build tree'
  for program in bash env dirname realpath readlink cat; do ln -s "$(command -v "$program")" empty/; done
  run -4 env PATH="$PWD/empty" "$DS_SOURCE/scripts/bundle" -o here/x.tar.gz --build "$BUILD"
  assert_output --partial "there is no program 'cmake'"
  assert [ -z "$(ls here 2>/dev/null)" ]
}

@test "run-gpu says why it can do nothing here" {
  if command -v nvidia-smi >/dev/null; then skip 'there may be a GPU here'; fi
  run -2 "$DS_SOURCE/tests/run-gpu" --nonsense
  run -4 "$DS_SOURCE/tests/run-gpu" --bin empty matmul_test
  assert_output --partial 'there is no empty/device_test'
}
