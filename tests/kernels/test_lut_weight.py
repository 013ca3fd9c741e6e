"""Form and pull back, three ways: plain PyTorch, eager autograd, and autograd in float64."""

import pytest
import torch
from covering import covering
from lut_weight_case import ALL_SPECS, SOURCES, chosen, gradients, random_parts
from quantized import SPECS
from three_way import assert_no_worse_than_eager

from qat.kernels.lut_weight import form, pull_back
from qat.quant.weight import Scales, expand_scales, round_scales

SHAPES = [(1, 1), (7, 3), (33, 5)]
"""`(O, groups per row)`."""


@pytest.mark.parametrize(
    ("name", "source", "shape"),
    [
        *((name, "packed", shape) for name, shape in covering(ALL_SPECS, SHAPES)),
        *(
            (name, source, shape)
            for name, shape, source in covering(ALL_SPECS, SHAPES, SOURCES[1:])
        ),
    ],
)
def test_no_worse_than_eager(name: str, source: str, shape: tuple[int, int]) -> None:
    spec = ALL_SPECS[name]
    O, I = shape[0], shape[1] * spec.group_size
    parts = random_parts(O, I, spec, source)
    indices = chosen(*parts)
    dW = torch.randn(O, I)
    eager_W, eager = gradients(indices, *parts[1:], dW)
    _, exact = gradients(indices, *parts[1:], dW.double())
    assert torch.equal(form(*parts, torch.float32), eager_W)
    pulled = pull_back(dW, *parts, wanted=exact.keys())
    assert pulled.keys() == exact.keys()
    for name, gradient in pulled.items():
        assert gradient.dtype == torch.float32
        slack = 1e-6 * max(1.0, exact[name].abs().max().item())
        assert_no_worse_than_eager(gradient, eager[name], exact[name], slack)


@pytest.mark.parametrize(("source", "name"), covering(SOURCES, ["lut2", "lut2_r4"]))
def test_only_wanted_gradients_are_given(name: str, source: str) -> None:
    parts = random_parts(4, 32, SPECS[name], source)
    dW = torch.randn(4, 32)
    everything = pull_back(dW, *parts, wanted={"codebook", *Scales._fields})
    assert everything.keys() == {"codebook", *parts[2].present()}
    for part in everything:
        alone = pull_back(dW, *parts, wanted={part})
        assert alone.keys() == {part}
        assert torch.equal(alone[part], everything[part])
    assert pull_back(dW, *parts, wanted=()) == {}
    assert pull_back(dW, *parts, wanted=("weight",)) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_form_rounds_once(dtype: torch.dtype) -> None:
    parts = random_parts(8, 32, SPECS["lut4"], "packed")
    assert torch.equal(form(*parts, dtype), form(*parts, torch.float32).to(dtype))


@pytest.mark.parametrize(("source", "name"), covering(SOURCES, ["lut4", "lut2_s8", "lut2_r4"]))
def test_scales_count_as_stored(name: str, source: str) -> None:
    indices, codebook, scales = random_parts(8, 32, SPECS[name], source)
    raw = form(indices, codebook, scales, torch.float32)
    assert torch.equal(raw, form(indices, codebook, round_scales(scales), torch.float32))


def test_form_writes_where_it_is_told() -> None:
    parts = random_parts(8, 32, SPECS["lut4"], "packed")
    out = torch.full((8, 32), torch.nan, dtype=torch.bfloat16)
    assert form(*parts, torch.bfloat16, out=out) is out
    assert torch.equal(out, form(*parts, torch.bfloat16))


def test_pull_back_takes_a_bf16_gradient() -> None:
    parts = random_parts(8, 32, SPECS["lut4"], "packed")
    dW = torch.randn(8, 32).bfloat16()
    pulled = pull_back(dW, *parts, wanted={"codebook"})["codebook"]
    assert torch.equal(pulled, pull_back(dW.float(), *parts, wanted={"codebook"})["codebook"])


def test_an_unused_level_gets_zero() -> None:
    _, codebook, scales = random_parts(8, 32, SPECS["lut2"], "packed")
    latent = codebook.min() * expand_scales(scales, 32)
    pulled = pull_back(
        torch.randn(8, 32), latent, codebook.sort().values, scales, wanted={"codebook"}
    )
    assert pulled["codebook"][2:].tolist() == [0, 0]
