"""The product of a batch with packed weights on a GPU, three ways. Run with `-m gpu`."""

import pytest
import torch
from covering import covering
from gpu_case import HAS_GROUPS, needs_hopper, recorded
from lut_matvec_case import GEMM_SPECS as SPECS
from lut_matvec_case import rows_of
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels.lut_gemm import FORMED, GemmTile, Part, lut_gemm, width_for
from qat.kernels.tuned import forcing
from qat.quant.spec import LutSpec

pytestmark = pytest.mark.gpu

SHAPES = ((37, 320), (333, 2624), (1056, 1088))
TILES = (GemmTile(8, 2, 3, 6), GemmTile(24, 4, 2, 4), GemmTile(64, 8, 1, 6), GemmTile(128, 8, 4, 3))
TOGETHER = (
    GemmTile(16, 4, 1, together=4),
    GemmTile(64, 8, 3, together=4),
    GemmTile(32, 4, 3, stages=16, together=4, own=1),
)
WIDE = (
    GemmTile(96, 16, 5, together=4),
    GemmTile(128, 4, 2, together=4),
    GemmTile(128, 16, 1, together=4),
    GemmTile(192, 8, 1, together=4),
    GemmTile(256, 8, 2, together=4),
    GemmTile(256, 8, 5, together=4, own=1),
)
if HAS_GROUPS:
    TILES += TOGETHER

LIBRARY = (FORMED, FORMED._replace(splits=3))


def check(found: Tensor, x: Tensor, W: Tensor, formed: Tensor, bias: Tensor) -> None:
    """Compare with float64 and eager PyTorch, for a bias that the dtype of `x` holds exactly."""
    exact = F.linear(x.double(), W, bias.double())
    eager = F.linear(x, formed, bias.to(x.dtype))
    assert found.dtype == x.dtype
    # sums in another order round elsewhere: an eighth of the last bit of the largest
    slack = torch.finfo(x.dtype).eps / 8 * exact.abs().max().item()
    assert_no_worse_than_eager(found, eager, exact, slack=slack)


def check_sums(found: Tensor, x: Tensor, formed: Tensor, bias: Tensor) -> None:
    """Check that the kernel adds only a float32 sum and one rounding to the formed weight."""
    sums = F.linear(x.double(), formed.double(), bias.double())
    # tensor cores cut off what a sum of float32 has no room for
    rtol, atol = 0.51 * torch.finfo(x.dtype).eps, 5e-5 * sums.abs().max().item()
    assert torch.allclose(found.double(), sums, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"), covering([*SPECS] * 2, SHAPES, [torch.bfloat16, torch.float16])
)
def test_errs_no_more_than_the_formed_weight(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    spec, (O, I) = SPECS[name], shape
    rows, W = rows_of(spec, O, I, device="cuda")
    (part,) = Part.of(rows)
    W, bias, formed = W.cuda(), torch.randn(O, device="cuda"), part.formed(dtype)
    short = bias.to(dtype).float()  # a library's bias is rounded, the kernel's is not
    for M in (1, 7, 33, 200):
        x = torch.randn(M, I, device="cuda").to(dtype)
        check(lut_gemm(x, [part], short), x, W, formed, short)
        key = (O, I, spec.bits, width_for(M))
        for tile in TILES:
            with forcing("lut_gemm", key, tile):
                check(lut_gemm(x, [part], short), x, W, formed, short)
                check_sums(lut_gemm(x, [part], bias), x, formed, bias)
        eager = F.linear(x, formed, bias.to(dtype))
        # parts of a library's sum may be rounded, of another size others
        atol = 2 * torch.finfo(dtype).eps * eager.abs().max().item()
        for tile in LIBRARY:
            with forcing("lut_gemm", key, tile):
                assert torch.allclose(lut_gemm(x, [part], bias), eager, rtol=0.0, atol=atol)


@pytest.mark.skipif(not HAS_GROUPS, reason="only Hopper multiplies four warps' rows as one")
@pytest.mark.parametrize("tile", WIDE, ids=str)
def test_wide_tiles_of_four_warps(tile: GemmTile) -> None:
    O, I = 333, 1216
    rows, _ = rows_of(SPECS["lut2_s8"], O, I, device="cuda")
    (part,) = Part.of(rows)
    bias, formed = torch.randn(O, device="cuda"), part.formed(torch.bfloat16)
    for M in (65, 300, 513):
        x = torch.randn(M, I, device="cuda").bfloat16()
        with forcing("lut_gemm", (O, I, 2, width_for(M)), tile):
            found = lut_gemm(x, [part], bias)
            check_sums(found, x, formed, bias)
            assert torch.equal(found, lut_gemm(x, [part], bias))


@pytest.mark.parametrize("tile", [GemmTile(8, 4, 4, 6), *TILES[-2:]], ids=str)
def test_three_matrices_in_a_recorded_graph(tile: GemmTile) -> None:
    spec, I = SPECS["lut2_s8"], 1024
    pairs = [rows_of(spec, O, I, device="cuda") for O in (256, 40, 64)]
    parts = [part for rows, _ in pairs for part in Part.of(rows)]
    W = torch.cat([W for _, W in pairs]).cuda()
    formed = torch.cat([part.formed(torch.bfloat16) for part in parts])
    bias = torch.randn(360, device="cuda").bfloat16().float()
    x = torch.randn(5, I, device="cuda").bfloat16()
    with forcing("lut_gemm", (360, I, 2, 8), tile):
        graph, found = recorded(lambda: lut_gemm(x, parts, bias))
    for _ in range(3):
        x.copy_(torch.randn(5, I))
        graph.replay()
        check(found, x, W, formed, bias)
        check_sums(found, x, formed, bias)


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [spec for spec in SPECS.values() if spec.bits == 2])
def test_sums_that_are_looked_up_are_rounded_once(
    spec: LutSpec, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    (O, I), eps = shape, torch.finfo(dtype).eps
    pairs = [rows_of(spec, size, I, device="cuda") for size in (O, 64, 40)]
    parts = [part for rows, _ in pairs for part in Part.of(rows)]
    W = torch.cat([W for _, W in pairs]).cuda()
    bias = torch.randn(len(W), device="cuda")
    for steps in (1, 2, 3, 4):
        with forcing("lut_gemm", (len(W), I, 2, 1), GemmTile(1, 8, steps, 0)):
            for _ in range(3):  # programs count how many of them are done, and begin anew
                x = torch.randn(1, I, device="cuda").to(dtype)
                exact = F.linear(x.double(), W, bias.double())
                found = lut_gemm(x, parts, bias).double()
                atol = 2e-6 * exact.abs().max().item()
                assert torch.allclose(found, exact, rtol=0.501 * eps, atol=atol)


@needs_hopper
def test_one_vector_in_a_recorded_graph() -> None:
    rows, W = rows_of(SPECS["lut2_s8"], 2048, 1024, device="cuda")
    x = torch.randn(1, 1024, device="cuda").bfloat16()
    with forcing("lut_gemm", (2048, 1024, 2, 1), GemmTile(1, 8, 2, 0)):
        graph, found = recorded(lambda: lut_gemm(x, Part.of(rows)))
    for _ in range(3):
        x.copy_(torch.randn(1, 1024))
        graph.replay()
        exact = x.double() @ W.cuda().T
        atol = 2e-6 * exact.abs().max().item()
        assert torch.allclose(found.double(), exact, rtol=0.501 * 2**-7, atol=atol)
