"""Proves that a cache is byte for byte what its builder wrote, and laid out as it promises."""

from pathlib import Path
from typing import NamedTuple

from qat.data.cache import Manifest, Shard, read_manifest, shard_problem
from qat.data.rows import Layout, promised_layout
from qat.data.shard_file import OpenShard
from qat.errors import CacheError
from qat.logs import progress


class Finding(NamedTuple):
    """One shard and what is wrong with it; None when nothing is."""

    shard: Shard
    problem: str | None


def check_shards(directory: Path) -> tuple[Manifest, list[Finding]]:
    """The proven manifest, and a finding for each shard after reading every byte.

    Its hash proves that a shard is what its author wrote; whether that can be read is looked at
    too.

    Raises:
        CacheError: the manifest is missing, foreign, damaged, or of an unknown format.
    """
    manifest = read_manifest(directory)
    layout, findings = promised_layout(manifest), []
    with progress("verify", len(manifest.shards), "shards") as ticker:
        for shard in manifest.shards:
            findings.append(Finding(shard, _problem(directory, shard, layout)))
            ticker.advance()
    return manifest, findings


def _problem(directory: Path, shard: Shard, layout: Layout) -> str | None:
    problem = shard_problem(directory, shard, deep=True)
    if problem is None:
        path = shard.path(directory)
        try:
            OpenShard(path, shard, layout)
        except CacheError as error:
            problem = str(error).removeprefix(f"{path}: ").partition(", expected")[0]
    return problem


def raise_if_any_damaged(directory: Path, findings: list[Finding]) -> None:
    """Turn findings into the error that names every damaged shard.

    Raises:
        CacheError: there is at least one.
    """
    damaged = [f"{f.shard.file}: {f.problem}" for f in findings if f.problem]
    if damaged:
        raise CacheError(
            f"{directory}: {len(damaged)} of {len(findings)} shards are damaged "
            f"({'; '.join(damaged)}); restore them, or delete them and run "
            "the same 'qat cache' command again"
        )
