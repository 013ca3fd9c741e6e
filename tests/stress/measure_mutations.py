"""Damage caches, checkpoints, runs, recipes and archives, and check that qat refuses or reads each.

Counted as clean is a case that ends in time, within its memory, either with an error of one line,
or with exactly what the undamaged files hold. A cache whose damage was sealed by whoever did it,
with hashes and sizes made right, may also read as another cache, and a tar file that was packed
after its damage may unpack to other files; nothing else may differ.

python tests/stress/measure_mutations.py --cases 10000 --figures FILE.jsonl
"""

import argparse
import collections
import hashlib
import json
import logging
import random
import re
import resource
import shutil
import signal
import tempfile
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest.mock import patch

import cyclopts
import lz4.frame
import tomli_w
import torch
from kill_case import config, make_place, record
from mutants import Files, mutate
from pydantic import ValidationError
from torch import Tensor

from qat import cli
from qat.cli.parser import check_recipe, verb_flags
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import QatError
from qat.hub.files import MIB, sha256_tree
from qat.hub.push import pack
from qat.hub.unpack import unpack
from qat.models.load import load_model, load_tokenizer
from qat.ranks import ALONE
from qat.train import start
from qat.train.config import TrainConfig
from qat.train.resume import choose_together
from qat.train.run import RunDirectory, resolved

Outcomes = collections.Counter[tuple[str, str]]
"""Counts of outcomes by kind of mutant; WRONG begins an outcome that is not clean."""
TIME_S = 10.0
ARCHIVE = "recipe.tar.lz4"
LIMITS = {"MEMBERS": 2000, "FLOOR_BYTES": 4 * MIB}
"""Limits smaller than the usual ones, so that a bomb is found soon."""
MEMORY_BYTES = 2**30
COURSE = {"max_steps": 4, "batch_size": 2, "eval_every": 2, "eval_sequences": 2}
"""The run whose files are damaged."""


class Subject(NamedTuple):
    """Files that belong together, and how they are opened."""

    name: str
    root: Path
    files: Files
    read: Callable[[Path], str]
    """Function that opens the files and returns their contents as a hash or a text."""
    sound: set[str]
    """Results that `read` may return."""


def main() -> None:
    """Run the cases, print what came of them, and record the number of clean ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--figures", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        subjects = make_subjects(Path(name))
        with bounded_memory(MEMORY_BYTES):
            outcomes = fuzz(subjects, range(asked.first, asked.first + asked.cases))
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"{kind:15s} {count:6d}  {outcome}")
    wrong = sum(count for (_, outcome), count in outcomes.items() if outcome.startswith("WRONG"))
    print(f"{outcomes.total()} cases, {wrong} not clean")
    if asked.figures is not None:
        value = 0 if wrong else outcomes.total()
        record(asked.figures, "mutations_handled", value, "cases", ">= 10000, all clean")
    raise SystemExit(wrong > 0)


def fuzz(subjects: list[Subject], seeds: Iterable[int]) -> Outcomes:
    """Count the outcomes of each kind of damage to each subject."""
    outcomes: Outcomes = collections.Counter()
    for seed in seeds:
        subject = subjects[seed % len(subjects)]
        mutant = mutate(subject.files, seed // len(subjects))
        files, is_sealed = mutant.files, subject.name == "tar"
        if subject.name == "cache" and random.Random(seed).random() < 0.5:
            files, is_sealed = sealed(subject.files, files), True
        outcome = run(subject, files, is_sealed=is_sealed)
        if outcome.startswith("WRONG"):
            names = ", ".join(mutant.files)
            outcome = outcome.replace("WRONG", f"WRONG: seed {seed}, {names}", 1)
        outcomes[f"{subject.name} {mutant.kind}", outcome] += 1
    return outcomes


def run(subject: Subject, files: Files, *, is_sealed: bool) -> str:
    """Return the outcome of opening a subject with some of its files damaged."""
    for name, data in files.items():
        (subject.root / name).write_bytes(data)
    try:
        with in_time(TIME_S), warnings.catch_warnings(action="ignore"):
            found = subject.read(subject.root)
        if found in subject.sound:
            return "read"
        return "read as another one" if is_sealed else f"WRONG: accepted silently: {found[:200]}"
    except (QatError, cyclopts.CycloptsError) as error:
        return refusal(str(error), is_ours=isinstance(error, QatError))
    except (Exception, TookTooLong):  # noqa: BLE001  any other end is what is looked for
        return f"WRONG: {traceback.format_exc()}"
    finally:
        restore(subject)


def restore(subject: Subject) -> None:
    """Make every file sound again; going on with a run cuts its metrics, too."""
    for name, data in subject.files.items():
        path = subject.root / name
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)


def refusal(message: str, *, is_ours: bool) -> str:
    """The kind of a refusal; the command line puts cyclopts' own errors into one line."""
    if is_ours and "\n" in message:
        return f"WRONG: a message of several lines: {message}"
    if is_ours and not re.search(
        "expected|restore|rebuild|fetch|copy|mend|write|choose|did you|known", message
    ):
        return f"WRONG: a message that helps nobody: {message}"
    return "refused"


def sealed(sound: Files, damaged: Files) -> Files:
    """The damaged files and a manifest whose hashes and sizes are right."""
    files = {**sound, **damaged}
    try:
        values = json.loads(files["manifest.json"])
        for shard in values["shards"]:
            data = files.get(shard["file"], b"")
            shard |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        values.pop("sha256", None)
        body = (json.dumps(values, indent=1) + "\n").encode()
        values["sha256"] = hashlib.sha256(body).hexdigest()
    except (ValueError, TypeError, KeyError):
        return damaged
    return {**damaged, "manifest.json": (json.dumps(values, indent=1) + "\n").encode()}


def make_subjects(place: Path) -> list[Subject]:
    """A cache, a student, a run, a recipe, an archive and what is packed in one, all sound."""
    make_place(place, layers=1)
    course = config(place, **COURSE)
    start.train_student(course, str(place / "student"), place / "run", resume=False)
    (place / "recipe").mkdir()
    recipe = tomllib.loads((place / "run" / "recipe.toml").read_text())["train"]
    del recipe["student"]
    (place / "recipe" / "recipe.toml").write_text(tomli_w.dumps({"train": recipe}))
    for name in ("archive", "tar"):
        (place / name).mkdir()
    pack(place / "recipe", place / "archive" / ARCHIVE)
    packed = (place / "archive" / ARCHIVE).read_bytes()
    (place / "tar" / "recipe.tar").write_bytes(lz4.frame.decompress(packed))
    return [
        subject("cache", place / "cache", read_cache),
        subject("student", place / "student", read_student),
        subject("run", place / "run", partial(read_run, course, str(place / "student"))),
        subject("recipe", place / "recipe", read_recipe),
        subject("archive", place / "archive", read_archive),
        subject("tar", place / "tar", read_tar),
    ]


def subject(name: str, root: Path, read: Callable[[Path], str]) -> Subject:
    """All files below `root`, and what they hold."""
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and is_read(path)]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    sound = {read(root)}
    if name == "run":  # it may go on from an older checkpoint, whose content is another
        pointer = root / "latest"
        for checkpoint in sorted((root / "checkpoints").iterdir()):
            pointer.write_text(f"checkpoints/{checkpoint.name}\n")
            sound.add(read(root))
    found = Subject(name, root, files, read, sound)
    restore(found)
    return found


def is_read(path: Path) -> bool:
    """Return whether opening depends on a file: not on one that is only for people to read."""
    return path.suffix in {".json", ".safetensors", ".toml", ".jsonl", ".lz4", ".tar", ""} and not (
        path.name.startswith((".", "heartbeat", "events", "generation_config"))
        or (path.name == "metrics.json" or "_e2e_" in path.parent.name)
    )


def read_cache(root: Path) -> str:
    """A hash of everything in a cache."""
    cache = TeacherCache.open(root)
    splits = ("train", "held_out")
    batches = [
        cache.batch(range(n), split) for split in splits if (n := cache.num_sequences(split))
    ]
    return digest([tensor for batch in batches for tensor in batch])


def read_student(root: Path) -> str:
    """A hash of a packed checkpoint's weights, settings and words."""
    model = load_model(str(root), device="cpu", dtype="fp32").model
    words = tokenizer_hash(load_tokenizer(str(root)))
    settings = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    return digest([*model.state_dict().values()], settings.replace(str(root), ""), words)


def read_run(config: TrainConfig, student: str, root: Path) -> str:
    """Return a hash of the state that a run resumes from, of both trainer and student."""
    run = RunDirectory(root)
    choice = choose_together(
        run, resolved(config, student), resume=True, begins_anew=False, ranks=ALONE
    )
    opened = start._open(config, student, run, choice=choice, ranks=ALONE, loaded=None)
    step = opened.choice.step
    run.forget_after(step)
    tensors = [
        *opened.optimizer.state().values(),
        *opened.judge.student.model.state_dict().values(),
    ]
    return digest([*tensors, *opened.remembered.values()], f"{step}")


def read_recipe(root: Path) -> str:
    """`as written` if the command line takes from a recipe what a plain reader of TOML finds."""
    path = root / "recipe.toml"
    check_recipe(path, verb_flags())
    cli.app.config = cyclopts.config.Toml(path, must_exist=True, use_commands_as_keys=True)
    tokens = ["train", "student", "--out", "out"]
    _, bound, _ = cli.app.parse_args(tokens, exit_on_error=False, print_error=False)
    taken = bound.arguments["config"].model_dump_json()
    values = tomllib.loads(path.read_text(encoding="utf-8"))["train"]
    values = {key.replace("-", "_"): value for key, value in values.items()}
    try:
        meant = TrainConfig(**values).model_dump_json()
    except ValidationError:  # a number where a text is meant: a command line knows only texts
        meant = TrainConfig(**{k: v if v is True else str(v) for k, v in values.items()})
        meant = meant.model_dump_json()
    return "as written" if taken == meant else taken


def read_archive(root: Path) -> str:
    """A hash of what an archive unpacks to; one that is refused leaves nothing."""
    out = root.parent / "unpacked"
    beside = {path.name for path in root.parent.iterdir()}
    try:
        with patch.multiple("qat.hub.unpack", **LIMITS):
            unpack(root / ARCHIVE, out)
        return sha256_tree(out)
    except QatError:
        assert {path.name for path in root.parent.iterdir()} == beside
        raise
    finally:
        shutil.rmtree(out, ignore_errors=True)


def read_tar(root: Path) -> str:
    """The same of an archive whose checksum was made after the damage."""
    data = (root / "recipe.tar").read_bytes()
    (root / ARCHIVE).write_bytes(lz4.frame.compress(data, content_checksum=True))
    return read_archive(root)


class TookTooLong(BaseException):
    """A case did not end in time; no handler of exceptions may take it."""


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Stop the block after so long."""

    def stop(_: int, frame: FrameType | None) -> None:
        raise TookTooLong

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let this process take so much more than it has now; beyond that is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (old, hard))


def digest(tensors: Iterable[Tensor], *texts: str) -> str:
    """A hash of tensors and texts."""
    total = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass"))
    for tensor in tensors:
        total.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
