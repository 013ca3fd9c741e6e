"""Unpacks archives that are damaged or evil: each is refused in one line, or unpacked cleanly.

Counted as clean is a case that ends in time, within its memory, with a `QatError` and nothing left,
or with plain files in the target and nothing changed beside it; and, where a checksum covers the
damage, with the original files.

python tests/stress/fuzz_archives.py --cases 10000 --figures FILE.jsonl
"""

import collections
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archive_mutants import Mutant, Source, make, tar_of
from fuzzing import Outcomes, TookTooLong, asked_for, bounded_memory, in_time, settle

from qat.errors import QatError
from qat.hub.files import MIB, sha256_tree
from qat.hub.unpack import Limits, unpack

LIMITS = Limits(members=2000, floor_bytes=4 * MIB)
"""Smaller than the usual ones, so that bombs are cheap to make."""
TIME_S = 5.0
MEMORY_BYTES = 512 * MIB
FILES = {
    "name/config.json": b'{"model_type": "qwen3"}',
    "name/model.safetensors": bytes(range(256)) * 12,
    "name/deep/er/notes.txt": b"words " * 90,
    "name/empty": b"",
}
DAMAGE = " is damaged: "


def main() -> None:
    """Run the cases, print what came of them, and record the number of clean ones."""
    seeds, figures = asked_for(__doc__)
    with workplace() as place, bounded_memory(MEMORY_BYTES):
        outcomes = fuzz(place, seeds)
    settle("archive_fuzz_cases", outcomes, figures)


def fuzz(place: Path, seeds: range) -> Outcomes:
    """How often each kind of mutant came to which end."""
    source = Source(tar_of(FILES), str(place / "sentinel" / "new"))
    original = unpacked_hash(place, source)
    before = snapshot(place)
    outcomes: Outcomes = collections.Counter()
    for seed in seeds:
        mutant = make(source, seed)
        outcome = run(place, mutant, original)
        if snapshot(place) != before:
            outcome = f"WRONG: seed {seed} changed something beside the target"
            before = snapshot(place)
        elif outcome.startswith("WRONG"):
            outcome = outcome.replace("WRONG", f"WRONG: seed {seed}", 1)
        outcomes[mutant.kind, outcome] += 1
    return outcomes


def run(place: Path, mutant: Mutant, original: str) -> str:
    """What came of one mutant: `unpacked`, the kind of refusal, or what was wrong."""
    archive, out = place / "archive", place / "target" / "out"
    archive.write_bytes(mutant.data)
    try:
        with in_time(TIME_S):
            unpack(archive, out, limits=LIMITS)
        return judge(out, mutant, original)
    except QatError as error:
        return refusal(str(error), out)
    except (Exception, TookTooLong):  # noqa: BLE001  any other end is what is looked for
        return f"WRONG: {traceback.format_exc()}"
    finally:
        archive.unlink()
        shutil.rmtree(out, ignore_errors=True)


def judge(out: Path, mutant: Mutant, original: str) -> str:
    """What came of a mutant that was unpacked."""
    paths = list(out.rglob("*"))
    if any(path.is_symlink() or not (path.is_file() or path.is_dir()) for path in paths):
        return "WRONG: something else than files"
    if sum(path.stat().st_size for path in paths) > 2 * LIMITS.floor_bytes:
        return "WRONG: more than the limit"
    if mutant.is_checked and sha256_tree(out) != original:
        return "WRONG: other files than the original ones"
    return "unpacked"


def refusal(message: str, out: Path) -> str:
    """The kind of a refusal, from its one line."""
    if out.exists():
        return "WRONG: refused, yet the target is there"
    if "\n" in message:
        return "WRONG: a message of several lines"
    for reason in (
        "holds",
        "unpacks to more",
        "ends early",
        "expected .tar.lz4",
        "writing stopped",
    ):
        if reason in message:
            return f"refused: {reason}"
    return "refused: damaged" if DAMAGE in message else f"refused: {message[:60]}"


def snapshot(place: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything in the workplace: size, time of change and content."""
    found = {}
    for path in sorted(place.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        when = 0 if path.name == "target" else state.st_mtime_ns
        found[str(path)] = (state.st_size if path.is_file() else 0, when, content)
    return found


def unpacked_hash(place: Path, source: Source) -> str:
    """The hash of the honest archive's files."""
    import lz4.frame

    archive, out = place / "archive", place / "target" / "out"
    archive.write_bytes(lz4.frame.compress(source.tar))
    unpack(archive, out)
    found = sha256_tree(out)
    archive.unlink()
    shutil.rmtree(out)
    return found


@contextmanager
def workplace() -> Iterator[Path]:
    """A directory in memory, if the system has one, with something to protect beside the target."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        place = Path(name)
        (place / "sentinel").mkdir()
        (place / "sentinel" / "secret").write_text("as it was")
        (place / "target").mkdir()
        yield place


if __name__ == "__main__":
    main()
