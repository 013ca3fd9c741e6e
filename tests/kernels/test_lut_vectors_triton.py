"""The kernels of codebooks of vectors, interpreted, where the nearest codeword is hard to tell."""

import pytest
import torch
from lut_weight_case import random_parts
from torch import Tensor

from qat.kernels import lut_weight
from qat.kernels.lut_vectors import ChooseTile, ReduceTile
from qat.kernels.tuned import forcing
from qat.quant.spec import LutSpec
from qat.quant.weight import PackedIndices, Scales

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs the kernels themselves", allow_module_level=True)


def indices(latent: Tensor, codebook: Tensor, scales: Scales) -> Tensor:
    chosen = lut_weight.choose(latent, codebook, scales)
    assert isinstance(chosen, PackedIndices)
    return chosen.indices()


def check(latent: Tensor, codebook: Tensor, scales: Scales, monkeypatch) -> None:
    """The kernel takes the codewords that plain PyTorch takes."""
    expected = indices(latent, codebook, scales)
    with monkeypatch.context() as patch:
        patch.setattr(lut_weight, "use_triton", lambda *_: True)
        assert torch.equal(indices(latent, codebook, scales), expected)


def words(C: int, d: int, size: float = 1.0) -> Tensor:
    return (torch.randn(C, d) * size).half().float()


@pytest.mark.parametrize("form", ["group", "low_rank"])
def test_equal_codewords_and_ties(form: str, monkeypatch) -> None:
    """The lowest of equally near ones: copies, and vectors in the middle between two."""
    codebook = words(32, 4)
    codebook[5], codebook[20], codebook[9] = codebook[17], codebook[2], codebook[17]
    scales = Scales(torch.tensor([[0.5, 0.0, 0.25, 1.0]]).repeat(4, 1))
    if form == "low_rank":
        # short factors: the products that tie are exact
        A, B = torch.tensor([[0.5], [0.0], [-0.25], [1.0]]), torch.full((1, 32), 0.5)
        scales = Scales(None, A, torch.ones(1), B)
    one, other = torch.randint(32, (2, 4, 8))
    S = 0.5 if form == "group" else 0.25
    latent = ((codebook[one] + codebook[other]) / 2 * S).view(4, 32)
    latent[0, :8] = 0.0
    check(latent, codebook, scales, monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity, as on a GPU
@pytest.mark.parametrize("size", [1e-6, 1e-2, 500.0, 1e4])
@pytest.mark.parametrize("spread", [1e-9, 1e30])
def test_codewords_and_weights_beyond_float16(size: float, spread: float, monkeypatch) -> None:
    """Numbers that float16 parts cannot hold, or hold too coarsely, are left to float64."""
    scales = Scales(torch.tensor([[1.0, 6e-8], [0.02, -0.5]]))
    check(torch.randn(2, 16) * spread, words(16, 4, size), scales, monkeypatch)


@pytest.mark.parametrize("spec", [
    LutSpec(bits=4, vector_size=2, group_size=16),
    LutSpec(bits=8, vector_size=8, group_size=8, scale_bits=8),
    LutSpec(bits=5, vector_size=4, scale="low_rank", rank=2, group_size=8),
])  # fmt: skip
def test_programs_that_share_many_tiles(spec: LutSpec, monkeypatch) -> None:
    parts = random_parts(19, 64, spec, "bfloat16")
    wanted = {"codebook", "scales" if spec.scale == "group" else "scale_in"}
    dW = torch.randn(19, 64).bfloat16()
    expected, pulled = indices(*parts), lut_weight.pull_back(dW, *parts, wanted=wanted)
    monkeypatch.setattr(lut_weight, "use_triton", lambda *_: True)
    key = 19, 64, *parts[1].shape
    assert [ChooseTile.of(O * 896 // 4, 256).tiles for O in (128, 896, 4864)] == [1, 2, 8]
    assert [ChooseTile.of(O * 896 // 4, 1024).tiles for O in (128, 896, 4864)] == [1, 4, 8]
    with forcing("vectors_choose", key, ChooseTile(tiles=2)):
        source = lut_weight.choose(*parts)
    assert torch.equal(source.indices(), expected)
    with forcing("vectors_reduce", key, ReduceTile(programs=3)):
        found, again = (
            lut_weight.pull_back(dW, source, *parts[1:], wanted=wanted) for _ in range(2)
        )
    torch.testing.assert_close(found, pulled, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(found[name], again[name]) for name in wanted)


@pytest.mark.parametrize("tile", [(128, 64, 4), (64, 32, 8), (32, 256, 16), (64, 128, 4)])
def test_any_tile_chooses_the_same(tile: tuple[int, ...], monkeypatch) -> None:
    parts = random_parts(9, 64, LutSpec(bits=7, vector_size=4, group_size=16), "bfloat16")
    expected = indices(*parts)
    monkeypatch.setattr(lut_weight, "use_triton", lambda *_: True)
    with forcing("vectors_choose", (9, 64, 128, 4), ChooseTile(*tile)):
        assert torch.equal(indices(*parts), expected)


@pytest.mark.parametrize("source", ["packed", "float32"])
def test_a_group_larger_than_a_tile(source: str, monkeypatch) -> None:
    spec = LutSpec(bits=3, vector_size=4, group_size=1100)
    parts = random_parts(2, 1100, spec, source)
    dW, wanted = torch.randn(2, 1100), {"codebook", "scales"}
    weight = lut_weight.form(*parts, torch.float32)
    pulled = lut_weight.pull_back(dW, *parts, wanted=wanted)
    monkeypatch.setattr(lut_weight, "use_triton", lambda *_: True)
    assert torch.equal(lut_weight.form(*parts, torch.float32), weight)
    found = lut_weight.pull_back(dW, *parts, wanted=wanted)
    torch.testing.assert_close(found, pulled, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("C", [16, 300])
def test_codewords_are_rounded_as_plain_pytorch_rounds_them(C: int, monkeypatch) -> None:
    codebook = torch.randn(C, 4)
    codebook[0] = torch.tensor([0.5, 1.5, -2.5, -0.5]) / 64  # ties
    codebook[1] = torch.tensor([2.0, -2.0, 1e30, float("-inf")])
    codebook[2, 0] = float("nan")
    expected = lut_weight.levels_as_stored(codebook, 8)
    monkeypatch.setattr(lut_weight, "use_triton", lambda *_: True)
    room = torch.empty_like(codebook)
    assert lut_weight.levels_as_stored(codebook, 8, out=room) is room
    torch.testing.assert_close(room, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(lut_weight.levels_as_stored(codebook[3:], 16), codebook[3:].half().float())


@pytest.mark.parametrize("bits", [8, 10])
def test_indices_are_written_where_there_is_room(bits: int) -> None:
    spec = LutSpec(bits=bits, vector_size=4, group_size=16)
    latent, codebook, scales = random_parts(5, 64, spec, "float32")
    room = lut_weight.choose(latent, codebook, scales)
    again = lut_weight.choose(-latent, codebook, scales, out=room)
    assert again.octets.data_ptr() == room.octets.data_ptr()
    assert torch.equal(again.indices(), indices(-latent, codebook, scales))
    assert lut_weight.choose(latent[:3], codebook, scales._replace(scales=scales.scales[:3]),
                             out=room).shape == (3, 64)  # fmt: skip
    assert lut_weight.choose(room, codebook, scales) is room
