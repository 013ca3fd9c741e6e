"""Kills what the list below names with SIGKILL, again and again; no end may show it.

python tests/stress/measure_kills.py --kills 200 --figures FILE.jsonl
python tests/stress/measure_kills.py --kills 20 --only rollouts --figures FILE.jsonl

Trainings, trainings on words of their own, checkpoint writing, cache builds and pulls: a fifth of
the kills hits each, or all of them the one that is named. What was killed is started again, and
killed again, until it ends; then every file must equal that of an undisturbed run, but those that
tell of time. After a failure all is kept in a directory that is named: what was killed, what it
should have become, and what its processes said.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from kill_case import (
    OF_TIME,
    after,
    build,
    config,
    contents,
    damage,
    fork,
    killed,
    make_place,
    record,
    texts,
    with_teacher,
)

from qat.files import sha256_file
from qat.hub.pull import pull
from qat.hub.push import pack
from qat.hub.registry import HubEntry
from qat.train.start import train_student

KINDS = ("training", "rollouts", "checkpoints", "cache", "hub")
STEPS = 24
KILLS_IN_A_ROW = 6
"""Most kills of one run before it may end."""
LATENT, FROZEN = "weights,scales,codebook,norms", "scales,codebook"
CHUNK = 2**16

Wait = Callable[[Callable[[], bool]], None]


class Case(NamedTuple):
    """One thing to kill, again and again."""

    act: Callable[[Path], object]
    """Function that begins or resumes the work in a directory."""
    kill: Callable[[Path, float], Wait]
    """Function that chooses when to kill, from the directory and the undisturbed seconds."""
    ignored: tuple[str, ...] = ()
    """Files that may differ, see `contents`."""
    has_checkpoints: bool = False
    """True if every checkpoint that has its name must be whole after each kill."""


def main() -> None:
    """Kill as often as asked, compare, and record how many kills left no trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--scratch", type=Path, help="an existing directory to work in")
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # children are forked: no thread pool may exist before
    with kept_after_failure(arguments.scratch) as place:
        equal, kills = kill_all(place, arguments.kills, arguments.seed, arguments.only)
        print(f"{equal} of {kills} kills left no trace")
        if arguments.figures:
            name = f"{arguments.only}_kills_survived" if arguments.only else "kills_survived"
            goal = f">= {20 if arguments.only else 200}, all byte-equal"
            record(arguments.figures, name, equal, "kills", goal)
        if equal != kills:
            raise SystemExit(1)


@contextmanager
def kept_after_failure(parent: Path | None) -> Iterator[Path]:
    """A directory in `parent`, by default a temporary one's; removed if the block ends well."""
    place = Path(tempfile.mkdtemp(prefix="kills-", dir=parent))
    try:
        yield place
    except BaseException:
        print(f"all is kept in {place}", flush=True)
        raise
    shutil.rmtree(place)


def kill_all(place: Path, kills: int, seed: int, only: str | None) -> tuple[int, int]:
    """Return how many kills left no trace, and how many there were.

    Every kind is killed equally often, or `only` alone.
    """
    rng, equal, done = random.Random(seed), 0, 0
    cases_of = (trainings, rollouts, savings, builds, pulls)
    kinds = [pair for pair in zip(KINDS, cases_of, strict=True) if only in (None, pair[0])]
    with_teacher(make_place(place))
    for number, (kind, cases) in enumerate(kinds):
        share = kills * (number + 1) // len(kinds) - kills * number // len(kinds)
        began = time.monotonic()
        with closing(cases(place, rng)) as found:
            survived = kill_and_compare(found, place / f"killed-{kind}", share)
        equal, done = equal + survived, done + share
        seconds = time.monotonic() - began
        print(f"{kind}: {survived} of {share} kills in {seconds:.0f} s", flush=True)
    return equal, done


def kill_and_compare(cases: Iterator[Case], scratch: Path, kills: int) -> int:
    """Return how many of `kills` kills lie in work that ends in the undisturbed bytes."""
    done = equal = 0
    whole: dict[Callable[[Path], object], tuple[dict[str, bytes], float]] = {}
    scratch.mkdir()
    for number, case in enumerate(cases):
        if done == kills:
            break
        out = scratch / f"killed-{number}"
        if case.act not in whole:
            undisturbed, began = scratch / f"whole-{number}", time.monotonic()
            killed(partial(case.act, undisturbed), scratch / f"whole-{number}.log", None)
            whole[case.act] = contents(undisturbed, case.ignored), time.monotonic() - began
        expected, seconds = whole[case.act]
        here, torn, left = 0, 0, set()
        limit = min(kills - done, KILLS_IN_A_ROW)
        while killed(
            partial(case.act, out),
            log := scratch / f"killed-{number}-{here}.log",
            here < limit and case.kill(out, seconds) or None,
        ):
            here += 1
            there = {path.name for path in out.glob("checkpoints/.step-*")}
            torn, left = torn + bool(there - left), there
            if case.has_checkpoints and (trouble := damage(out)):
                raise SystemExit(f"{out}: {trouble} after a kill; see {log}")
        name = f"{scratch.name} {number}: {here} kills" + f", {torn} while saving" * bool(torn)
        is_equal = report(contents(out, case.ignored), expected, name)
        done, equal = done + here, equal + here * is_equal
    return equal


def report(found: dict[str, bytes], expected: dict[str, bytes], name: str) -> bool:
    """Return whether all files are equal, and print those that are not."""
    different = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
    print(f"{name}, {len(different)} files differ", *different[:5], flush=True)
    return not different


def trainings(place: Path, rng: random.Random) -> Iterator[Case]:
    """Runs of latent weights and of frozen codes, saved every 1 to 7 steps."""
    for number in count():
        learn = (LATENT, FROZEN)[number % 2]
        act = Training(place, learn, 1 + number // 2 % 7)
        yield Case(act, lambda _, seconds: after(rng.uniform(0.0, seconds)), OF_TIME, True)


def rollouts(place: Path, rng: random.Random) -> Iterator[Case]:
    """Runs that learn on words of their own, rolled out every 1 to 4 steps."""
    for number in count():
        own = Own(place / "teacher", 1 + number // 2 % 4)
        act = Training(place, (LATENT, FROZEN)[number % 2], 1 + number % 3, own)
        yield Case(act, lambda _, seconds: after(rng.uniform(0.0, seconds)), OF_TIME, True)


def savings(place: Path, rng: random.Random) -> Iterator[Case]:
    """Yield runs of both kinds that are killed while a checkpoint is written."""
    for number in count():
        act = Training(place, (LATENT, FROZEN)[number % 2], 3)
        yield Case(act, lambda out, _: while_saving(out, rng), OF_TIME, True)


class Own(NamedTuple):
    """Settings of a run that learns on its own words."""

    teacher: Path
    every: int


class Training(NamedTuple):
    """A run of a few steps, which goes on where it was stopped."""

    place: Path
    learn: str
    save_every: int
    own: Own | None = None

    def __call__(self, out: Path) -> None:
        """Begin or go on with the run in `out`."""
        own = {}
        if self.own is not None:
            own = {"teacher": str(self.own.teacher), "rollout_every": self.own.every}
            own |= {"on_policy": 0.5, "rollout_tokens": 8, "cache_dir": self.place / "known"}
        course = {"max_steps": STEPS, "save_every": self.save_every, "eval_every": 8}
        settings = config(self.place, learn=self.learn, **course, **own)
        student = str(self.place / "student")
        train_student(settings, student, out, resume=True, begins_anew=True)


def while_saving(out: Path, rng: random.Random) -> Wait:
    """Kill at a random instant while one of the next checkpoints is written."""
    skipped, delay_s = rng.randrange(4), rng.uniform(0.0, 0.05)

    def wait(has_ended: Callable[[], bool]) -> None:
        seen = {path.name for path in (out / "checkpoints").glob(".*")}
        left = skipped
        while not has_ended():
            new = {path.name for path in (out / "checkpoints").glob(".step-*")} - seen
            if new and left == 0:
                time.sleep(delay_s)
                return
            seen |= new
            left -= len(new)
            time.sleep(0.0005)

    return wait


def builds(place: Path, rng: random.Random) -> Iterator[Case]:
    """Builds of a cache."""
    act = partial(build, documents=texts(400))
    while True:
        yield Case(act, lambda _, seconds: after(rng.uniform(0.0, seconds)))


def pulls(place: Path, rng: random.Random) -> Iterator[Case]:
    """Downloads of an archive from a slow server on this host, and what follows them."""
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "model.safetensors").write_bytes(random.Random(0).randbytes(6 * 2**20))
    archive = place / "model.tar.lz4"
    pack(model, archive)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Slowly, archive.read_bytes()))
    child = fork(server.serve_forever, place / "server.log")  # no thread here: this process forks
    entry = HubEntry(
        kind="checkpoint",
        mirrors=(f"http://127.0.0.1:{server.server_port}/model.tar.lz4",),
        sha256=sha256_file(archive),
    )
    act = partial(_pull, entry)
    try:
        while True:
            yield Case(act, lambda _, seconds: after(rng.uniform(0.0, seconds)))
    finally:
        server.server_close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _pull(entry: HubEntry, out: Path) -> None:
    pull("model", entry, out)


class Slowly(BaseHTTPRequestHandler):
    """Serves one file in small parts, from where it is asked to."""

    def __init__(self, data: bytes, *arguments: object) -> None:
        self.data = data
        super().__init__(*arguments)

    def do_GET(self) -> None:  # the name is the standard library's
        """Answer with the file, or with what of it is asked for."""
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(self.data) - start))
        if asked:
            last = len(self.data) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(self.data)}")
        self.end_headers()
        for place in range(start, len(self.data), CHUNK):
            self.wfile.write(self.data[place : place + CHUNK])
            time.sleep(0.002)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    main()
