"""The reference of NSA: against loops, against dense attention, its gradients, its causality."""

from itertools import product

import pytest
import torch
from covering import covering
from nsa_case import by_loops, documents, nsa_inputs, small

from qat.extensions.nsa.kernels import reference
from qat.extensions.nsa.kernels.select import Inputs, pool, select

MODES = ("residual", "merged")


def attended(inputs: Inputs, config) -> torch.Tensor:
    return reference.attend(inputs, select(inputs, config), config)


@pytest.mark.parametrize(
    ("packed", "tile", "mode"),
    [(*each, mode) for each, mode in covering(product([False, True], [1, 16, 32]), MODES)],
)
def test_every_query_alone_gives_the_same(packed: bool, tile: int, mode: str) -> None:
    config = small(mode=mode, select_tile=tile)
    for length in (1, 7, 8, 17, 70):
        first = documents(length) if packed else None
        heads = (2, 1) if tile == 1 else (4, 2)  # every query has a choice of its own
        inputs = nsa_inputs(config, length, heads=heads, first=first, width=4)
        torch.testing.assert_close(attended(inputs, config), by_loops(inputs, config))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_by_differences(mode: str) -> None:
    config = small(mode=mode)
    inputs = nsa_inputs(config, 70, heads=(2, 1), width=2)
    selection = select(inputs, config)
    leaves = [part.detach().requires_grad_() for part in inputs[:3]]
    gates = None if inputs.gates is None else inputs.gates.detach().requires_grad_()

    def run(query, key, value, gates=None):
        pooled = pool(key, config), pool(value, config)
        made = Inputs(query, key, value, *pooled, gates, None, inputs.scale)
        return reference.attend(made, selection, config)[:, 60:]

    leaves += [] if gates is None else [gates]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_working_dtypes_are_near_float64(dtype: torch.dtype) -> None:
    config = small()
    exact = nsa_inputs(config, 100)
    rounded = Inputs(
        *(p.to(dtype) if torch.is_tensor(p) else p for p in exact[:6]), None, exact.scale
    )
    again = Inputs(*(part.double() for part in rounded[:6]), None, exact.scale)
    selection = select(again, config)
    wanted = reference.attend(again, selection, config)
    error = (reference.attend(rounded, selection, config).double() - wanted).abs().max()
    assert error <= (2e-6 if dtype == torch.float32 else 4e-2) * wanted.abs().max()
