"""Packed matrices for the tests of `lut_matvec`, and how its kernels run in them."""

from types import ModuleType

import pytest
import torch
from quantized import frozen_linear
from torch import Tensor

from qat.extensions.decode.kernels.lut_rows import LutRows
from qat.quant.spec import LutSpec

SPECS = {
    "lut1": LutSpec(bits=1, group_size=32),
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "lut2_g48": LutSpec(bits=2, group_size=48),
    "ternary": LutSpec(bits=2, codebook="ternary", group_size=16, scale_bits=8),
    "e2m1": LutSpec(bits=4, codebook="e2m1", group_size=16, scale_bits=8),
    "lut3_s8": LutSpec(bits=3, group_size=16, scale_bits=8),
    "lut4_s8": LutSpec(bits=4, group_size=16, scale_bits=8),
    "lut4_s32": LutSpec(bits=4, group_size=48, scale_bits=32),
    "lut8": LutSpec(bits=8, group_size=48),
    "fours8_s8": LutSpec(bits=8, vector_size=4, group_size=32, scale_bits=8),
    "pairs6": LutSpec(bits=6, vector_size=2, group_size=48),
    "pairs4_s32": LutSpec(bits=4, vector_size=2, group_size=16, scale_bits=32),
    "pairs8": LutSpec(bits=8, vector_size=2, group_size=16),
    "fours12_s8": LutSpec(bits=12, vector_size=4, group_size=32, scale_bits=8),
    "eights8": LutSpec(bits=8, vector_size=8, group_size=16),
}

GEMM_SPECS = {
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "lut2_g64": LutSpec(bits=2, group_size=64),
    "ternary": LutSpec(bits=2, codebook="ternary", group_size=32, scale_bits=32),
    "lut3_s8": LutSpec(bits=3, group_size=16, scale_bits=8),
    "lut3_g64": LutSpec(bits=3, group_size=64),
    "lut4_s8": LutSpec(bits=4, group_size=16, scale_bits=8),
    "e2m1": LutSpec(bits=4, codebook="e2m1", group_size=32),
}
"""Formats that stay packed when a batch is multiplied by them."""


def rows_of(
    spec: LutSpec, O: int, I: int, *, device: str = "cpu", is_short: bool = False
) -> tuple[LutRows, Tensor]:
    """A random packed matrix, and its weight in float64 on the CPU."""
    linear = frozen_linear(O, I, spec)
    weight = linear.quantized_weight().double()
    linear = linear.to(device)
    source, scales = linear.source(), linear.scales_as_stored()
    return LutRows.of(source, linear.levels(), scales, is_short=is_short), weight


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let `modules` compute by their kernels in Triton's interpreter; skip where a GPU does."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernel itself")
    for module in modules:
        monkeypatch.setattr(module, "use_triton", lambda *_: True)
