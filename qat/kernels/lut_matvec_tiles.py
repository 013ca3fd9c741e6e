"""How the kernel of `lut_matvec` cuts a matrix: no result depends on it, only time does."""

from typing import NamedTuple

from qat.kernels.dispatch import triton
from qat.kernels.lut_matvec import UNIT


class Tile(NamedTuple):
    """R rows x U units, and how a program goes through its rows' tiles."""

    rows: int
    units: int
    """Of 16 weights each; of one weight where the matrix is dense."""
    depth: int
    """Tiles that are computed at a time, while as many are read ahead."""
    warps: int
    registers: int = 0
    """The most of a thread, or 0: a compiler left alone reads so far ahead that few threads fit."""


def tile_for(out_features: int, in_features: int, bits: int) -> Tile:
    """The default: one row for each thread, and a row in whole tiles if there are any."""
    if bits == 16:
        depth = 5 if in_features % 2560 == 0 else 4
        return Tile(4, min(512, triton.next_power_of_2(in_features)), depth, 4)
    units, registers = in_features // UNIT, 96 if bits == 2 else 128
    if units % 128 == 0 or units > 512:
        return Tile(4, 128, 1, 4, registers=registers)
    if units % 32 == 0:
        return Tile(16, 32, 1, 4, registers=registers)
    return Tile(8, 64, 1, 4, registers=registers)


class MmaTile(NamedTuple):
    """16 rows, and how the warps of a program go along them (`lut_mma_triton`)."""

    units: int
    """Consecutive units that a lane reads at a time; four lanes share a row."""
    warps: int
    """Warps that share 16 rows."""
    registers: int = 0

    @property
    def rows(self) -> int:
        """Rows of the weight that one program reads."""
        return 16

    @property
    def depth(self) -> int:
        """Spans that are computed at a time."""
        return 1


def mma_tile_for(out_features: int, in_features: int, bits: int) -> MmaTile:
    """The default: a lane reads 16 bytes, and few rows are shared by more warps."""
    units = 4 if bits == 2 else 2
    spans = triton.next_power_of_2(max(in_features // (4 * UNIT * units), 1))
    most = 16 if out_features < 4096 else 8 if out_features < 8192 else 2
    if in_features > 8192:
        most = min(most, 8)
    return MmaTile(units, min(most, spans))
