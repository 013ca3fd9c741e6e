"""`lut_gemm`: its kernel, interpreted, and the formed weight, against float64; its assembly."""

import pytest
import torch
from covering import covering
from lut_matvec_case import GEMM_SPECS as SPECS
from lut_matvec_case import interpret, rows_of
from quantized import frozen_linear
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels import lut_gemm, lut_wgmma
from qat.extensions.decode.kernels.lut_gemm import GemmTile, Part, width_for
from qat.extensions.decode.kernels.lut_rows import LutRows
from qat.kernels.dispatch import computing_by, ways_taken
from qat.kernels.tuned import forcing
from qat.models.decoding import read_packed

I = 192


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, lut_gemm)


def multiplied(x: Tensor, rows: LutRows, tile: GemmTile, bias: Tensor | None = None) -> Tensor:
    """Multiply by the kernel, with that tile."""
    key = (rows.shape[0], rows.shape[1], rows.bits, width_for(len(x)))
    with forcing("lut_gemm", key, tile):
        return lut_gemm.lut_gemm(x, Part.of(rows), bias)


@pytest.mark.parametrize(("name", "dtype"), covering(SPECS, [torch.bfloat16, torch.float16]))
def test_errs_no_more_than_the_formed_weight(name: str, dtype: torch.dtype) -> None:
    rows, W = rows_of(SPECS[name], 37, I)
    (part,) = Part.of(rows)
    x, bias = torch.randn(7, I).to(dtype), torch.randn(37)
    exact = F.linear(x.double(), W, bias.double())
    eager = F.linear(x, W.to(dtype), bias.to(dtype))
    found = multiplied(x, rows, GemmTile(8, 2, 2, 4), bias)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    # which results are rounded up is luck: an eighth of the last bit of the largest
    assert_no_worse_than_eager(found, eager, exact, slack=eps / 8 * exact.abs().max().item())
    # weights are those of `form` to the bit: only a float32 sum and one rounding stand between
    sums = F.linear(x.double(), part.formed(dtype).double(), bias.double())
    assert torch.allclose(found.double(), sums, rtol=0.51 * eps, atol=1e-5)


def test_three_matrices_and_several_tiles_of_vectors() -> None:
    pairs = [rows_of(SPECS["lut2_s8"], O, 128) for O in (33, 5, 16)]
    parts = [part for rows, _ in pairs for part in Part.of(rows)]
    x, bias = torch.randn(3, 3, 128).bfloat16(), torch.randn(54)
    with forcing("lut_gemm", (54, 128, 2, 16), GemmTile(8, 1, 1, 2)):
        found = lut_gemm.lut_gemm(x, parts, bias)
    formed = torch.cat([part.formed(torch.bfloat16) for part in parts]).double()
    sums = F.linear(x.double(), formed, bias.double())
    assert torch.allclose(found.double(), sums, rtol=0.51 * 2**-7, atol=1e-5)
    assert lut_gemm.is_one_product(parts, x.dtype)
    other = Part.of(rows_of(SPECS["lut2_g64"], 16, 128)[0])
    assert not lut_gemm.is_one_product([*parts, *other], x.dtype)
    assert not lut_gemm.is_one_product(parts, torch.float32)


@pytest.mark.parametrize("slabs", [1, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_formed_weight_and_its_slabs(slabs: int, has_bias: bool) -> None:
    pairs = [rows_of(SPECS["lut3_s8"], O, 64) for O in (33, 5)]
    parts = [part for rows, _ in pairs for part in Part.of(rows)]
    x, bias = torch.randn(9, 64).bfloat16(), torch.randn(38) if has_bias else None
    with forcing("lut_gemm", (38, 64, 3, 16), lut_gemm.FORMED._replace(splits=slabs)):
        found = lut_gemm.lut_gemm(x, parts, bias)
    formed = torch.cat([part.formed(torch.bfloat16) for part in parts])
    expected = F.linear(x, formed, None if bias is None else bias.bfloat16())
    assert torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-3)


def test_a_linear_multiplies_packed_where_no_gradient_is_wanted() -> None:
    linear = frozen_linear(40, 128, SPECS["lut2_s8"])
    read_packed(linear)
    x = torch.randn(3, 128).bfloat16()
    key = (40, 128, 2, 8)
    with computing_by(kernel=True), forcing("lut_gemm", key, GemmTile(8, 1, 2, 4)):
        formed = linear(x)
        before = ways_taken()
        with torch.no_grad():
            found = linear(x)
            linear.scales.mul_(2.0)
            twice = linear(x)
    assert (ways_taken() - before)["packed_reader", "triton", "cpu"] == 2
    assert torch.allclose(found, formed, atol=0.02, rtol=0.02)
    assert torch.equal(twice, 2 * found)


@pytest.mark.parametrize(("M", "width"), [(1, 1), (2, 8), (17, 32), (129, 192), (257, 512)])
def test_the_default_tile(M: int, width: int) -> None:
    assert width_for(M) == width
    tile = lut_gemm.tile_for(8192, 8192, 2, width)
    assert tile.columns == (0 if M > 128 else max(width, 8))
    assert 2 * lut_gemm.INPUTS * tile.columns * tile.stages <= lut_gemm.SHARED_BYTES


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1024, 512), 0), ((1024, 2048), 64), ((2560, 4096), 96), ((6144, 2560), 128)],
)
def test_the_weight_is_formed_where_that_was_faster(shape: tuple[int, int], most: int) -> None:
    tiles = [lut_gemm.tile_for(*shape, 2, width) for width in lut_gemm.WIDTHS]
    assert max(tile.columns for tile in tiles) == most
    # once it is formed, it is so for more vectors too
    formed = [tile == lut_gemm.FORMED for tile in tiles]
    assert formed == sorted(formed)


@pytest.mark.parametrize(
    ("width", "bits"), covering([*lut_gemm.WIDTHS[1:], 1024, 1 << 20], [2, 3, 4])
)
def test_hopper_multiplies_four_warps_as_one_by_default(width: int, bits: int) -> None:
    tile = lut_gemm.tile_for(19456, 2560, bits, width, has_groups=True)
    if not lut_gemm.LEAST_TOGETHER <= width <= lut_gemm.MOST_TOGETHER:
        assert tile == lut_gemm.tile_for(19456, 2560, bits, width)
        return
    assert (tile.columns, tile.together, tile.own) == (min(width, 256), 4, 0)
    small = lut_gemm.tile_for(4096, 1024, bits, width, has_groups=True)
    assert (small.columns, small.together) == (min(width, lut_gemm.SMALL_COLUMNS), 4)
    # a slice's slot is known to a compiler, and what `asked_for` takes is no less than slices
    assert tile.stages % lut_gemm.units_ahead(bits) == 0
    num_bytes = 2 * lut_gemm.INPUTS * tile.columns * tile.stages
    words = lut_wgmma.room_for(num_bytes)[1]
    assert num_bytes <= (4 * words or lut_wgmma.MOST_DECLARED)


def test_too_few_stages_for_own_slices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lut_gemm, "IS_COMPILED", True)
    rows, _ = rows_of(SPECS["lut2_s8"], 37, 576)
    with pytest.raises(ValueError, match="too few stages for 576 inputs"):
        multiplied(torch.randn(7, 576).bfloat16(), rows, GemmTile(8, 4, 2, 4, together=4, own=1))
