"""The kernels of `lut_weight` on CUDA: every bit of the CPU's weight, and no host in between."""

import pytest
import torch
from gpu_case import no_synchronisation
from lut_weight_case import ALL_SPECS, SOURCES, chosen, gradients, random_parts
from quantized import SPECS, frozen_linear, latent_linear, nearest_e5m3
from three_way import assert_no_worse_than_eager
from torch import Tensor

from qat.kernels.lut_weight import choose, form, pull_back
from qat.quant.codebook import nearest_codewords
from qat.quant.spec import LutSpec
from qat.quant.weight import PackedIndices, Scales, expand_scales, round_scales, round_to_byte

pytestmark = pytest.mark.gpu

TRAINING_SHAPES = [(3072, 1024), (1024, 3072), (2048, 1024)]
ODD = ("lut1", "lut3", "lut4_odd", "lut2_g40", "lut3_odd_s8", "ternary_odd", "lut3_odd_r5")
ODD_VECTORS = ("pairs6", "pairs5_odd", "fours8_s8", "eights3", "fours12", "fours10_r2")
TRAINED = {
    "lut2": LutSpec(bits=2),
    "lut4": LutSpec(bits=4),
    "lut2_s8": LutSpec(bits=2, group_size=16, scale_bits=8),
    "lut2_r32": LutSpec(bits=2, scale="low_rank", rank=32),
    "v2": LutSpec(bits=8, vector_size=4, group_size=32, scale_bits=8),
    "v3": LutSpec(bits=6, vector_size=2, group_size=32, scale_bits=8),
    "fours12": LutSpec(bits=12, vector_size=4, group_size=32),
    "eights12": LutSpec(bits=12, vector_size=8, group_size=64),
    "fours8_r4": LutSpec(bits=8, vector_size=4, scale="low_rank", rank=4),
}

Parts = tuple[PackedIndices | Tensor, Tensor, Scales]


def on_cuda(parts: Parts) -> Parts:
    source, codebook, scales = parts
    moved = scales._replace(**{name: t.cuda() for name, t in scales.present().items()})
    is_packed = isinstance(source, PackedIndices)
    source = source._replace(octets=source.octets.cuda()) if is_packed else source.cuda()
    return source, codebook.cuda(), moved


def check(parts: Parts, *dtypes: torch.dtype) -> None:
    """Check that weights are equal to the bit and gradients no worse than eager's.

    Weights are formed in `dtypes`, or in three; gradients are computed in `dtypes`, or in two.
    """
    there = on_cuda(parts)
    for dtype in dtypes or (torch.float32, torch.bfloat16, torch.float16):
        out = torch.full(parts[0].shape, torch.nan, dtype=dtype, device="cuda")
        form(*there, dtype, out=out)
        assert torch.equal(out.cpu(), form(*parts, dtype)), dtype
    # codewords are plain PyTorch's choice: the textbook's takes C numbers for every weight
    plain = choose(*parts)
    indices = (chosen(*parts) if parts[1].dim() == 1 else plain.indices().long()).cuda()
    for dtype in dtypes or (torch.float32, torch.bfloat16):
        dW = torch.randn(parts[0].shape, device="cuda").to(dtype)
        _, eager = gradients(indices, *there[1:], dW.float())
        _, exact = gradients(indices, *there[1:], dW.double())
        for name, gradient in pull_back(dW, *there, wanted=exact.keys()).items():
            slack = 2e-6 * max(1.0, exact[name].abs().max().item())
            assert_no_worse_than_eager(gradient, eager[name], exact[name], slack)


@pytest.mark.parametrize("source", ["packed", "float32"])
@pytest.mark.parametrize("name", ODD + ODD_VECTORS)
def test_odd_shapes(name: str, source: str) -> None:
    spec = ALL_SPECS[name]
    check(random_parts(131, spec.group_size * max(1, 300 // spec.group_size), spec, source))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("spec", TRAINED.values(), ids=TRAINED)
def test_training_shapes(spec: LutSpec, source: str) -> None:
    for shape in TRAINING_SHAPES:
        check(random_parts(*shape, spec, source), torch.bfloat16)


@pytest.mark.parametrize("bits", [8, 5])
@pytest.mark.parametrize("source", ["packed", "float32"])
def test_every_scale_of_a_byte_is_rounded_as_on_the_cpu(source: str, bits: int) -> None:
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    others = torch.tensor([-0.0, -1e-9, -2.0, -torch.inf, 1e-30, 65519.0])
    scales = Scales(torch.cat([halves, halves * 1.0003, others])[:, None], bits=bits)
    scales = scales._replace(scales=scales.scales.clamp_max(65519.0))
    there = scales.scales.cuda()
    found = round_to_byte(there, bits).cpu()
    assert torch.equal(found, round_to_byte(scales.scales, bits))
    assert torch.equal(found, nearest_e5m3(scales.scales.clamp_min(0), bits))
    O = len(there)
    packed = PackedIndices(torch.randint(256, (O, 1), dtype=torch.uint8), 1, 8)
    parts = packed if source == "packed" else torch.randn(O, 8), torch.tensor([-1.0, 1.0]), scales
    assert torch.equal(form(*on_cuda(parts), torch.float32).cpu(), form(*parts, torch.float32))


def test_a_group_larger_than_a_tile() -> None:
    check(random_parts(64, 4100, LutSpec(bits=4, group_size=4100), "packed"), torch.bfloat16)


@pytest.mark.parametrize("name", ["v2", "v3", "eights12", "fours8_r4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codewords_of_millions_of_vectors(name: str, dtype: torch.dtype) -> None:
    """None differs from those of float64, however close two scores on tensor cores may be."""
    O, I, spec = 4096, 4096, TRAINED[name]
    _, codebook, scales = on_cuda(random_parts(O, I, spec, "float32"))
    S = expand_scales(round_scales(scales), I)
    latent = (torch.randn(O, I, device="cuda") * S).to(dtype)
    found = choose(latent, codebook, scales)
    assert torch.equal(found.indices(), nearest_codewords(latent, S, codebook))


@pytest.mark.parametrize("name", ["lut4", "v2", "fours12"])
def test_twice_the_same_bits(name: str) -> None:
    parts = on_cuda(random_parts(1024, 3072, TRAINED[name], "packed"))
    dW = torch.randn(1024, 3072, device="cuda").bfloat16()
    first, second = (pull_back(dW, *parts, wanted={"codebook", "scales"}) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("make", [frozen_linear, latent_linear], ids=["frozen", "latent"])
@pytest.mark.parametrize("name", ["lut2", "lut2_s8", "lut2_r4", "fours8_s8"])
def test_a_step_never_waits_for_the_device(name: str, make: type) -> None:
    linear = make(128, 256, SPECS[name], bias=True).cuda()
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        linear.form_(torch.bfloat16)
        linear(x).square().sum().backward()

    step()
    with no_synchronisation():
        step()


@pytest.mark.parametrize("make", [frozen_linear, latent_linear], ids=["frozen", "latent"])
@pytest.mark.parametrize("name", ["lut4", "lut2_s8", "fours8_s8"])
def test_a_step_is_captured_in_a_graph(name: str, make: type) -> None:
    linear = make(128, 256, SPECS[name]).cuda()
    x = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        linear.form_(torch.bfloat16)
        linear(x).float().square().sum().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for parameter in linear.parameters():
        parameter.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        linear.codebook.mul_(0.5)
    graph.replay()
    captured = {name: p.grad.clone() for name, p in linear.named_parameters()}
    linear.zero_grad()
    step()
    for name, parameter in linear.named_parameters():
        torch.testing.assert_close(captured[name], parameter.grad, msg=name)
