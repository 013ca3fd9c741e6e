"""The bench's three-way comparison of a kernel, as an assertion."""

from torch import Tensor

from qat.extensions.lab.kernels.gates import difference


def assert_no_worse_than_eager(
    kernel: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0
) -> None:
    """The kernel may err by what eager PyTorch errs at most in the same dtype, plus `slack`."""
    found = difference(kernel, eager, exact, slack)
    assert found is None, found
