"""The nearest of few and of many levels, against a search of the middles."""

import pytest
import torch
from torch import Tensor

from qat.quant.codebook import nearest_level


def searched(values: Tensor, levels: Tensor) -> Tensor:
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


LEVELS = {
    "even": torch.linspace(-1, 1, 256),
    "two": torch.tensor([-1.0, 2.0]),
    "random": torch.randn(200).sort().values,
    "crowded": torch.cat([torch.linspace(0, 1e-5, 250), torch.tensor([1.0, 50.0])]),
    "repeated": torch.tensor([-1.0, *[0.25] * 40, 3.0]),
    "all one": torch.full((32,), 0.5),
}


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_nearest_is_that_of_a_search(levels: Tensor) -> None:
    middles = (levels[1:] + levels[:-1]) / 2
    edges = torch.tensor([0.0, -1e30, 1e30, torch.inf, -torch.inf])
    values = torch.cat([torch.randn(999), levels, middles, middles.nextafter(edges[2]), edges])
    for found in (nearest_level(values, levels), nearest_level(values[None], levels)[0]):
        assert found.dtype == torch.uint8
        assert torch.equal(found, searched(values, levels))


def test_what_is_no_number_gets_a_level() -> None:
    assert nearest_level(torch.full((3,), torch.nan), LEVELS["even"]).tolist() == [0, 0, 0]
