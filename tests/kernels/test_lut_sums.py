"""`lut_sums`: its kernel, interpreted, against float64; what the assembly's selectors select."""

import pytest
import torch
from lut_matvec_case import rows_of
from torch.nn import functional as F

from qat.kernels import lut_gemm
from qat.kernels.dispatch import tl, triton
from qat.kernels.lut_gemm import GemmTile, Part
from qat.kernels.lut_sums import _order
from qat.kernels.tuned import forcing
from qat.quant.spec import LutSpec

SPECS = {
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "lut2_g32": LutSpec(bits=2, group_size=32),
    "lut2_g64_s8": LutSpec(bits=2, group_size=64, scale_bits=8),
    "ternary": LutSpec(bits=2, codebook="ternary", group_size=16, scale_bits=32),
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernel itself")
    monkeypatch.setattr(lut_gemm, "use_triton", lambda tensor: True)


@pytest.mark.parametrize(("I", "steps"), [(64, 1), (576, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_only_sums_and_the_result_are_rounded(
    spec: LutSpec, dtype: torch.dtype, I: int, steps: int
) -> None:
    pairs = [rows_of(spec, O, I) for O in (70, 5, 16)]
    parts = [part for rows, _ in pairs for part in Part.of(rows)]
    x, bias = torch.randn(1, I).to(dtype), torch.randn(91)
    with forcing("lut_gemm", (91, I, 2, 1), GemmTile(1, 1, steps)):
        found = lut_gemm.lut_gemm(x, parts, bias)
    exact = F.linear(x.double(), torch.cat([W for _, W in pairs]), bias.double())
    assert found.dtype == dtype
    assert torch.allclose(found.double(), exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "steps"),
    [((8192, 8192), 4), ((19456, 2560), 3), ((2560, 4096), 1), ((152064, 4096), 4)],
)
def test_hopper_looks_sums_up_of_two_bits_by_default(shape: tuple[int, int], steps: int) -> None:
    tile = lut_gemm.tile_for(*shape, 2, 1, has_groups=True)
    assert (tile.columns, tile.splits) == (1, steps)
    assert lut_gemm.tile_for(*shape, 4, 1, has_groups=True).columns == 8
    assert lut_gemm.tile_for(*shape, 2, 1).columns == 8


@triton.jit
def _orders(out):
    lane = tl.arange(0, 32)
    places, selectors = _order(lane % 4, lane // 4)
    for k in tl.static_range(2):
        tl.store(out + k * 32 + lane, places[k])
    for k in tl.static_range(4):
        tl.store(out + (2 + k) * 32 + lane, selectors[k])


def test_a_selector_takes_a_byte_and_its_column_and_no_two_lanes_need_a_bank() -> None:
    found = torch.zeros(6, 32, dtype=torch.int32)
    _orders[(1,)](found)
    *places, first, second, third, fourth = found.tolist()
    word = 0xDDCCBBAA
    for k, selectors in ((k, s) for k in (0, 1) for s in (first, second, third, fourth)):
        columns = set()
        for lane in range(32):
            q, r = lane % 4, lane // 4
            octets = (word | places[k][lane] << 32).to_bytes(8, "little")
            nibbles = [selectors[lane] >> 4 * n & 15 for n in range(4)]
            signs = [octets[n - 8] >> 7 for n in nibbles if n >= 8]
            assert signs == [0, 0]  # `prmt` spreads a byte's sign there
            column, entry = octets[nibbles[0]] // 4, octets[nibbles[1]]
            byte, j = column % 4, column // 4 % 2
            assert (entry, column // 8, j) == (0xAA + 0x11 * byte, q, k ^ r // 4)
            columns.add(column)
        assert columns == set(range(32))
