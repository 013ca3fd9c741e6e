"""`lut_matvec`: its reference against float64, and its kernel, interpreted, against both."""

import pytest
import torch
from covering import covering
from lut_matvec_case import SPECS, interpret, rows_of
from three_way import assert_no_worse_than_eager
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.decode.kernels import lut_matvec
from qat.extensions.decode.kernels.lut_matvec import Norm, matvec, matvec_add
from qat.extensions.decode.kernels.lut_rows import (
    SPLIT,
    SPLIT_FACTOR,
    Rows,
    gathered,
    order_of,
    reads,
    short_codewords,
    short_levels,
    split,
    spread,
    stack,
    stacks,
)
from qat.kernels.tuned import forcing
from qat.quant.spec import LutSpec

O, I = 37, 192


@pytest.fixture(params=["reference", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute by the plain reference, or by the kernel in Triton's interpreter."""
    if request.param == "kernel":
        interpret(monkeypatch, lut_matvec)
    return request.param


def check(found: Tensor, eager: Tensor, exact: Tensor, is_short: bool = False) -> None:
    """Compare with eager PyTorch and float64; short levels and inputs are rounded."""
    assert found.dtype == torch.float32
    if is_short:
        assert torch.allclose(found.double(), exact, atol=5e-4 * exact.abs().max())
    else:
        assert_no_worse_than_eager(found, eager, exact, slack=2e-6 * exact.abs().max().item())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_packed_equals_the_formed_weight(spec: LutSpec, path: str) -> None:
    rows, W = rows_of(spec, O, I)
    assert rows.shape == (O, I)
    assert torch.equal(rows.dense().double(), W)
    x, bias = torch.randn(2, I), torch.randn(O)
    found = matvec(spread(x, 16), rows, bias=bias)
    check(found, F.linear(x, W.float(), bias), F.linear(x.double(), W, bias.double()))


@pytest.mark.parametrize(
    ("tile", "bits"), covering([(8, 4, 1, 1), (4, 8, 1, 1), (16, 4, 2, 1)], [2, 16])
)
def test_no_tile_changes_the_result(bits: int, tile: tuple[int, ...], monkeypatch) -> None:
    interpret(monkeypatch, lut_matvec)
    from qat.extensions.decode.kernels.lut_matvec import Tile

    rows, W = rows_of(SPECS["lut2_s8"], O, I)
    if bits == 16:
        rows, tile = W.float(), (tile[0], tile[1] * 16, *tile[2:])
    x = torch.randn(1, I)
    with forcing("lut_matvec", (O, I, bits), Tile(*tile)):
        found = matvec(spread(x, order_of(rows)), rows)
    check(found, x @ W.float().T, x.double() @ W.T)


@pytest.mark.parametrize(("B", "dtype"), [(1, torch.bfloat16), (8, torch.float32)])
def test_dense_rows(B: int, dtype: torch.dtype, path: str) -> None:
    W, x = torch.randn(O, I).to(dtype), torch.randn(B, I)
    check(matvec(spread(x, 1), W), x @ W.float().T, x.double() @ W.double().T)


def stacked(kind: str, is_short: bool, sizes: tuple[int, ...]) -> tuple[Rows, Tensor]:
    """Matrices with their own levels, or dense ones, and the weight of all."""
    if kind == "dense":
        dense = [torch.randn(size, I) for size in sizes]
        return stack(dense), torch.cat(dense).double()
    pairs = [rows_of(SPECS[kind], size, I, is_short=is_short) for size in sizes]
    rows = stack([rows for rows, _ in pairs])
    assert (order_of(rows) == SPLIT) == is_short  # by tensor cores
    return rows, torch.cat([W for _, W in pairs])


SHORT = [("lut2_s8", True), ("fours8_s8", True)]


@pytest.mark.parametrize(
    ("kind", "is_short"),
    [*((kind, False) for kind in ("lut2_s8", "lut4_s8", "fours8_s8", "dense")), *SHORT],
)
def test_a_norm_before_and_several_matrices_at_once(kind: str, is_short: bool, path: str) -> None:
    rows, W = stacked(kind, is_short, (32, 16, 16))
    residual, gamma = torch.randn(1, I), torch.rand(I) + 0.5
    before = lut_matvec.stream(residual, gamma, order_of(rows))
    found = matvec(before.scaled, rows, norm=Norm(before.squares, 1e-5))
    normed = F.rms_norm(residual.double(), (I,), gamma.double(), 1e-5)
    check(found, normed.float() @ W.float().T, normed @ W.T, is_short)


@pytest.mark.parametrize(
    ("kind", "is_short"), [*((kind, False) for kind in ("lut2_s8", "pairs6", "dense")), *SHORT]
)
def test_gates_and_ups(kind: str, is_short: bool, path: str) -> None:
    rows, W = stacked(kind, is_short, (32, 32))
    x, bias, order = torch.randn(2, I), torch.randn(64), SPLIT if is_short else 16

    def expected(dtype: torch.dtype) -> Tensor:
        gate, up = F.linear(x.to(dtype), W.to(dtype), bias.to(dtype)).chunk(2, 1)
        return F.silu(gate) * up

    found = matvec(spread(x, order_of(rows)), rows, bias=bias, is_gated=True, order=order)
    found, exact = gathered(found, order), expected(torch.float64)
    check(found, expected(torch.float32), exact, is_short and kind == "lut2_s8")


@pytest.mark.parametrize(("kind", "is_short"), [("lut2_s8", False), ("dense", False), *SHORT])
def test_the_residual_stream(kind: str, is_short: bool, path: str) -> None:
    rows, W = stacked(kind, is_short, (32, 16, 16))
    x, residual, gamma = torch.randn(2, I), torch.randn(2, 64), torch.rand(64)
    order = SPLIT if is_short else 16
    found = matvec_add(spread(x, order_of(rows)), rows, residual, gamma, order=order)
    exact = residual.double() + x.double() @ W.T
    check(found.residual, residual + x @ W.float().T, exact, is_short)
    assert torch.allclose(gathered(found.scaled, order), found.residual * gamma, atol=1e-5)
    assert torch.allclose(found.squares.sum(1), found.residual.square().sum(1))


def test_what_stacks() -> None:
    two, four = rows_of(SPECS["lut2_s8"], O, I)[0], rows_of(SPECS["lut4_s8"], O, I)[0]
    assert stacks([two, two, two])
    assert stacks([torch.zeros(2, 3), torch.zeros(1, 3)])
    assert not stacks([two, four])
    assert not stacks([two, torch.zeros(O, I)])
    assert not stacks([two] * 4)
    vectors = rows_of(SPECS["fours8_s8"], O, I)[0]
    assert stacks([vectors, vectors]) and not stacks([vectors, rows_of(SPECS["pairs8"], O, I)[0]])


def test_what_can_be_read_packed() -> None:
    assert all(reads(spec) for spec in SPECS.values())
    assert not reads(LutSpec(bits=2, group_size=8))
    assert not reads(LutSpec(bits=2, scale="low_rank", rank=4))
    assert not reads(LutSpec(bits=5, group_size=16))
    assert not reads(LutSpec(bits=10, vector_size=4, group_size=16))
    assert not reads(LutSpec(bits=8, vector_size=4, group_size=8))


def levels_of_16_bits(tables: Tensor, factors: Tensor) -> Tensor:
    """The levels of one part that `short_levels` encoded."""
    octets = tables.view(torch.uint8).view(2, -1).T.contiguous()
    return octets.view(torch.float16).flatten().float() * factors / SPLIT_FACTOR


@pytest.mark.parametrize("C", [4, 16])
def test_levels_of_16_bits(C: int) -> None:
    for seed in range(20):
        codebook = torch.randn(C, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (
            seed - 9
        )
        codebook[1] *= seed % 3  # zero is a level of some grids
        found = levels_of_16_bits(*short_levels(codebook))
        assert torch.allclose(found, codebook, rtol=2**-11, atol=2**-25 * codebook.abs().max())


def test_split_inputs_hold_22_bits() -> None:
    x = torch.randn(3, 64) * torch.tensor([1e-2, 1.0, 1e5])[:, None]
    found = split(x)
    assert (found.dtype, found.shape) == (torch.float16, (3, 128))
    assert torch.allclose(gathered(found, SPLIT), x, rtol=2**-20, atol=1e-6)


@pytest.mark.parametrize("units", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 4])
@pytest.mark.parametrize("warps", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["lut2_s8", "lut4_s32", "fours8_s8"])
def test_tensor_cores(kind: str, units: int, warps: int, path: str) -> None:
    pytest.importorskip("triton")
    from qat.extensions.decode.kernels.lut_matvec import MmaTile

    rows, W = rows_of(SPECS[kind], 37, 384, is_short=True)
    assert order_of(rows) == SPLIT
    x, bias = torch.randn(2, 384), torch.randn(37)
    kernel = "lut_mma" if rows.vector_size == 1 else "vectors_mma"
    with forcing(kernel, (37, 384, rows.weight_bits), MmaTile(units, warps)):
        found = matvec(split(x), rows, bias=bias)
    if path == "kernel" and rows.vector_size == 1:
        wanted = F.linear(x.double(), W, bias.double())
        assert torch.allclose(found.double(), wanted, atol=5e-4 * wanted.abs().max())
        rows = rows._replace(codebooks=levels_of_16_bits(rows.tables, rows.factors)[None])
        W = rows.dense().double()
    check(found, F.linear(x, W.float(), bias), F.linear(x.double(), W, bias.double()))


def test_codewords_of_16_bits_are_exact() -> None:
    codebook = torch.randn(256, 4).half().float() * 1e-3
    codebook = codebook.half().float()  # some of them below float16's normal numbers
    tables, factors = short_codewords(codebook)
    assert (tables.shape, tables.dtype) == ((1, 256), torch.int64)
    halves = tables.view(torch.float16).view(256, 4)[:, [0, 2, 1, 3]]
    assert torch.equal(halves.float(), codebook) and factors.item() == SPLIT_FACTOR


def test_rows_that_tensor_cores_cannot_read() -> None:
    two = SPECS["lut2_s8"]
    assert order_of(rows_of(two, O, 80, is_short=True)[0]) == 16
    assert order_of(rows_of(SPECS["lut3_s8"], O, I, is_short=True)[0]) == 16
    assert order_of(rows_of(SPECS["pairs6"], O, I, is_short=True)[0]) == 16
    halves = [rows_of(two, size, I, is_short=True)[0] for size in (8, 8)]
    assert order_of(stack(halves)) == 16  # 16 rows of two codebooks
    assert order_of(stack([rows_of(two, 16, I, is_short=True)[0]] * 2)) == SPLIT
