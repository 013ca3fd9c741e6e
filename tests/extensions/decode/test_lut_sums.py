"""`lut_sums`: its kernel, interpreted, against float64; what the assembly's selectors select."""

import pytest
import torch
from covering import covering
from lut_matvec_case import interpret, rows_of
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels import lut_gemm, lut_matvec
from qat.extensions.decode.kernels.lut_gemm import GemmTile, Part
from qat.extensions.decode.kernels.lut_matvec import Norm, matvec, matvec_add
from qat.extensions.decode.kernels.lut_rows import SPLIT, LutRows, gathered, split, stack
from qat.extensions.decode.kernels.lut_sums import NO_SUMS, SumsTile
from qat.kernels.tuned import forcing
from qat.quant.spec import LutSpec

SPECS = {
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "lut2_g32": LutSpec(bits=2, group_size=32),
    "lut2_g64_s8": LutSpec(bits=2, group_size=64, scale_bits=8),
    "ternary": LutSpec(bits=2, codebook="ternary", group_size=16, scale_bits=32),
}
CODEWORDS = {
    "fours_s8": LutSpec(bits=8, vector_size=4, group_size=16, scale_bits=8),
    "fours_g64_s8": LutSpec(bits=8, vector_size=4, group_size=64, scale_bits=8),
}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, lut_gemm, lut_matvec)


@pytest.mark.parametrize(
    ("name", "dtype", "size"), covering(SPECS, [torch.bfloat16, torch.float16], [(64, 1), (320, 3)])
)
def test_only_sums_and_the_result_are_rounded(
    name: str, dtype: torch.dtype, size: tuple[int, int]
) -> None:
    I, steps = size
    pairs = [rows_of(SPECS[name], O, I) for O in (70, 5, 16)]
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


TILES = [SumsTile(256, 1, 4), SumsTile(512, 3, 8, ahead=1)]
BOTH = [("lut2_s8", TILES[0]), ("lut2_s8", TILES[1]), ("fours_s8", SumsTile(256, 1, 8))]


def kernel_of(kind: str) -> str:
    """Tiles of levels and those of codewords are chosen apart."""
    return "vectors_sums" if kind in CODEWORDS else "lut_sums"


def stacked(sizes: tuple[int, ...], I: int, kind: str) -> tuple[LutRows, Tensor]:
    """Matrices with codebooks of their own, and the weight of all."""
    pairs = [rows_of((SPECS | CODEWORDS)[kind], size, I, is_short=True) for size in sizes]
    return stack([rows for rows, _ in pairs]), torch.cat([W for _, W in pairs])


def check(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """Check a product whose levels and codewords are float32, so that none is rounded."""
    assert_no_worse_than_eager(found, eager, exact, slack=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("kind", "tile", "sizes"),
    [
        ("lut2_s8", TILES[1], (144, 16, 37)),
        ("fours_s8", BOTH[2][1], (144, 16, 37)),
        *((kind, TILES[0], (16, 37)) for kind in ("lut2_g32", "lut2_g64_s8", "ternary")),
        ("fours_g64_s8", TILES[1], (16, 37)),
    ],
    ids=str,
)
def test_decoding_behind_a_norm(kind: str, tile: SumsTile, sizes: tuple[int, ...]) -> None:
    I, O = 576, sum(sizes)
    rows, W = stacked(sizes, I, kind)
    residual, gamma, bias = torch.randn(1, I), torch.rand(I) + 0.5, torch.randn(O)
    before = lut_matvec.stream(residual, gamma, SPLIT)
    # more parts of the sum than lanes
    squares = torch.cat([before.squares / 40] * 40, 1)
    with forcing(kernel_of(kind), (O, I, 2), tile):
        found = matvec(before.scaled, rows, norm=Norm(squares, 1e-5), bias=bias)
    normed = F.rms_norm(residual.double(), (I,), gamma.double(), 1e-5)
    exact = F.linear(normed, W, bias.double())
    check(found, F.linear(normed.float(), W.float(), bias), exact)


@pytest.mark.parametrize(("both", "sizes"), covering(BOTH[1:], [(144, 144), (96,)]), ids=str)
def test_decoding_gates_and_ups(both: tuple[str, SumsTile], sizes: tuple[int, ...]) -> None:
    kind, tile = both
    I, O = 320, sum(sizes)
    rows, W = stacked(sizes, I, kind)
    residual, bias = torch.randn(1, I), torch.randn(O)
    norm = Norm(residual.square().sum(1, keepdim=True), 1e-5)

    def expected(dtype: torch.dtype) -> Tensor:
        x = F.rms_norm(residual.to(dtype), (I,), eps=1e-5)
        gate, up = F.linear(x, W.to(dtype), bias.to(dtype)).chunk(2, 1)
        return F.silu(gate) * up

    with forcing(kernel_of(kind), (O, I, 2), tile):
        for _ in range(2):  # programs count how many of them are done, and begin anew
            found = matvec(split(residual), rows, norm=norm, bias=bias, is_gated=True, order=SPLIT)
            check(gathered(found, SPLIT), expected(torch.float32), expected(torch.float64))


@pytest.mark.parametrize(("both", "order"), covering(BOTH, [1, 16, SPLIT]), ids=str)
def test_decoding_onto_the_stream(both: tuple[str, SumsTile], order: int) -> None:
    kind, tile = both
    I, O = 320, 240
    rows, W = stacked((144, 96), I, kind)
    x, residual = torch.randn(1, I), torch.randn(1, O)
    gamma, bias = torch.rand(O) + 0.5, torch.randn(O)
    with forcing(kernel_of(kind), (O, I, 2), tile):
        found = matvec_add(split(x), rows, residual, gamma, bias=bias, order=order)
    exact = residual.double() + F.linear(x.double(), W, bias.double())
    check(found.residual, residual + F.linear(x, W.float(), bias), exact)
    assert torch.allclose(gathered(found.scaled, order), found.residual * gamma, atol=1e-5)
    assert torch.allclose(found.squares.sum(1), found.residual.square().sum(1))
    assert found.squares.shape == (1, tile.warps * tile.blocks([144, 96]))


@pytest.mark.parametrize("kind", ["lut2_s8", "fours_s8"])
def test_what_is_decoded_by_sums(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added = []
    monkeypatch.setattr(lut_matvec, "add_up", lambda *given: added.append(given))
    monkeypatch.setattr(lut_matvec, "has_warpgroups", lambda device: True)
    rows, _ = stacked((32, 16, 16), 64, kind)
    matvec(split(torch.randn(1, 64)), rows)
    assert len(added) == 1 and added[0][4] == SumsTile(512, 1, 8)
    matvec(split(torch.randn(2, 64)), rows)  # of several vectors
    matvec(split(torch.randn(1, 64)), rows, is_gated=True)  # gates of two codebooks
    with forcing(kernel_of(kind), (64, 64, 2), NO_SUMS):
        matvec(split(torch.randn(1, 64)), rows)
    assert len(added) == 1
