"""Three-way comparison of a kernel: against float64, and against eager PyTorch in its dtype."""

from torch import Tensor


def difference(kernel: Tensor, eager: Tensor, exact: Tensor, slack: float = 0.0) -> str | None:
    """What is wrong with the kernel's result; None if nothing is.

    It may err by what eager PyTorch errs at most in the same dtype, plus `slack`. Where the exact
    result is infinite, the kernel's must be the same infinity.
    """
    if kernel.shape != exact.shape:
        return f"shape {tuple(kernel.shape)}, not {tuple(exact.shape)}"
    finite = exact.isfinite()
    kernel, eager = kernel.double(), eager.double()
    if not bool(kernel[finite].isfinite().all()):
        return "the kernel gave NaN or infinity"
    if not bool((kernel == exact)[~finite].all()):
        return "the kernel misses an infinity"
    worst, allowed = (_largest((found - exact)[finite]) for found in (kernel, eager))
    if worst <= allowed + slack:
        return None
    return f"errs by {worst:.3g}, eager PyTorch by {allowed:.3g}"


def _largest(errors: Tensor) -> float:
    return errors.abs().max().item() if errors.numel() else 0.0
