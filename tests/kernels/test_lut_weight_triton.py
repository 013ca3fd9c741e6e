"""The Triton kernels of `lut_weight`, interpreted, against plain PyTorch where tiles are hard."""

import pytest
import torch
from covering import covering
from lut_weight_case import SOURCES, random_parts

from qat.kernels import lut_weight
from qat.quant.spec import LutSpec
from qat.quant.weight import PackedIndices, Scales

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)

from triton_interpreter import round_fma_once, round_to_nearest_bf16


@pytest.fixture(autouse=True)
def _rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest_bf16(monkeypatch)
    round_fma_once(monkeypatch)


def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by the Triton path from here on."""
    monkeypatch.setattr(lut_weight, "use_triton", lambda *_: True)


@pytest.mark.parametrize(("source", "group_size"), covering(SOURCES, [6144, 4100]))
def test_a_group_larger_than_a_tile(group_size: int, source: str, monkeypatch) -> None:
    parts = random_parts(3, group_size, LutSpec(bits=3, group_size=group_size), source)
    dW = torch.randn(3, group_size)
    weight = lut_weight.form(*parts, torch.float32)
    pulled = lut_weight.pull_back(dW, *parts, wanted={"codebook", "scales"})
    by_kernel(monkeypatch)
    assert torch.equal(lut_weight.form(*parts, torch.float32), weight)
    found = lut_weight.pull_back(dW, *parts, wanted={"codebook", "scales"})
    torch.testing.assert_close(found, pulled, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("source", "scale"), covering(SOURCES, ["group", "low_rank"]))
def test_programs_that_share_many_tiles(source: str, scale: str, monkeypatch) -> None:
    rank = 2 if scale == "low_rank" else 0
    parts = random_parts(300, 64, LutSpec(bits=4, scale=scale, rank=rank), source)
    dW = torch.randn(300, 64)
    wanted = {"codebook", "scales" if scale == "group" else "scale_in"}
    expected = lut_weight.pull_back(dW, *parts, wanted=wanted)
    by_kernel(monkeypatch)
    monkeypatch.setattr(lut_weight, "REDUCE_PROGRAMS", 3)
    found, again = (lut_weight.pull_back(dW, *parts, wanted=wanted) for _ in range(2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(found[name], again[name]) for name in wanted)


def test_a_row_of_low_rank_larger_than_a_tile(monkeypatch) -> None:
    parts = random_parts(9, 1100, LutSpec(bits=3, scale="low_rank", rank=3, group_size=1), "packed")
    weight = lut_weight.form(*parts, torch.float32)
    by_kernel(monkeypatch)
    assert torch.equal(lut_weight.form(*parts, torch.float32), weight)


def test_quotients_are_rounded_as_division_rounds_them(monkeypatch) -> None:
    """The middle of the levels is a quotient: one more unit in its last place would lie above."""
    scales = Scales((torch.rand(64, 1) + 0.01).half().float())
    latent = torch.randn(64, 128)
    for middle in (latent / scales.scales).flatten()[::509].tolist():
        codebook = torch.tensor([0.0, 2 * middle])
        expected = lut_weight.form(latent, codebook, scales, torch.float32)
        with monkeypatch.context() as patch:
            by_kernel(patch)
            assert torch.equal(lut_weight.form(latent, codebook, scales, torch.float32), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("source", ["packed", "float32"])
def test_every_scale_of_8_bits_is_rounded_as_the_reference_does(source: str, monkeypatch) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    others = [-0.0, -1e-9, -2.0, -torch.inf, 1e-30, 65519.0]
    others += [65520.0, torch.inf] if source == "packed" else []  # a latent one has no index there
    scales = Scales(torch.cat([halves[::7], halves[-300:], torch.tensor(others)])[:, None], bits=8)
    O, codebook = len(scales.scales), torch.tensor([-1.0, 1.0])
    packed = PackedIndices(torch.randint(256, (O, 1), dtype=torch.uint8), 1, 8)
    parts = packed if source == "packed" else torch.randn(O, 8), codebook, scales
    weight = lut_weight.form(*parts, torch.float32)
    by_kernel(monkeypatch)
    assert torch.equal(lut_weight.form(*parts, torch.float32), weight)


@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize("spread", [1e-3, 1e30])
def test_far_and_equal_levels(spread: float, scale_bits: int, monkeypatch) -> None:
    """Weights beyond every level, scales below float16's normal range, two equal levels."""
    codebook = torch.tensor([0.5, -1.0, 0.5, 0.0, 2.0, -1.0, 0.25, 1.0])
    scales = Scales(torch.logspace(-8, 0, 16).view(4, 4), bits=scale_bits)
    latent = torch.randn(4, 32) * spread
    latent[0, :4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    weight = lut_weight.form(latent, codebook, scales, torch.float32)
    by_kernel(monkeypatch)
    assert torch.equal(lut_weight.form(latent, codebook, scales, torch.float32), weight)
