"""What each rank says of the shards that it wrote, until the manifest says it."""

import os
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from qat.data.cache import SPLITS, Manifest, Shard, shard_problem
from qat.errors import CacheError

LOGS = ".shards-rank*.jsonl"


def note_shard(out: Path, rank: int, shard: Shard) -> None:
    """Append to the rank's file that it wrote `shard` into `out`.

    Raises:
        CacheError: the file cannot be written.
    """
    path = out / LOGS.replace("*", str(rank))
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(shard.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CacheError(
            f"cannot write {path}: {error.strerror}; finished shards are kept: make room and run "
            "the same command again"
        ) from error


def merged(manifest: Manifest, out: Path) -> Manifest:
    """The manifest with every noted shard that is there; a line cut short by a kill is none."""
    found = {shard.file: shard for shard in manifest.shards}
    for path in out.glob(LOGS):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            shard = _parsed(line)
            if shard is not None and shard_problem(out, shard, deep=False) is None:
                found[shard.file] = shard
    return manifest.model_copy(update={"shards": in_order(found.values())})


def remove_logs(out: Path) -> None:
    """Delete the ranks' files: the manifest has it all."""
    for path in out.glob(LOGS):
        path.unlink()


def in_order(shards: Iterable[Shard]) -> list[Shard]:
    """Shards as a manifest lists them, in whatever order they were written."""
    return sorted(shards, key=lambda shard: (SPLITS.index(shard.split), shard.file))


def _parsed(line: str) -> Shard | None:
    try:
        return Shard.model_validate_json(line)
    except ValidationError:
        return None
