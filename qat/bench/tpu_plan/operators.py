"""Operators that torchax lacks, gets wrong, or lowers to what a TPU compiles for minutes."""

import logging
from collections.abc import Sequence

import torch

from qat.bench.tpu_plan import pieces as graphs
from qat.bench.tpu_plan.libraries import jnp, lax, register_torch_dispatch_op

SMALL_TABLE = 16
"""Entries of a codebook that are looked up by comparison: a gather or a sort costs a TPU more."""
aten = graphs.aten
DTYPES = {
    torch.float64: jnp.float32,
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int64: jnp.int32,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
}
"""What a TPU holds a tensor in: 64 bits become 32."""


def take(table: jnp.ndarray, indices: jnp.ndarray) -> jnp.ndarray:
    """`table[indices]`, level by level."""
    found = jnp.broadcast_to(table[0], indices.shape)
    for level in range(1, table.shape[0]):
        found = jnp.where(indices == level, table[level], found)
    return found


def index_select(x: jnp.ndarray, dim: int, i: jnp.ndarray) -> jnp.ndarray:
    """`aten.index_select`."""
    return take(x, i) if _is_small(x) else jnp.take(x, i, axis=dim)


def index(x: jnp.ndarray, indices: Sequence[jnp.ndarray | None]) -> jnp.ndarray:
    """`aten.index`."""
    if _is_small(x) and len(indices) == 1:
        return take(x, indices[0])
    return x[tuple(slice(None) if i is None else i for i in indices)]


def bucketize(
    x: jnp.ndarray, edges: jnp.ndarray, *, out_int32: bool = False, right: bool = False
) -> jnp.ndarray:
    """`aten.bucketize`: how many edges lie below."""
    above = (x >= edge if right else x > edge for edge in edges)
    return sum((found.astype(jnp.int32) for found in above), jnp.zeros(x.shape, jnp.int32))


def sort(
    x: jnp.ndarray, *, stable: bool = True, dim: int = -1, descending: bool = False
) -> tuple[jnp.ndarray, jnp.ndarray]:
    """`aten.sort` of a codebook: every entry's rank, by comparison.

    Raises:
        NotImplementedError: it is no codebook.
    """
    if not _is_small(x) or descending:
        raise NotImplementedError("a sort of more than a codebook")
    i = jnp.arange(x.shape[0])
    before = (x[None] < x[:, None]) | ((x[None] == x[:, None]) & (i[None] < i[:, None]))
    is_here = before.sum(1)[None] == i[:, None]
    return jnp.where(is_here, x[None], 0).sum(1), jnp.where(is_here, i[None], 0).sum(1)


def scatter_add(x: jnp.ndarray, dim: int, i: jnp.ndarray, values: jnp.ndarray) -> jnp.ndarray:
    """`aten.scatter_add` along rows."""
    if x.shape[1] > SMALL_TABLE:
        return x.at[jnp.arange(x.shape[0])[:, None], i].add(values)
    parts = [jnp.where(i == level, values, 0).sum(1) for level in range(x.shape[1])]
    return x + jnp.stack(parts, 1)


def scatter_value(x: jnp.ndarray, dim: int, i: jnp.ndarray, value: float) -> jnp.ndarray:
    """`aten.scatter` of one value along rows, column after column of `i`."""
    places = jnp.arange(x.shape[1])[None]

    def mark(k: int, found: jnp.ndarray) -> jnp.ndarray:
        column = lax.dynamic_slice_in_dim(i, k, 1, axis=1)
        return jnp.where(places == column, jnp.asarray(value, x.dtype), found)

    return lax.fori_loop(0, i.shape[1], mark, x)


def bits_as(x: jnp.ndarray, dtype: torch.dtype) -> jnp.ndarray:
    """`aten.view` as another dtype of the same width."""
    return lax.bitcast_convert_type(x, DTYPES[dtype])


def teach_torchax() -> None:
    """Register all of these."""
    known = {
        torch.ops.qat.end_of_forward.default: lambda x: x,
        aten.bucketize.Tensor: bucketize,
        aten.index.Tensor: index,
        aten.index_select.default: index_select,
        aten.scatter.value: scatter_value,
        aten.scatter_add.default: scatter_add,
        aten.sort.stable: sort,
        aten.view.dtype: bits_as,
        aten.view_copy.dtype: bits_as,
        aten._foreach_mul.Tensor: lambda xs, factor: [x * factor for x in xs],
    }
    log = logging.getLogger()
    before, log.disabled = log.disabled, True  # it warns of names that it has already
    try:
        for operator, function in known.items():
            register_torch_dispatch_op(operator, function, is_jax_function=True)
    finally:
        log.disabled = before


def _is_small(table: jnp.ndarray) -> bool:
    return table.ndim == 1 and table.shape[0] <= SMALL_TABLE
