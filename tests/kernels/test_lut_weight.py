"""Form and pull back by plain PyTorch and by the kernels, against eager autograd and float64."""

from collections.abc import Iterator

import pytest
import torch
from covering import covering
from lut_weight_case import ALL_SPECS, SOURCES, chosen, gradients, random_parts
from quantized import KINDS, SPECS
from three_way import assert_no_worse_than_eager
from torch import Tensor

from qat.kernels import lut_weight
from qat.kernels.dispatch import computing_by
from qat.kernels.lut_weight import form, pull_back
from qat.quant.spec import LutSpec
from qat.quant.weight import Scales, expand_scales, round_scales

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LATENT = [*KINDS, "lut4", "lut4_odd", "lut3_odd_r5", "fours8_s8", "fours12"]
BY_SOURCE = [*((name, "packed") for name in ALL_SPECS), *covering(LATENT, SOURCES[1:])]
"""Every format packed, and one of each kind of latent weights of either dtype."""


@pytest.fixture(autouse=True)
def _way(is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if is_kernel:
        from triton_interpreter import round_fma_once, round_to_nearest_bf16

        round_to_nearest_bf16(monkeypatch)
        round_fma_once(monkeypatch)
    with computing_by(kernel=is_kernel):
        yield


def size(spec: LutSpec, source: str) -> tuple[int, int]:
    """A shape of several tiles in one direction at least, none of them full.

    Choosing codewords is slow work for an interpreter, and its tiles are small.
    """
    O = 37 if source == "packed" or spec.vector_size == 1 else 9 if spec.bits < 10 else 2
    return O, spec.group_size * max(1, 72 // spec.group_size)


@pytest.mark.parametrize(
    ("name", "source", "dtype"),
    [  # 4096 codewords take an interpreter two seconds
        pytest.param(*each, dtype, marks=pytest.mark.slow if each[0] == "fours12" else ())
        for each, dtype in covering(BY_SOURCE, DTYPES)
    ],
)
def test_no_worse_than_eager(
    name: str, source: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ALL_SPECS[name]
    parts = random_parts(*size(spec, source), spec, source)
    indices, dW = chosen(*parts), torch.randn(size(spec, source))
    eager_W, eager = gradients(indices, *parts[1:], dW)
    _, exact = gradients(indices, *parts[1:], dW.double())
    poison_new_tensors(monkeypatch)
    out = torch.full(eager_W.shape, torch.nan, dtype=dtype)
    assert form(*parts, dtype, out=out) is out
    assert torch.equal(out, eager_W.to(dtype))  # rounded once
    pulled = pull_back(dW, *parts, wanted=exact.keys())
    assert pulled.keys() == exact.keys()
    for name, gradient in pulled.items():
        assert gradient.dtype == torch.float32
        slack = 2e-6 * max(1.0, exact[name].abs().max().item())
        assert_no_worse_than_eager(gradient, eager[name], exact[name], slack)


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make what a kernel leaves unwritten be seen."""

    def empty(*shape: object, **options: object) -> Tensor:
        poison = torch.nan if options["dtype"].is_floating_point else 1
        return torch.full(shape[0] if len(shape) == 1 else shape, poison, **options)

    monkeypatch.setattr(lut_weight.torch, "empty", empty)


@pytest.mark.parametrize("shape", [(1, 1), (33, 5)])
@pytest.mark.parametrize("name", ["lut2", "lut2_r4", "pairs6"])
def test_a_single_group_and_many(name: str, shape: tuple[int, int]) -> None:
    spec = SPECS[name]
    parts = random_parts(shape[0], shape[1] * spec.group_size, spec, "float32")
    dW = torch.randn(parts[0].shape)
    eager_W, expected = gradients(chosen(*parts), *parts[1:], dW)
    assert torch.equal(form(*parts, torch.float32), eager_W)
    pulled = pull_back(dW, *parts, wanted=expected.keys())
    torch.testing.assert_close(pulled, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "source"), covering(["lut3", "lut2_r4", "fours8_s8", "lut2"], SOURCES)
)
def test_only_wanted_gradients_are_given(name: str, source: str) -> None:
    parts = random_parts(5, 64, SPECS[name], source)
    dW = torch.randn(5, 64)
    everything = pull_back(dW, *parts, wanted={"codebook", *Scales._fields})
    assert everything.keys() == {"codebook", *parts[2].present()}
    for part in everything:
        alone = pull_back(dW, *parts, wanted={part})
        assert alone.keys() == {part}
        torch.testing.assert_close(alone[part], everything[part], rtol=1e-5, atol=1e-5)
    assert pull_back(dW, *parts, wanted=()) == {}
    assert pull_back(dW, *parts, wanted=("weight",)) == {}


@pytest.mark.parametrize(("source", "name"), covering(SOURCES, ["lut4", "lut2_s8", "lut2_r4"]))
def test_scales_count_as_stored(name: str, source: str) -> None:
    indices, codebook, scales = random_parts(8, 32, SPECS[name], source)
    raw = form(indices, codebook, scales, torch.float32)
    assert torch.equal(raw, form(indices, codebook, round_scales(scales), torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_of_any_dtype_and_layout(dtype: torch.dtype) -> None:
    parts = random_parts(24, 64, SPECS["lut4"], "packed")
    dW, wanted = torch.randn(64, 24).to(dtype).T, {"codebook", "scales"}
    expected = pull_back(dW.float().contiguous(), *parts, wanted=wanted)
    torch.testing.assert_close(pull_back(dW, *parts, wanted=wanted), expected, rtol=1e-5, atol=1e-5)


def test_an_unused_level_gets_zero() -> None:
    _, codebook, scales = random_parts(8, 32, SPECS["lut2"], "packed")
    latent = codebook.min() * expand_scales(scales, 32)
    pulled = pull_back(
        torch.randn(8, 32), latent, codebook.sort().values, scales, wanted={"codebook"}
    )
    assert pulled["codebook"][2:].tolist() == [0, 0]
