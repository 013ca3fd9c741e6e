"""Operators of engines on a GPU: recorded once, and equal to plain products."""

import pytest
import torch
from gpu_case import recorded
from quantized import ROUNDINGS, SPECS, frozen_linear, rounding

from qat.extensions.vllm.packed import Stored, lut_experts, lut_linear, rounded_heads
from qat.models.stored_state import packed_state_dict
from qat.quant.kv import fake_quantize_heads
from qat.quant.spec import ActivationKind, LutSpec

pytestmark = pytest.mark.gpu
E, O, I = 8, 64, 128


@pytest.mark.parametrize("num_rows", [1, 5, 8, 300])
@pytest.mark.parametrize("spec", [SPECS["lut2_s8"], SPECS["fours8_s8"]], ids=["levels", "vectors"])
def test_a_graph_of_experts_follows_what_is_asked_for(spec: LutSpec, num_rows: int) -> None:
    """A replay with another choice of experts and other inputs gives their products."""
    linear = frozen_linear(E * O, I, spec)
    state = packed_state_dict(torch.nn.ModuleDict({"it": linear}))
    format = Stored("it", spec).format
    weights = [state[f"it.{name}"].cuda() for name in format.names()]
    x = torch.randn(num_rows, I, device="cuda", dtype=torch.bfloat16)
    experts = torch.randint(E, (num_rows,), device="cuda")

    graph, y = recorded(lambda: lut_experts(x, experts, weights, [*format], E))
    whole = linear.quantized_weight(torch.bfloat16).cuda().view(E, O, I)
    for _ in range(2):
        x.normal_()
        experts.random_(E)
        graph.replay()
        expected = torch.einsum("noi,ni->no", whole[experts].float(), x.float())
        torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("kind", "bits"), ROUNDINGS)
def test_a_graph_of_a_linear_rounds_what_it_reads(kind: ActivationKind, bits: int) -> None:
    """The bits of the rounding are those of a CPU, and a graph rounds each new input."""
    spec = SPECS["lut2_s8"]
    linear = frozen_linear(O, I, spec)
    linear.activation = rounding(kind, scale_bits=bits)
    state = packed_state_dict(torch.nn.ModuleDict({"it": linear}))
    plain = Stored("it", spec).format
    format = Stored("it", spec, 0, linear.activation.spec, int(kind == "int8-static")).format
    weights = [state[f"it.{name}"].cuda() for name in format.names()]
    x = torch.randn(5, I, device="cuda", dtype=torch.bfloat16)
    lut_linear(x, weights, [*format], None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lut_linear(x, weights, [*format], None)
        heads = rounded_heads(x, 4)
    for _ in range(2):
        x.normal_()
        graph.replay()
        read = linear.activation(x.cpu()).detach().cuda()
        assert torch.equal(y, lut_linear(read, weights[: len(plain.names())], [*plain], None))
        assert torch.equal(heads.cpu(), fake_quantize_heads(x.cpu(), 4))
