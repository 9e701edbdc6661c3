#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every tool under many values of each limit of a process, and of the size of /dev/shm, and holds each run to this:
it ends in time, with a status that ds(7) lists; if that is not 0, standard error names the cause in our words; no signal
ends one of our programs; nothing is left: no process, nothing in /dev/shm or TMPDIR, no file half-written.

Wants root: each run is of a user of its own, whom limits of processes bind, with a private /dev/shm.

  limits.py BIN_DIRECTORY SOURCE_DIRECTORY [--only LIMIT[=VALUE]] [--tool NAME] [--jobs N] [--keep]
"""

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 77  # for ctest
SECONDS = 90  # for a run that takes two where nothing limits it
FIRST_USER = 300_000

KIB, MIB = 1 << 10, 1 << 20
# Values around which something happens are close together. Sizes in bytes, as prlimit(1) takes them.
LIMITS = {
    "nproc": [*range(1, 25), 28, 32, 40],
    "nofile": [*range(3, 20), 22, 24, 28, 31, 32, 34, 35, 36, 38, 40, 43, 44, 48, 56, 64, 100],
    "stack": [k * KIB for k in (16, 32, 64, 96, 128, 160, 192, 208, 256, 384, 511, 512, 640, 1024, 4096)],
    "as": [m * MIB for m in (16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 224, 256,
                             288, 320, 384, 448, 512, 640, 768, 1024)],
    "fsize": [k * KIB for k in (0, 1, 2, 4, 8, 10, 12, 16, 20, 32, 40, 64, 100, 256, 1024, 2048, 4096, 4100, 8192)],
    "shm": [k * KIB for k in (4, 16, 64, 256, 1024, 2048, 4096, 6144, 8192, 12288, 16384, 20480, 24576, 28672, 32768)],
}
STATUSES = {0, 1, 2, 3, 4, 75}
OF_OPEN_MPI = re.compile(r"ORTE|PMIX|OPAL|ompi_|mpirun was unable|mpirun (was killed|exited)|MPI_Init|\*\*\* Process received signal")
# What a message that names its cause has in it.
CAUSE = re.compile(r"\(ulimit -[a-z]\)|pids\.max|[Oo]ut of memory|memory|[Tt]oo many open files|[Ff]ile too large|"
                   r"[Nn]o space left|Resource temporarily unavailable|/dev/shm|cannot start|address space")
BUG = re.compile(r"internal error|terminate called|[Aa]ssertion|std::|Segmentation fault|stack smashing|bad_alloc")
KILLED = re.compile(r"was killed by (?:signal )?(?:\d+ \()?SIG(?!KILL\b|TERM\b)[A-Z0-9]+")
NOT_LOADED = re.compile(r"error while loading shared libraries|cannot (?:map|allocate|create) .*(?:shared object|segment|memory)")

RUN = r"""
mount -t tmpfs -o size="$1",mode=1777 limits /dev/shm || exit 99
user=$2 seconds=$3 limit=$4
shift 4
HOME=$PWD TMPDIR=$PWD/tmp timeout -k 5 "$seconds" setpriv --reuid="$user" --regid="$user" --clear-groups --no-new-privs \
  prlimit $limit -- "$@" </dev/null >stdout 2>stderr
echo $? >status
tries=100
while pgrep -u "$user" >/dev/null && [ $((tries -= 1)) -gt 0 ]; do sleep 0.1; done
pgrep -l -u "$user" >processes
pkill -9 -u "$user"
find /dev/shm tmp -mindepth 1 >left
"""

CONFIG = {
    "model": {"type": "gpt2", "vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
    "data": {"train": "text.txt", "seq_length": 32, "split": 0.1},
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
    "threads": 4,
    "steps": 4,
    "save": {"every": 2},
}


def prepare(bin_dir, source, folder):
    """What the runs read: a configuration, a run with checkpoints, whole weights in both formats."""
    shutil.copy(source / "LICENSE", folder / "text.txt")
    config = json.loads(json.dumps(CONFIG))
    config["data"]["train"] = str(folder / "text.txt")
    (folder / "cfg.json").write_text(json.dumps(config))
    for command in (["ds-train", "cfg.json", "--out", "run", "--quiet"],
                    ["ds-ckpt-merge", "run", "-o", "model.h5", "--quiet"],
                    ["ds-ckpt-merge", "run", "-o", "model.safetensors", "--optimizer", "--quiet"]):
        subprocess.run([bin_dir / command[0], *command[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def tools(bin_dir, at):
    """The command lines by name; those that write a model have it in `out`, which is there whole or not at all."""
    train = [bin_dir / "ds-train", at / "cfg.json", "--quiet"]
    launch = [bin_dir / "ds-launch", "-n", "2"]
    return {
        "train": [*train, "--out", "run"],
        "train-async": [*train, "--out", "run", "--set", "save.async=true"],
        "train-resume": [*train, "--out", "run", "--resume", at / "run", "--steps", "6"],
        "train-weights-hdf5": [*train, "--out", "run", "--weights", at / "model.h5"],
        "eval": [*train, "--eval", "--resume", at / "run"],
        "generate": [*train, "--generate", "The", "--max-tokens", "8", "--resume", at / "run"],
        "check": [*train, "--check"],
        "launch": [*launch, "sh", "-c", "echo $RANK"],
        "launch-train": [*launch, *train, "--out", "run", "--set", "threads=2"],
        "launch-train-mpi": [*launch, *train, "--out", "run", "--set", "communication.backend=mpi", "--set", "threads=2"],
        "launch-train-pipeline": [*launch, *train, "--out", "run", "--set", "pipeline.stages=2", "--set", "threads=2",
                                  "--set", "save.async=true"],
        "commbench": [bin_dir / "ds-commbench", "--ranks", "2", "--op", "all_reduce", "-b", "8", "-e", "64K"],
        "commbench-mpi": [bin_dir / "ds-commbench", "--ranks", "2", "--op", "all_reduce", "-b", "8", "-e", "64K",
                          "--backend", "mpi"],
        "merge": [bin_dir / "ds-ckpt-merge", at / "run", "-o", "out.safetensors", "--verify"],
        "merge-hdf5": [bin_dir / "ds-ckpt-merge", at / "model.h5", "-o", "out.safetensors"],
        "shard": [bin_dir / "ds-shard", at / "model.safetensors", "--dp", "2", "--out", "out"],
        "memreport": [bin_dir / "ds-memreport", at / "cfg.json"],
        "memreport-fit": [bin_dir / "ds-memreport", at / "cfg.json", "--fit", "1GiB", "--peak", "1e12"],
        "memreport-measure": [bin_dir / "ds-memreport", "--measure", "out", "--gpus", "2", "--threads", "2"],
    }


def faults(bin_dir, folder, seconds):
    """What is wrong with a run that has ended."""
    text = {name: (folder / name).read_text(errors="replace") for name in ("stderr", "status", "left", "processes")}
    status, stderr = int(text["status"]), text["stderr"]
    if status == 127 and NOT_LOADED.search(stderr):  # the dynamic linker's: none of our code has run
        return []
    found = []
    if status in (124, 137) and seconds >= SECONDS:
        found.append(f"did not end within {SECONDS} s")
    elif status not in STATUSES:
        found.append(f"status {status}")
    if status != 0 and not CAUSE.search(stderr):
        found.append("the message names no cause" if stderr.strip() else "no message")
    if BUG.search(stderr):
        found.append("speaks of a bug: " + BUG.search(stderr)[0])
    if KILLED.search(stderr):
        found.append(KILLED.search(stderr)[0])
    if status != 0 and OF_OPEN_MPI.search(stderr) and not re.search(r"\(ulimit -|pids\.max|/dev/shm", stderr):
        found.append("only Open MPI says why")
    if text["processes"]:
        found.append("left processes: " + " ".join(text["processes"].split()))
    if text["left"]:
        found.append("left files: " + " ".join(text["left"].split()[:6]))
    if status != 0:
        found += [f"failed, and left {path.name}" for path in folder.glob("out*")]
    found += [f"left {path.relative_to(folder)}" for path in folder.rglob(".*")]
    for metrics in folder.glob("run/metrics.jsonl"):
        try:
            for line in metrics.read_text().splitlines():
                json.loads(line)
        except ValueError:
            found.append("a line of metrics.jsonl is cut off")
    for step in folder.glob("run/step-*"):
        whole = folder / f"{step.name}.safetensors"
        read = subprocess.run([bin_dir / "ds-ckpt-merge", step, "-o", whole, "--verify", "--quiet"], capture_output=True)
        if read.returncode != 0:
            found.append(f"{step.name} cannot be read")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--only", action="append", default=[], help="LIMIT or LIMIT=VALUE")
    parser.add_argument("--tool", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed runs")
    options = parser.parse_args()
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        print("skipped: this needs root and mount namespaces")
        return SKIPPED
    bin_dir = options.bin_dir.resolve()
    root = Path(tempfile.mkdtemp(prefix="ds-limits."))
    root.chmod(0o755)
    prepare(bin_dir, options.source.resolve(), root)
    commands = tools(bin_dir, root)

    def wanted(limit, value):
        return not options.only or limit in options.only or f"{limit}={value}" in options.only

    cases = [(limit, value, tool) for limit, values in LIMITS.items() for value in values for tool in commands
             if wanted(limit, value) and (not options.tool or tool in options.tool)]

    def run(index):
        limit, value, tool = cases[index]
        folder = root / f"{limit}-{value}-{tool}"
        folder.mkdir()
        (folder / "tmp").mkdir()
        user = FIRST_USER + index
        for path in (folder, folder / "tmp"):
            os.chown(path, user, user)
        shm = value if limit == "shm" else 64 * MIB
        prlimit = "--core=0" if limit == "shm" else f"--core=0 --{limit}={value}"
        start = time.monotonic()
        done = subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-c", RUN, "sh", str(shm), str(user),
                               str(SECONDS), prlimit, *map(str, commands[tool])], cwd=folder, capture_output=True, text=True)
        seconds = time.monotonic() - start
        if not (folder / "left").exists():
            raise RuntimeError(f"the harness failed: {done.stderr}")
        found = faults(bin_dir, folder, seconds)
        status = (folder / "status").read_text().strip()
        if found:
            print(f"{limit}={value} {tool}: {'; '.join(found)}\n    | " +
                  "\n    | ".join((folder / "stderr").read_text(errors="replace").strip().splitlines()[-6:]), flush=True)
        if not found or not options.keep:
            shutil.rmtree(folder)
        return bool(found), status, seconds

    statuses, failures, longest = {}, 0, 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for failed, status, seconds in pool.map(run, range(len(cases))):
            failures += failed
            statuses[status] = statuses.get(status, 0) + 1
            longest = max(longest, seconds)
    print(f"{len(cases)} cases, {failures} failed; statuses " +
          ", ".join(f"{s}: {n}" for s, n in sorted(statuses.items(), key=lambda x: int(x[0]))) + f"; longest {longest:.0f} s")
    if not failures or not options.keep:
        shutil.rmtree(root)
    return 1 if failures else 0


sys.exit(main())
