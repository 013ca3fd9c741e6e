"""Tuning of a kernel: every configuration is tried, the best few again against the default.

A configuration is adopted only if it gives the results of the default and was not slower in turns
with it: the 95 % interval of the median of the ratios must be at or above 1.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import tomli_w
import torch

from qat.extensions.bench.measure import Clock, Row
from qat.extensions.bench.stats import Interval, median_interval
from qat.extensions.decode.kernels.launch import has_warpgroups
from qat.extensions.decode.kernels.lut_matvec import (
    MmaTile,
    Tile,
    mma_tile_for,
    sums_tile_for,
    tile_for,
    vectors_mma_tile_for,
    vectors_tile_for,
)
from qat.extensions.decode.kernels.lut_rows import UNIT, is_mma_format
from qat.extensions.decode.kernels.lut_sums import NO_SUMS, SumsTile
from qat.extensions.lab.kernels.gates import (
    FAULTS,
    MESSAGE,
    Inputs,
    KernelCase,
    Outputs,
    Seeds,
    Size,
    Space,
    copied,
    recorded,
    spread_inputs,
    worst_of,
)
from qat.files import write_atomically
from qat.kernels import tuned
from qat.kernels.glu import LARGEST_BLOCK, Cut
from qat.kernels.head import Gather
from qat.kernels.lut_tiles import FormTile
from qat.kernels.lut_vectors import ChooseTile, ReduceTile
from qat.kernels.topk import BlockPass

# The configurations that tuning tries, by kernel, as types of `qat.kernels`.

PACKED = (
    (16, 32, 1, 4, 64),
    (16, 32, 1, 4, 96),
    (8, 32, 1, 2, 96),
    (32, 32, 1, 4, 128),
    (4, 128, 1, 4, 64),
    (4, 128, 1, 4, 128),
    (2, 128, 1, 2, 96),
    (8, 128, 1, 8, 96),
)
"""Rows, units, depth, warps and registers of a tile."""
SUMS = (
    *product((512, 256), (1, 2, 3, 4), (8,), (2,)),
    *product((256,), (2, 3, 4), (4,), (2,)),
    (512, 3, 8, 3),
    (512, 4, 8, 4),
    (256, 4, 8, 4),
)
"""Inputs, rows of a warp / 32, warps, and prefetched rows / 32 of a `SumsTile`."""
DENSE = ((4, 512, 1, 4), (4, 512, 5, 4), (8, 512, 1, 8), (2, 512, 5, 4), (4, 1024, 2, 4))


def matvec_space(
    size: Size, bits: int, *, is_short: bool, is_gated: bool = False, d: int = 1
) -> Space:
    """Return tiles for a matrix-vector product; with `is_short`, of tensor cores where they fit.

    On Hopper, where sums can be looked up: tiles for that, and `NO_SUMS`, which leaves it to tensor
    cores.
    """
    I, is_dense = size["I"], bits == 16
    key = (size["O"], I, bits // d)
    if is_short and is_mma_format(bits, d, I):
        rows = size["O"] * (2 if is_gated else 1)
        default = sums_tile_for(rows, I, has_groups=_is_hopper())
        if bits // d == 2 and default != NO_SUMS:
            tiles = [*map(SumsTile._make, SUMS), NO_SUMS]
            kernel = "vectors_sums" if d > 1 else "lut_sums"
            return _space(kernel, (rows, I, bits // d), default, tiles)
        cuts = [MmaTile(*one) for one in product((1, 2, 4), (1, 2, 4, 8, 16))]
        if d > 1:
            cuts += [MmaTile(units, 8, registers) for units in (2, 4) for registers in (96, 128)]
        fitting = [cut for cut in cuts if 4 * cut.units * cut.warps <= I // UNIT]
        if d > 1:
            return _space("vectors_mma", key, vectors_mma_tile_for(*key), fitting)
        return _space("lut_mma", key, mma_tile_for(*key), fitting)
    listed = DENSE if is_dense else PACKED
    tiles = [Tile(*t[:4], registers=0 if is_dense else t[4]) for t in listed]
    # without tiles of which more than a third would be outside the row
    widths = [tile.units * tile.depth * (1 if is_dense else UNIT) for tile in tiles]
    fitting = [t for t, w in zip(tiles, widths, strict=True) if I % w == 0 or I > 2 * w]
    if d > 1:
        return _space("vectors_matvec", key, vectors_tile_for(*key), fitting)
    return _space("lut_matvec", key, tile_for(*key), fitting)


def _is_hopper() -> bool:
    return torch.cuda.is_available() and has_warpgroups(torch.device("cuda"))


def form_space(size: Size, bits: int, d: int, *, is_packed: bool) -> Space:
    """Return tiles for forming a weight."""
    key = (size["O"], size["I"], bits if is_packed else 0, 2**bits * d)
    return _space("lut_form", key, FormTile(), map(FormTile, (1024, 2048, 8192)))


def choose_space(size: Size, C: int, d: int) -> Space:
    """Return tiles of vectors and chunks of codewords whose scores fit into registers."""
    listed = map(ChooseTile._make, product((64, 128), (64, 128), (2, 4, 8), (8, 24), (4, 8)))
    fitting = [one for one in listed if 4096 <= one.vectors * one.chunk / one.warps * 4 <= 16384]
    default = ChooseTile.of(size["O"] * size["I"] // d, C)
    return _space("vectors_choose", (size["O"], size["I"], C, d), default, fitting)


def reduce_space(size: Size, C: int, d: int) -> Space:
    """Return tiles of vectors that are summed by codeword, and numbers of programs."""
    listed = map(ReduceTile._make, product((32, 64, 128, 256), (132, 264, 528)))
    return _space("vectors_reduce", (size["O"], size["I"], C, d), ReduceTile.of(C, d), listed)


def gated_space(size: Size, kernel: str) -> Space:
    """Return blocks of columns for the gated unit."""
    most = 2 ** (size["F"] - 1).bit_length()
    cuts = (Cut(block, w) for block, w in product((512, 1024, 2048, 4096), (2, 4, 8)))
    fitting = [cut for cut in cuts if cut.block <= most]
    return _space(kernel, (size["F"],), Cut(min(LARGEST_BLOCK, most)), fitting)


def gather_space(size: Size, kernel: str) -> Space:
    """Return pieces of the chosen words' weights."""
    listed = product((4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8))
    pieces = [Gather(*one) for one in listed if 1024 <= one[0] * one[1] / (one[2] / 4) <= 8192]
    return _space(kernel, (size["K"], size["D"]), Gather(), pieces)


def block_pass_space(size: Size) -> Space:
    """Return the number of blocks per program in the pass over logits."""
    listed = [BlockPass(*one) for one in product((16, 32, 64, 128), (2, 4, 8))]
    return _space("top_k_blocks", (size["V"],), BlockPass(), listed)


def _space(kernel: str, key: tuple[int, ...], default: tuple, listed: Iterable[tuple]) -> Space:
    return Space(kernel, key, default, tuple(c for c in dict.fromkeys(listed) if c != default))


# Tuning: kernels are compiled in parallel before any of them runs.

WORKERS = 12
FIRST_ROUNDS = 5


@contextmanager
def compiling_only() -> Iterator[None]:
    """Make launches of Triton kernels in the block only compile; all are compiled at its end.

    Compile errors are ignored here and raised again at the real launch.
    """
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compiled(
        self: JITFunction, *args: object, grid: object, warmup: bool, **options: object
    ) -> object:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(WORKERS) as workers, AsyncCompileMode(workers, ignore_errors=True):
        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = launch


FACTS = "measured"  # the key of the part of a table that is not a kernel's


@dataclass(frozen=True)
class Timed:
    """A configuration and its seconds per call, in turns with the default."""

    configuration: tuple
    seconds: tuple[float, ...]
    ratio: Interval
    """The default's time over its own in the same round, so that drift of the device cancels."""

    @property
    def median_s(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)

    def row(self) -> Row:
        """Return the configuration and its times for a row of results."""
        return {
            **self.configuration._asdict(),
            "median_s": self.median_s,
            "over_default": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
        }


@dataclass(frozen=True)
class Tuned:
    """The result of tuning one kernel at one size."""

    case: str
    space: Space
    calls: int
    num_bytes: int  # bytes per call
    best: tuple[Timed, ...]
    """Configurations that were measured again, fastest first, including the default."""
    refused: dict[tuple, str]
    """Configurations that did not compile or gave other results, with the reason."""

    @property
    def adopted(self) -> Timed | None:
        """The fastest configuration unless it is the default or was slower than it."""
        return faster(self.best, self.space.default)

    @property
    def ratio(self) -> float:
        """The speedup of the adopted configuration over the default; 1 if the default stays."""
        return 1.0 if self.adopted is None else self.adopted.ratio.median

    def row(self) -> Row:
        """Return the columns of a row of results."""
        runs = self.adopted or next(t for t in self.best if t.configuration == self.space.default)
        return {
            "kind": "tuned",
            "case": f"{self.case}, tuned",
            "kernel": self.space.kernel,
            "key": tuned.named(self.space.key),
            "calls": self.calls,
            "unit": "s",
            "samples": list(runs.seconds),
            "requested": self.space.default._asdict(),
            "effective": runs.configuration._asdict(),
            "over_default": self.ratio,
            "best": [each.row() for each in self.best],
            "refused": [[*c, why] for c, why in self.refused.items()],
        }


def tune(case: KernelCase, size: Size, *, seeds: Seeds, clock: Clock, keep: int) -> Tuned:
    """Find the best configuration of a case's kernel at one size."""
    with torch.no_grad():
        inputs = spread_inputs(case, size, seeds, is_spread=clock.backend.records)
        trial = Tuning(case, size, case.space(size), inputs, clock)
        runs, refused = trial.runs()
        first = replace(clock, repeats=min(FIRST_ROUNDS, clock.repeats)).turns([*runs.values()])
        medians = dict(zip(runs, map(statistics.median, first), strict=True))
        default = trial.space.default
        near = sorted((c for c in runs if c != default), key=medians.__getitem__)
        few, wanted = [default], trial.once(default)
        # both may err by the case's slack, and a sum in another order by slightly more
        lenient = replace(case, slack=2 * case.slack + 2e-6)
        for configuration in near:
            if len(few) > keep:
                break
            wrong = worst_of(lenient, trial.once(configuration), wanted, case.compared(wanted))
            if wrong:
                refused[configuration] = wrong
            else:
                few.append(configuration)
        timed = timed_in_turns({each: runs[each] for each in few}, clock, calls=len(inputs))
        moved = case.num_bytes(inputs[0], wanted, size)
    return Tuned(case.name, trial.space, len(inputs), moved, timed, refused)


def timed_in_turns(
    runs: dict[tuple, Callable[[], object]], clock: Clock, *, calls: int
) -> tuple[Timed, ...]:
    """Time runs of several calls in turns and compare them with the first; fastest first."""
    found = clock.turns([*runs.values()])
    timed = [
        Timed(
            configuration,
            tuple(s / calls for s in seconds),
            median_interval([a / b for a, b in zip(found[0], seconds, strict=True)]),
        )
        for configuration, seconds in zip(runs, found, strict=True)
    ]
    return tuple(sorted(timed, key=lambda each: each.median_s))


def faster(best: tuple[Timed, ...], current: tuple) -> Timed | None:
    """Return the fastest configuration unless it is `current` or not proven faster than it."""
    is_better = best[0].configuration != current and best[0].ratio.low >= 1.0
    return best[0] if is_better else None


@dataclass(frozen=True)
class Tuning:
    """A case's kernel at one size, ready to run with several configurations."""

    case: KernelCase
    size: Size
    space: Space
    inputs: list[Inputs]
    clock: Clock

    def runs(self) -> tuple[dict[tuple, Callable[[], object]], dict[tuple, str]]:
        """Return calls on all inputs by configuration, default first, and the compile errors."""
        runs: dict[tuple, Callable[[], object]] = {}
        refused: dict[tuple, str] = {}
        every = (self.space.default, *self.space.others)
        if self.clock.backend.records:
            with compiling_only():
                for configuration in every:
                    self.once(configuration)
        for configuration in every:
            try:
                runs[configuration] = self._run(configuration)
            except FAULTS as error:
                if configuration == self.space.default:
                    raise
                refused[configuration] = f"{type(error).__name__}: {error}"[:MESSAGE]
        return runs, refused

    def once(self, configuration: tuple) -> Outputs:
        """Return the results of one call with a configuration."""
        with self._forcing(configuration):
            return self.case.kernel(copied(self.inputs[0]), self.size)

    def _run(self, configuration: tuple) -> Callable[[], object]:
        backend = self.clock.backend
        if backend.records:
            with self._forcing(configuration):
                return recorded(self.case, self.size, self.inputs, backend)

        def run() -> None:
            with self._forcing(configuration):
                for each in self.inputs:
                    self.case.kernel(each, self.size)

        run()
        return run

    def _forcing(self, configuration: tuple) -> AbstractContextManager[None]:
        return tuned.forcing(self.space.kernel, self.space.key, configuration)


def write_table(path: Path, found: list[Tuned], facts: dict[str, object]) -> None:
    """Write adopted configurations into a device's table; remove entries where the default won."""
    chosen = {
        (each.space.kernel, each.space.key): each.adopted and each.adopted.configuration
        for each in found
    }
    write_entries(path, chosen, facts)


def write_entries(
    path: Path, chosen: dict[tuple[str, tuned.Key], tuple | None], facts: dict[str, object]
) -> None:
    """Write configurations by kernel and key into a device's table; None removes an entry.

    Entries of other kernels and keys are kept.
    """
    table = tuned.read_table(path)
    for (kernel, key), configuration in chosen.items():
        entries = table.setdefault(kernel, {})
        entries.pop(tuned.named(key), None)
        if configuration is not None:
            entries[tuned.named(key)] = configuration._asdict()
    kept = {name: entries for name, entries in sorted(table.items()) if entries and name != FACTS}
    known = {name: value for name, value in facts.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, tomli_w.dumps({FACTS: known, **kept}))
    tuned.forget_tables()
