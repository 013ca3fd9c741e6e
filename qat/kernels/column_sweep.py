"""The two steps inside a block of a column sweep, by whoever does them fastest.

A Triton program holds a block of a tile of rows in registers and walks its columns there; the
references in `quant.columns` take some ten operations a column.
"""

from torch import Tensor

from qat.kernels.dispatch import use_triton
from qat.quant import columns as reference
from qat.quant.columns import ColumnOps, Columns

MOST_COLUMNS = 128
"""Columns of a block that registers hold."""
MOST_LEVELS = 16
"""Levels that a kernel compares with one by one."""


def settle_columns(columns: Columns, target: Tensor, coupling: Tensor) -> None:
    """Quantize columns one after the other, as `quant.columns.settle_columns` defines it."""
    is_small = len(target) <= MOST_COLUMNS and len(columns.levels) <= MOST_LEVELS
    if use_triton(target) and is_small:
        from qat.kernels import column_sweep_triton as triton

        triton.settle_columns_by_kernel(columns, target, coupling)
    else:
        reference.settle_columns(columns, target, coupling)


def refit_scale(columns: Columns, target: Tensor, coupling: Tensor, diagonal: Tensor) -> None:
    """Fit scales anew, as `quant.columns.refit_scale` defines it."""
    if use_triton(target) and len(target) <= MOST_COLUMNS:
        from qat.kernels import column_sweep_triton as triton

        triton.refit_scale_by_kernel(columns, target, coupling, diagonal)
    else:
        reference.refit_scale(columns, target, coupling, diagonal)


COLUMN_OPS = ColumnOps(settle_columns, refit_scale)
