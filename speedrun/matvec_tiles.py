"""Which tile of `lut_matvec` a device likes best, matrix by matrix: every candidate is timed.

A candidate is called on different random matrices that no cache holds, in one recorded graph, as
a decoding step calls it.
"""

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from measure_kernels import times
from torch import Tensor

from qat.backend import Backend
from qat.kernels import lut_matvec_triton
from qat.kernels.lut_levels_triton import SELECT
from qat.kernels.lut_matvec import UNIT, LutRows, Norm, Rows, matvec, matvec_add
from qat.kernels.lut_matvec_tiles import CHOSEN, Tile, tile_for
from qat.quant.pack import Packed, packed_width
from qat.quant.weight import Scales

GROUP = 16
WORKERS = 12
PARTS = 640
"""Sums of squares that a norm adds up."""
PACKED_TILES = (
    Tile(16, 32, 1, 4, registers=64),
    Tile(16, 32, 1, 4, registers=96),
    Tile(8, 32, 1, 2, registers=96),
    Tile(32, 32, 1, 8, registers=80),
    Tile(32, 32, 1, 4, registers=128),
    Tile(4, 128, 1, 4, registers=64),
    Tile(4, 128, 1, 4, registers=128),
    Tile(4, 128, 2, 4, registers=128),
    Tile(2, 128, 1, 2, registers=96),
    Tile(8, 128, 1, 8, registers=96),
)
DENSE_TILES = (
    Tile(4, 512, 1, 4),
    Tile(4, 512, 5, 4),
    Tile(8, 512, 1, 8),
    Tile(2, 512, 5, 4),
    Tile(4, 1024, 2, 4),
)


class Matrix(NamedTuple):
    """A matrix of a decoding step."""

    name: str
    out_features: int
    """Of the result: half of the rows where they are gates and ups."""
    in_features: int
    bits: int
    """16 for a dense one."""
    is_gated: bool = False
    is_added: bool = False
    """Onto the residual stream; else there is a norm before it."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Where `CHOSEN` keeps its tile."""
        return self.out_features, self.in_features, self.bits


class Timed(NamedTuple):
    """What one candidate took."""

    matrix: Matrix
    tile: Tile
    call_us: float
    gb_per_s: float


def matrices(config: object, bits: int, head_bits: int) -> list[Matrix]:
    """The five of a model of that configuration."""
    D, F = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    keys = 2 * config.num_key_value_heads * config.head_dim
    return [
        Matrix("queries, keys, values", heads + keys, D, bits),
        Matrix("attention out", D, heads, bits, is_added=True),
        Matrix("gates and ups", F, D, bits, is_gated=True),
        Matrix("down", D, F, bits, is_added=True),
        Matrix("head", config.vocab_size, D, head_bits),
    ]


def random_rows(matrix: Matrix, device: torch.device) -> Rows:
    """Any matrix of that kind: dense, or of groups of 16 with 8-bit scales."""
    O, I = matrix.out_features * (2 if matrix.is_gated else 1), matrix.in_features
    if matrix.bits == 16:
        return torch.randn(O, I, dtype=torch.bfloat16, device=device)
    width = packed_width(I, matrix.bits)
    octets = torch.randint(256, (O, width), dtype=torch.uint8, device=device)
    scales = Scales(torch.rand(O, I // GROUP, device=device) + 0.5, bits=8)
    levels = torch.linspace(-1, 1, 2**matrix.bits, device=device)
    return LutRows.of(Packed(octets, matrix.bits, I), levels, scales, is_short=True)


def num_bytes(rows: Rows) -> int:
    """What a call reads."""
    return rows.nbytes if isinstance(rows, Tensor) else rows.octets.nbytes + rows.scales.nbytes


def choose(
    wanted: list[Matrix], backend: Backend, *, repeats: int, spread_bytes: int
) -> Iterator[Timed]:
    """Time every candidate of each matrix; the fastest is used from then on.

    As many matrices are read as hold `spread_bytes`.
    """
    compile_all(wanted, backend)
    for matrix in wanted:
        rows = [random_rows(matrix, backend.device)]
        while len(rows) * num_bytes(rows[0]) < spread_bytes:
            rows.append(random_rows(matrix, backend.device))
        found = [
            one(matrix, tile, rows, backend=backend, repeats=repeats) for tile in candidates(matrix)
        ]
        best = min(found, key=lambda timed: timed.call_us)
        CHOSEN[matrix.key] = best.tile
        yield from found


def candidates(matrix: Matrix) -> list[Tile]:
    """Tiles to try, the default first; for 2 bits, its other way to look levels up too."""
    default = tile_for(*matrix.key)
    unit, others = (1, DENSE_TILES) if matrix.bits == 16 else (16, PACKED_TILES)
    in_tile = {tile: tile.units * tile.depth * unit for tile in others}
    # not those of which more than a third would lie outside the row
    I = matrix.in_features
    fitting = [tile for tile, size in in_tile.items() if I % size == 0 or I > 2 * size]
    slow = [default._replace(lookup=SELECT)] if matrix.bits == 2 else []
    return list(dict.fromkeys([default, *fitting, *slow]))


def one(matrix: Matrix, tile: Tile, rows: list[Rows], *, backend: Backend, repeats: int) -> Timed:
    """The median time of one candidate's calls."""
    run = call_of(matrix, backend.device)
    with using(matrix, tile):
        seconds = times(lambda: [run(each) for each in rows], backend, repeats)
    call_s = statistics.median(seconds) / len(rows)
    return Timed(matrix, tile, 1e6 * call_s, num_bytes(rows[0]) / call_s / 1e9)


def call_of(matrix: Matrix, device: torch.device) -> Callable[[Rows], object]:
    """A product with what stands around it in a decoding step."""
    x = torch.ones(1, matrix.in_features, device=device)
    if matrix.is_added:
        residual, gamma = torch.ones(2, matrix.out_features, device=device)
        return lambda rows: matvec_add(x, rows, residual[None], gamma, order=UNIT)
    norm = Norm(torch.ones(1, PARTS, device=device), 1e-6)
    return lambda rows: matvec(x, rows, norm=norm, is_gated=matrix.is_gated)


def compile_all(wanted: list[Matrix], backend: Backend) -> None:
    """Compile every candidate, several at a time."""
    if not backend.records():
        return
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(WORKERS) as workers, AsyncCompileMode(workers), compiling_only():
        for matrix in wanted:
            rows = random_rows(matrix, backend.device)
            run = call_of(matrix, backend.device)
            for tile in candidates(matrix):
                with using(matrix, tile):
                    run(rows)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Let a launch of the kernel compile it and nothing more."""
    kernel = lut_matvec_triton._matvec_kernel

    class Warmer:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            return partial(kernel.warmup, grid=grid)

    lut_matvec_triton._matvec_kernel = Warmer()
    try:
        yield
    finally:
        lut_matvec_triton._matvec_kernel = kernel


@contextmanager
def using(matrix: Matrix, tile: Tile) -> Iterator[None]:
    """A tile for one kind of matrix."""
    old = dict(CHOSEN)
    CHOSEN[matrix.key] = tile
    try:
        yield
    finally:
        CHOSEN.clear()
        CHOSEN.update(old)
