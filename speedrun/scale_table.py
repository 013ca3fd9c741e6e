"""Bytes, files and hours of large caches, and where one device's memory ends for large students.

Everything follows from rates that were measured (the defaults are those of the records): tokens per
second fall with the model's size as its arithmetic grows, bytes per token do not depend on it.

python speedrun/scale_table.py
"""

import argparse
from collections.abc import Iterable

TOKENS = (1e9, 1e10, 1e11, 1e12)
SIZES = (0.6, 1.7, 4.0, 8.0, 14.0, 32.0, 70.0)
"""Students and teachers, billions of parameters."""
GIB = 2**30
LARGEST_SHARD = GIB
KINDS = {
    "frozen codes": 2 + 0.35,
    "latent weights, bf16, 8-bit moments": 2 + 2 + 2 + 2,
    "latent weights, fp32, fp32 moments": 2 + 4 + 4 + 8,
}
"""Bytes for each parameter: the formed bf16 weight, then codes, or latent, gradient and moments."""

Row = Iterable[str]


def main() -> None:
    """Print the tables as Markdown."""
    arguments = parse()
    print(table(("tokens kept", *headings()), cache_rows(arguments)))
    print(table(("size", "tokens/s", *(f"{count:.0e}" for count in TOKENS)), hours(arguments)))
    print(table(("what learns", "bytes a parameter", "largest student"), limits(arguments)))


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
    add("--memory-gib", type=float, default=139.0)
    add("--activations-gib", type=float, default=30.0)
    return parser.parse_args()


def pair(text: str) -> tuple[float, float]:
    """`SIZE=RATE` as two numbers."""
    size, _, rate = text.partition("=")
    return float(size), float(rate)


def pair_of_text(text: str) -> tuple[str, float]:
    """`NAME=BYTES`."""
    name, _, rate = text.rpartition("=")
    return name, float(rate)


def headings() -> Row:
    """The columns about each count of tokens."""
    return (f"{count:.0e} tokens: TB, files" for count in TOKENS)


def cache_rows(arguments: argparse.Namespace) -> Iterable[Row]:
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


def hours(arguments: argparse.Namespace) -> Iterable[Row]:
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


def limits(arguments: argparse.Namespace) -> Iterable[Row]:
    """The largest student whose weights and moments leave room for the activations."""
    room = (arguments.memory_gib - arguments.activations_gib) * GIB
    for name, size in KINDS.items():
        largest = room / size / 1e9
        fitting = [each for each in SIZES if each <= largest]
        yield name, f"{size:.2f}", f"{largest:.0f}B (of the above: {fitting[-1]:g}B)"


def table(heads: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [list(heads), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    main()
