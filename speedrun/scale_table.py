"""Bytes, files and hours of large caches, and where one device's memory ends for large students.

Hours follow from rates that were measured (the defaults are those of the records): tokens per
second fall with the model's size as its arithmetic grows, bytes per token do not depend on it.
Memory is counted on published shapes, as `qat train --form auto` counts it.

python speedrun/scale_table.py
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import torch

from qat.bench.config import MeasureConfig
from qat.bench.student import quantized_model
from qat.models.cost import StepBytes, devices_named, step_bytes
from qat.train.config import TrainConfig
from qat.train.optim import linears_in_scope

Row = dict[str, object]
Cells = Iterable[str]
Held = dict[str, dict[str, StepBytes]]

TOKENS = (1e9, 1e10, 1e11, 1e12)
SIZES = (0.6, 1.7, 4.0, 8.0, 14.0, 32.0, 70.0)
"""Students and teachers, billions of parameters."""
GIB = 2**30
LARGEST_SHARD = GIB
STUDENTS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.3-70b")
CARDS = ("RTX4090", "A100-40", "H100", "H200", "B200")
LEARN = "scales,codebook"
BF16 = {"learn": "weights", "latent_dtype": "bf16"}
KINDS: dict[str, tuple[str, Row]] = {
    "frozen codes `v2a2`, scales and codebooks": ("v2a2", {"learn": LEARN}),
    "frozen codes `q2a4`, scales and codebooks": ("q2a4", {"learn": LEARN}),
    "latents, bf16, `--offload latents`": ("q2a4", BF16 | {"offload": "latents"}),
    "latents, bf16, `--offload moments`": ("q2a4", BF16 | {"offload": "moments"}),
    "latents, bf16, 8-bit moments": ("q2a4", BF16 | {"optimizer": "adamw8bit"}),
    "latents, bf16, bf16 moments": ("q2a4", BF16),
    "latents, fp32, fp32 moments": ("q2a4", {"learn": "weights"}),
}
"""What learns, in which preset's codes and by which settings."""


def main() -> None:
    """Print the tables as Markdown."""
    arguments = parse()
    print(table(("tokens kept", *headings()), cache_rows(arguments)))
    print(table(("size", "tokens/s", *(f"{count:.0e}" for count in TOKENS)), hours(arguments)))
    held = {name: held_bytes(settings, to) for name, (to, settings) in KINDS.items()}
    print(table(("what learns, GiB", *STUDENTS), memory(held)))
    print(table(("what learns", *CARDS), limits(held, arguments.activations_gib)))


def parse() -> argparse.Namespace:
    """The command line; a rate is SIZE=TOKENS_PER_S with the size in billions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--train", nargs="+", type=pair, default=[(0.6, 157123.0), (1.7, 60160.0), (4.0, 25618.0)])
    add("--cache", nargs="+", type=pair, default=[(0.6, 381719.0)])
    add(
        "--bytes",
        nargs="+",
        type=pair_of_text,
        default=[("top-64", 226.541), ("top-32", 118.494), ("50 draws", 39.0)],
    )
    add("--length", type=int, default=64, help="tokens of a sequence")
    add("--activations-gib", type=float, default=10.0)
    return parser.parse_args()


def pair(text: str) -> tuple[float, float]:
    """`SIZE=RATE` as two numbers."""
    size, _, rate = text.partition("=")
    return float(size), float(rate)


def pair_of_text(text: str) -> tuple[str, float]:
    """`NAME=BYTES`."""
    name, _, rate = text.rpartition("=")
    return name, float(rate)


def headings() -> Cells:
    """The columns about each count of tokens."""
    return (f"{count:.0e} tokens: TB, files" for count in TOKENS)


def cache_rows(arguments: argparse.Namespace) -> Iterable[Cells]:
    """What each kind of cache takes, and how to cut it into shards."""
    for name, bytes_per_token in arguments.bytes:
        size = shard_size(bytes_per_token * arguments.length)
        total = [count * bytes_per_token for count in TOKENS]
        files = [-(-count // (size * arguments.length)) for count in TOKENS]
        cells = [f"{t / 1e12:,.2f}, {n:,.0f}" for t, n in zip(total, files, strict=True)]
        yield f"{name}: {bytes_per_token:.0f} B, `--shard-size {size}`", *cells


def shard_size(sequence_bytes: float) -> int:
    """The power of two of sequences whose shard has more than half a GiB and at most one."""
    size = 1
    while 2 * size * sequence_bytes <= LARGEST_SHARD:
        size *= 2
    return size


def hours(arguments: argparse.Namespace) -> Iterable[Cells]:
    """Hours of one device: teachers that build a cache, then students that learn from it."""
    for verb, measured in (("cache", arguments.cache), ("train", arguments.train)):
        for size in SIZES:
            rate, is_measured = speed(measured, size)
            cells = [f"{count / rate / 3600:,.0f} h" for count in TOKENS]
            mark = "" if is_measured else " (extrapolated)"
            yield f"{verb} {size:g}B", f"{rate:,.0f}{mark}", *cells


def speed(measured: list[tuple[float, float]], size: float) -> tuple[float, bool]:
    """Tokens per second of a model, and whether that is measured; else from the nearest size."""
    if size in dict(measured):
        return dict(measured)[size], True
    nearest, rate = min(measured, key=lambda each: abs(each[0] - size))
    return rate * nearest / size, False


def held_bytes(settings: Row, to: str) -> dict[str, StepBytes]:
    """What a step of each student holds beside activations, by the project's own count."""
    config, dtype = TrainConfig(cache_dir=Path("cache"), **settings), torch.bfloat16
    found = {}
    for shape in STUDENTS:
        model = quantized_model(shape, MeasureConfig(to=to), "meta")
        learning = linears_in_scope(model, config.scope, config.kinds)
        found[shape] = step_bytes(model, learning, config, dtype)
    return found


def memory(held: Held) -> Iterable[Cells]:
    """GiB that a step holds, its weights formed at once and by layer."""
    for name, by_shape in held.items():
        ways = [[each.total(by_layer=way) for way in (False, True)] for each in by_shape.values()]
        yield name, *(f"{whole / GIB:,.1f}, {layer / GIB:,.1f}" for whole, layer in ways)


def limits(held: Held, activations_gib: float) -> Iterable[Cells]:
    """The largest student that each device has room for, with those activations beside."""
    for name, by_shape in held.items():
        cells = []
        for device in devices_named(CARDS):
            room = (device.memory_gib - activations_gib) * GIB
            fits = {
                way: [shape for shape, each in by_shape.items() if each.total(by_layer=way) <= room]
                for way in (False, True)
            }
            whole, layer = (found[-1] if found else "none" for found in fits.values())
            cells.append(layer if whole == layer else f"{layer} (at once: {whole})")
        yield name, *cells


def table(heads: Cells, rows: Iterable[Cells]) -> str:
    """A Markdown table."""
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    main()
