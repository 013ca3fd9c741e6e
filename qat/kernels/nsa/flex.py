"""Native Sparse Attention by FlexAttention: each branch reads only the blocks that it may see.

FlexAttention heeds lists of blocks only where it is compiled; run eagerly it would compute another
function. So nothing here runs eagerly: inside a graph that is being compiled it becomes a part of
that, elsewhere a graph of its own.

Shapes as in `qat.kernels.nsa.select`.
"""

import operator

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat.errors import ConfigError
from qat.kernels.nsa import reference
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.flex_branches import EDGE, BranchInputs, compressed, selected, window
from qat.kernels.nsa.select import Inputs, pool, select

LEAST_WIDTH = 16
CANARY = 0.02
"""What rounding to TF32 may add to results around 0.2; dense attention is further away."""
_checked: set[torch.device] = set()
MOST_GRAPHS = 64
"""Lengths, batches and modes that are compiled before it is an error."""


def refusal(config: NSAConfig, *, head_dim: int) -> str | None:
    """Why FlexAttention cannot compute this; None: it can."""
    if head_dim < LEAST_WIDTH:
        return f"head_dim={head_dim} is below {LEAST_WIDTH}"
    for name in ("select_tile", "select_block"):
        small, large = sorted((getattr(config, name), EDGE))
        if large % small:
            return f"{name}={getattr(config, name)} and {EDGE} do not divide one another"
    return None


def attend(inputs: Inputs, config: NSAConfig, selection: Tensor | None = None) -> Tensor:
    """`(B, S, H, D)`; the blocks are those of `selection`, or those that `select` chooses."""
    inputs = of_one_dtype(inputs)
    if torch.compiler.is_compiling():
        return attend_compiling(inputs, config, selection)
    S = inputs.length
    if selection is None:
        inputs = lengthened(inputs, config, bucket(S))
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled(inputs, config, selection)[:, :S]


def attend_other(inputs: Inputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """The compressed branch and the window, `(B, S, H, D)` each."""
    if torch.compiler.is_compiling():
        return other_compiling(inputs, config)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        return _compiled_other(inputs, config)


@torch.no_grad()
def check(device: torch.device) -> None:
    """Make sure, once in a process, that lists of blocks are heeded on `device`.

    Raises:
        ConfigError: they are not.
    """
    if device in _checked:
        return
    config = NSAConfig(mode="merged", num_selected=3)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 6 * EDGE, 32, generator=generator).to(device)
    inputs = Inputs(query, key, value, pool(key, config), None, None, None, 32**-0.5)
    with torch.autocast(device.type, enabled=False):
        selection = select(inputs, config)
        expected = reference.attend(inputs, selection, config)
        error = (attend(inputs, config, selection) - expected).abs().max().item()
    if not error < CANARY:
        raise ConfigError(
            f"nsa backend=flex is off by {error:.3g} on {device}, expected below {CANARY}: "
            f"FlexAttention of torch {torch.__version__} heeds no lists of blocks; use "
            "backend=reference, or another version of torch"
        )
    _checked.add(device)


def attend_compiling(inputs: Inputs, config: NSAConfig, selection: Tensor | None) -> Tensor:
    """`attend` as a graph has it: one for every batch and length, whatever the compiler asks."""
    for size in inputs.query.shape:
        operator.index(size)
    if selection is None:
        selection = select(inputs, config)
    S = inputs.length
    case = BranchInputs.of(inputs, config)
    chosen = selected(case, selection)[:, :S]
    if config.mode == "merged":
        return chosen
    return reference.combine(inputs.gates, compressed(case)[:, :S], chosen, window(case)[:, :S])


def other_compiling(inputs: Inputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """`attend_other` as a graph has it."""
    case = BranchInputs.of(inputs, config)
    return compressed(case)[:, : inputs.length], window(case)[:, : inputs.length]


_compiled = torch.compile(attend_compiling, fullgraph=True, dynamic=False)
_compiled_other = torch.compile(other_compiling, fullgraph=True, dynamic=False)


def bucket(length: int) -> int:
    """The length that rows of `length` are filled up to, so that few are compiled: <= 1/4 more."""
    step = max(EDGE, 2 ** max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def lengthened(inputs: Inputs, config: NSAConfig, length: int) -> Inputs:
    """Zeros behind every row, which no query of the row sees."""
    more = length - inputs.length
    if more == 0:
        return inputs
    more_pooled = config.num_compressed(length) - inputs.pooled_key.shape[2]
    sizes = {"query": more, "key": more, "value": more}
    sizes |= {"pooled_key": more_pooled, "pooled_value": more_pooled}
    found = {name: getattr(inputs, name) for name in sizes}
    filled = {n: pad(t, (0, 0, 0, sizes[n])) for n, t in found.items() if t is not None}
    gates = None if inputs.gates is None else pad(inputs.gates, (0, 0, 0, 0, 0, more))
    first = None if inputs.first is None else pad(inputs.first, (0, more))
    return inputs._replace(gates=gates, first=first, **filled)


def of_one_dtype(inputs: Inputs) -> Inputs:
    """What autocast would do, which does not know FlexAttention."""
    query = inputs.query
    if not torch.is_autocast_enabled(query.device.type) or query.dtype == torch.float64:
        return inputs
    dtype = torch.get_autocast_dtype(query.device.type)
    names = ("query", "key", "value", "pooled_key", "pooled_value")
    found = {name: getattr(inputs, name) for name in names}
    return inputs._replace(**{n: t.to(dtype) for n, t in found.items() if t is not None})
