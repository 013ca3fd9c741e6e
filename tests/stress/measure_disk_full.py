"""Fills the disk of a run at one write after the other; none may lose what was saved before.

python tests/stress/measure_disk_full.py --figures FILE.jsonl

The run lives on a small tmpfs. Its size, or the number of files that it may hold, grows from
nothing to what the whole run needs. Each run that the full disk stops must say so in one line and
leave whole checkpoints only; with more room it must go on with --resume auto and end in the bytes
of an undisturbed run. Mounting needs root or `unshare -rm`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from kill_case import OF_TIME, contents, damage, fork, make_place, record

from qat.cli import main as qat

PAGE_KIB = 4
ROOM = "size=64m,nr_inodes=9999"
KINDS = {
    "lock": r"run cannot be written",
    "directory": r"disk/run\)",
    "recipe.toml": r"recipe\.toml",
    "run.json": r"run\.json",
    "metrics.jsonl": r"metrics\.jsonl",
    "training.csv": r"training\.csv",
    "val.csv": r"val\.csv",
    "checkpoint": r"checkpoints/step-\d+",
    "pointer": r"run/\.?(best|latest)\b",
    "final": r"q2a2_\w+",
    "metrics.json": r"metrics\.json\b(?!l)",
}
"""Writes that must meet the full disk at least once, and the pattern that names each."""
FLAGS = """--batch-size 4 --eval-sequences 4 --warmup-steps 2 --log-every 1 --device cpu
    --learn weights,scales,codebook,norms --resume auto"""
SAVING = "--max-steps 6 --save-every 2 --eval-every 3"
LOGGING = "--max-steps 30 --save-every 0 --eval-every 99"
"""A run of many lines and one checkpoint, so that the lines meet the full disk."""


class Case(NamedTuple):
    """One disk and one run."""

    flags: str
    limit: str
    """Size of the disk as an option of `mount`."""


def main() -> None:
    """Try every disk, and record at how many kinds of writes it was full without harm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="try one case of so many")
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        os.execvp("unshare", ["unshare", "-rm", sys.executable, *sys.argv])
    torch.set_num_threads(1)  # children are forked: no thread pool may exist before
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        make_place(place, layers=1)
        struck = try_all(place, arguments.every)
    missing = sorted(KINDS.keys() - struck.keys())
    print(f"{sum(struck.values())} full disks, at {len(struck)} kinds of writes: {dict(struck)}")
    print(f"never full at {missing}")
    if arguments.figures:
        record(arguments.figures, "disk_full_points", len(struck), "writes", f"all {len(KINDS)}")
    raise SystemExit(arguments.every == 1 and bool(missing))


def try_all(place: Path, every: int) -> Counter[str]:
    """Count how often each kind of write met the full disk; stop at the first harm."""
    struck: Counter[str] = Counter()
    whole = {}
    for flags in (SAVING, LOGGING):
        with disk(place / "disk", ROOM):
            status, said = run(place, flags)
            if status != 0:
                raise SystemExit(f"the undisturbed run failed: {said}")
            whole[flags] = contents(place / "disk/run", OF_TIME)
    for case in list(cases())[::every]:
        with disk(place / "disk", case.limit):
            status, said = run(place, case.flags)
            if status == 0:
                continue
            kind = kind_of(said)
            subprocess.run(["mount", "-o", f"remount,{ROOM}", place / "disk"], check=True)
            if found := damage(place / "disk/run"):
                raise SystemExit(f"a checkpoint is damaged: {found}")
            status, after = run(place, case.flags)
            if status != 0 or contents(place / "disk/run", OF_TIME) != whole[case.flags]:
                raise SystemExit(f"{case}: {said}\nthen not the same run:\n{after}")
        struck[kind] += 1
        print(f"{case.limit}: {said.splitlines()[-1]}", flush=True)
    return struck


def cases() -> Iterator[Case]:
    """Disks of so many files, then of so many pages; enough for all of the run in the end."""
    roomy = ROOM.partition(",")[0]
    for flags in (SAVING, LOGGING):
        for files in range(1, 50):
            yield Case(flags, f"{roomy},nr_inodes={files}")
        for pages in (*range(1, 16), *range(16, 200, 12)):
            yield Case(flags, f"size={pages * PAGE_KIB}k,nr_inodes=9999")


@contextmanager
def disk(path: Path, limit: str) -> Iterator[None]:
    """A disk of its own at `path` while the block runs."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "tmpfs", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def run(place: Path, flags: str) -> tuple[int, str]:
    """Exit code of a process that begins or goes on with the run, and what it said."""
    words = ["qat", "train", str(place / "student"), "--cache-dir", str(place / "cache")]
    words += ["--out", str(place / "disk/run"), *FLAGS.split(), *flags.split()]
    child = fork(partial(command, words), place / "log")
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), (place / "log").read_text()


def command(words: list[str]) -> None:
    """The command line, ended as a process ends."""
    sys.argv = words
    try:
        qat()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


def kind_of(said: str) -> str:
    """Return the kind of write that the last line names; it must be the only line of an error."""
    *before, last = said.splitlines()
    if not last.startswith("qat: ") or any("Traceback" in line for line in before):
        raise SystemExit(f"not one line:\n{said}")
    found = [kind for kind, pattern in KINDS.items() if re.search(pattern, last)]
    if not found or not re.search("[Nn]o space left|disk is full", last):
        raise SystemExit(f"a line that does not say where the disk was full: {last}")
    return found[0]


if __name__ == "__main__":
    main()
