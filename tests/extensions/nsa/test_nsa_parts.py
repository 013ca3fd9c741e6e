"""The parts that sparse attention adds to a layer, as they are initialised."""

import pytest
import torch

from qat.extensions.nsa.attention import NSAParts
from qat.extensions.nsa.kernels.config import NSAConfig

BEGIN = {"residual": [0.0, 1.0, 0.0], "sigmoid": [0.00247, 0.99753, 0.00247]}


@pytest.mark.parametrize(("mode", "gates"), BEGIN.items())
@torch.no_grad()
def test_gates_begin_with_selection(mode: str, gates: list[float]) -> None:
    parts = NSAParts(NSAConfig(mode=mode), hidden_size=16, num_heads=4, num_key_heads=2)
    found = parts.gates_of(torch.randn(2, 3, 16))
    torch.testing.assert_close(found, torch.tensor(gates).expand(2, 3, 4, 3), rtol=0, atol=1e-5)


def test_merged_branches_have_no_gates_and_weighted_pools_begin_as_the_mean() -> None:
    shape = {"hidden_size": 16, "num_heads": 4, "num_key_heads": 2}
    assert NSAParts(NSAConfig(mode="merged"), **shape).gates_of(torch.randn(1, 1, 16)) is None
    parts = NSAParts(NSAConfig(pooling="weighted"), **shape)
    for weights in (parts.pool_key, parts.pool_value):
        assert torch.equal(weights, torch.full((2, 32), 1 / 32))
