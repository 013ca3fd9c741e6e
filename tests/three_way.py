"""Three-way comparison of a kernel: against float64, and against eager PyTorch in its dtype."""

from torch import Tensor


def assert_no_worse_than_eager(
    kernel: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0
) -> None:
    """The kernel may err by what eager PyTorch errs at most in the same dtype, plus `slack`."""
    assert kernel.shape == exact.shape, f"shape {tuple(kernel.shape)}, not {tuple(exact.shape)}"
    assert bool(kernel.isfinite().all()), "the kernel gave NaN or infinity"
    worst = (kernel.double() - exact).abs().max().item()
    allowed = (eager.double() - exact).abs().max().item() + slack
    assert worst <= allowed, f"errs by {worst:.3g}, eager PyTorch by {allowed - slack:.3g}"
