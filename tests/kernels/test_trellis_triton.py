"""The kernel that finds paths through a trellis, interpreted, against plain PyTorch: every bit."""

import pytest
import torch

from qat.kernels import trellis as kernel
from qat.quant.trellis import best_path, start_levels

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernel itself", allow_module_level=True)


@pytest.mark.parametrize(
    ("bits", "k", "O", "I"),
    [pytest.param(8, 2, 5, 37, marks=pytest.mark.slow), (8, 2, 2, 9), (8, 2, 1, 1),
     (8, 1, 3, 9), (8, 3, 4, 11), (8, 4, 3, 7), (4, 2, 6, 12),
     (5, 2, 3, 20), (2, 1, 2, 5)],
)  # fmt: skip
def test_every_index(bits: int, k: int, O: int, I: int) -> None:
    S = (torch.rand(O, I) + 0.1) * (torch.rand(O, I) < 0.9)
    weight = torch.randn(O, I)
    rounded = torch.randn(2**bits, 1).mul(4).round().div(4)
    tied = rounded[torch.randint(2**bits, (O, I)), 0] * S
    for codebook, each in (
        (start_levels(bits, k), weight.bfloat16()),
        (rounded, weight),
        (rounded, tied),
        (rounded, torch.zeros(O, I)),
    ):
        expected = best_path(each, S, codebook, k)
        assert torch.equal(kernel.path_by_kernel(each, S, codebook, k), expected)


def test_pieces_and_rows_of_another_layout(monkeypatch) -> None:
    monkeypatch.setattr(kernel, "PIECE", 50)
    weight, S, codebook = torch.randn(17, 7).T, torch.rand(7, 1).expand(7, 17), start_levels(4, 1)
    found = kernel.path_by_kernel(weight, S, codebook, 1)
    assert torch.equal(found, best_path(weight, S, codebook, 1))
