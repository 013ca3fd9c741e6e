"""Reads a cache of many GiB in random order and in sequence: what stays in memory, and how fast.

The cache is synthetic: one block of random signals, repeated to a shard, and that shard copied
until the size is reached. All of it is proven by its hashes first, as a run does on the way. It is
read twice: with what the system keeps in memory of the files, then from the disk alone.

python speedrun/measure_cache_resident.py --scratch DIR --figures FILE.jsonl
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import torch
from figures import record
from torch import Tensor

from qat.backend.device import select
from qat.data.cache import MANIFEST, Manifest, Shard, TeacherInfo, new_manifest
from qat.data.codec import TopK, encode_draws, encode_top_k, id_bits, pack_bits
from qat.data.config import CacheSettings
from qat.data.pipeline import computed_ahead
from qat.data.reader import TeacherCache
from qat.data.shard_file import shard_content
from qat.files import sha256_file

VOCAB, LENGTH, TOP_K, DRAWS = 151_936, 512, 64, 8
BLOCK, SHARD = 64, 4096
"""Sequences of random signals, and of a shard (about half a GiB)."""
BATCH, ROUND_BATCHES, ROUNDS = 16, 64, 11
AHEAD = 3
GIB = 2**30


def main() -> None:
    """Build, prove, read, and record the peak of resident memory less what it began with."""
    arguments = parse()
    torch.set_num_threads(1)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as name:
        directory = Path(name)
        synthesise(directory, arguments.gib)
        backend = select("cpu")
        backend.free_memory()
        backend.reset_peak_memory()
        begin = backend.held_memory_gib()
        cache = TeacherCache.open(directory)
        total = cache.num_sequences("train")
        for first in range(0, total, SHARD):
            cache.batch([first])  # proves the shard
        speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for source, number in product(("memory", "disk"), range(ROUNDS)):
            for order, places in orders(total, number).items():
                if source == "disk":
                    forget(directory)
                speeds[source, order].append(tokens_per_s(cache, places))
        resident_gib = backend.peak_memory_gib() - begin
        size_gib = cache.manifest.total("bytes") / GIB
    report(resident_gib * 1024, size_gib, speeds, arguments.figures)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, help="a directory with room for the cache")
    parser.add_argument("--gib", type=float, default=8.0, help="the least size of the cache")
    parser.add_argument("--figures", type=Path)
    return parser.parse_args()


def synthesise(directory: Path, gib: float) -> None:
    """A complete cache of at least `gib` GiB in `directory`."""
    first = directory / "train-00000.safetensors"
    first.write_bytes(shard_content({n: repeated(rows) for n, rows in encoded_block().items()}))
    size, digest = first.stat().st_size, sha256_file(first)
    shards = []
    for number in range(-(-int(gib * GIB) // size)):
        name = f"train-{number:05d}.safetensors"
        if number:
            shutil.copyfile(first, directory / name)
        shards.append(
            Shard(
                file=name,
                split="train",
                sequences=SHARD,
                tokens=SHARD * LENGTH,
                counted=SHARD * LENGTH,
                bytes=size,
                sha256=digest,
                content="0" * 16,
            )
        )
    (directory / MANIFEST).write_bytes(manifest(shards).to_bytes())
    os.sync()  # what is still being written would slow down what is being read


def manifest(shards: list[Shard]) -> Manifest:
    """The manifest of the cache."""
    settings = CacheSettings(
        data="random", sequence_length=LENGTH, top_k=TOP_K, draws=DRAWS, shard_size=SHARD
    )
    teacher = TeacherInfo(
        name="none", identity="0" * 32, vocab_size=VOCAB, max_positions=None, dtype="float32"
    )
    empty = new_manifest(settings, teacher, "0" * 16)
    return empty.model_copy(update={"state": "complete", "shards": shards})


def encoded_block() -> dict[str, Tensor]:
    """The rows of a block of sequences with random tokens and signals."""
    rng = np.random.default_rng(0)
    T, bits = BLOCK * LENGTH, id_bits(VOCAB)
    ids_TK = (rng.integers(0, VOCAB, (T, 1)) + np.arange(TOP_K) * 997) % VOCAB
    distances_TK = np.sort(rng.exponential(4.0, (T, TOP_K)), axis=1)
    distances_TK[:, 0] = 0.0
    lse_T, tail_T = torch.zeros(T), torch.full((T,), -3.0)
    top = TopK(torch.from_numpy(ids_TK), torch.from_numpy(distances_TK), lse_T, tail_T)
    draws = torch.from_numpy(np.sort(rng.integers(0, VOCAB, (BLOCK, LENGTH, DRAWS)), axis=2))
    mask = torch.ones(BLOCK, LENGTH, dtype=torch.bool)
    starts = torch.zeros_like(mask)
    starts[:, 0] = True
    tokens = torch.from_numpy(rng.integers(0, VOCAB, (BLOCK, LENGTH)))
    return {
        "tokens": pack_bits(tokens, bits),
        "starts": pack_bits(starts, 1),
        "mask": pack_bits(mask, 1),
        **encode_draws(draws.int(), mask, VOCAB),
        **encode_top_k(top, BLOCK, VOCAB),
    }


def repeated(rows: Tensor) -> Tensor:
    """The rows of a shard from those of a block."""
    return rows.repeat(SHARD // BLOCK, *[1] * (rows.ndim - 1))


def orders(total: int, seed: int) -> dict[str, np.ndarray]:
    """Sequences to read, neighbours and scattered over the whole cache; equally many."""
    rng, count = np.random.default_rng(seed), BATCH * ROUND_BATCHES
    first = int(rng.integers(0, total - count))
    return {"sequential": np.arange(first, first + count), "random": rng.integers(0, total, count)}


def tokens_per_s(cache: TeacherCache, places: np.ndarray) -> float:
    """Speed of reading and decoding in batches, some of them ahead, as a run does it."""
    began = time.perf_counter()
    for _ in computed_ahead(cache.batch, places.reshape(-1, BATCH), AHEAD):
        pass
    return len(places) * LENGTH / (time.perf_counter() - began)


def forget(directory: Path) -> None:
    """Let go of what the system keeps in memory of the shards."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(
    resident_mib: float,
    size_gib: float,
    speeds: dict[tuple[str, str], list[float]],
    figures: Path | None,
) -> None:
    """Print memory and speeds, and record them."""
    print(f"a cache of {size_gib:.1f} GiB: {resident_mib:.1f} MiB more resident at the peak")
    if figures is not None:
        record(figures, "cache_resident_mib", round(resident_mib, 1), "MiB", "<= 1024")
    for source, figure in (("memory", "cache_random_ratio"), ("disk", "cache_disk_random_ratio")):
        pairs = list(zip(speeds[source, "random"], speeds[source, "sequential"], strict=True))
        ratios = [random / sequential for random, sequential in pairs]
        ratio, spread = round(statistics.median(ratios), 3), round(statistics.stdev(ratios), 3)
        random, sequential = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{source}: sequential {sequential:,.0f} tokens/s, random {random:,.0f}: "
            f"{ratio} of it, standard deviation {spread}"
        )
        if figures is not None:
            record(figures, figure, ratio, "x", ">= 0.9", runs=len(ratios), spread=spread)


if __name__ == "__main__":
    main()
