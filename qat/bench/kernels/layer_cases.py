"""The kernels inside a decoder layer: attention, its joined form, the gated unit, decoding.

Shapes: B sequences, S positions, H query heads, J key-value heads, D head width, F width of gates,
N positions of a cache, T tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qat.bench.kernels.case import (
    Case,
    Inputs,
    Outputs,
    Room,
    Size,
    Way,
    gated_space,
    num_bytes,
    ways,
)
from qat.kernels.attention import packed_attention, tile_attention
from qat.kernels.decode_attention import Angles, Cache, Heads, decode_attention
from qat.kernels.glu import fused_silu_mul, silu_mul
from qat.kernels.joined_attention import joined_attention, joined_tile_attention
from qat.kernels.joined_attention import joined_tile_operator as joined_operator

EPS = 1e-6
ATTENTION_SLACK = 2e-2
"""Half-precision weights are rounded between two products, in eager PyTorch elsewhere than here."""
ODD = ({"B": 2, "S": 17, "H": 4, "J": 2, "D": 32}, {"B": 1, "S": 50, "H": 3, "J": 1, "D": 64})
WIDE = ({"B": 3, "S": 100, "H": 16, "J": 8, "D": 128}, {"B": 65, "S": 64, "H": 6, "J": 2, "D": 64})


def layer_cases() -> Iterator[Case]:
    """Forward and backward of everything in a layer, then one step of decoding."""
    yield from attention_cases()
    yield from joined_cases()
    yield from gated_cases()
    yield decode_case()


def attention_cases() -> Iterator[Case]:
    """Attention alone, heads apart."""
    common = {
        "inputs": _attention_inputs,
        "size": _attention_size,
        "odd": ODD,
        "wide": WIDE,
        "slack": ATTENTION_SLACK,
    }
    yield Case(
        "attention, forward",
        kernel=lambda i, s: {"out": tile_attention(*_qkv(i), _scale(s))},
        reference=lambda i, s: {"out": packed_attention(*_qkv(i), _scale(s))},
        moved=lambda i, o, s: num_bytes(_qkv(i), o),
        flops=lambda s: 2 * product_flops(s),
        **common,
    )
    yield Case(
        "attention, backward",
        kernel=lambda i, s: _named(
            torch.ops.qat.tile_attention_backward(i["grad"], *_qkv(i), _scale(s)), "qkv"
        ),
        reference=lambda i, s: _named(
            gradients(
                lambda *qkv: packed_attention(*qkv, i["p"], _scale(s)), i["grad"], *_qkv(i)[:3]
            ),
            "qkv",
        ),
        flops=lambda s: 5 * product_flops(s),
        **common,
    )


def joined_cases() -> Iterator[Case]:
    """Norms, rotary embedding and attention of heads that lie side by side."""
    common = {
        "inputs": _joined_inputs,
        "size": _attention_size,
        "odd": ODD,
        "wide": WIDE,
        "slack": ATTENTION_SLACK,
    }
    yield Case(
        "joined attention, forward",
        kernel=lambda i, s: {"out": joined_tile_attention(i["qkv"], *_rest(i, s))},
        reference=lambda i, s: {"out": joined_attention(i["qkv"], *_rest(i, s))},
        moved=lambda i, o, s: num_bytes({k: v for k, v in i.items() if k not in {"grad"}}, o),
        flops=lambda s: 2 * product_flops(s),
        **common,
    )
    yield Case(
        "joined attention, backward",
        kernel=_joined_backward,
        reference=lambda i, s: _named(
            gradients(lambda qkv: joined_attention(qkv, *_rest(i, s)), i["grad"], i["qkv"]),
            ["qkv"],
        ),
        flops=lambda s: 5 * product_flops(s),
        **common,
    )


def gated_cases() -> Iterator[Case]:
    """`silu(gate) * up` and its gradient."""
    common = {
        "size": lambda c: {"T": c["sequences"] * c["length"], "F": c["intermediate_size"]},
        "odd": ({"T": 7, "F": 37}, {"T": 3, "F": 1030}),
        "wide": ({"T": 1001, "F": 3071},),
        "slack": 2.0**-9,
    }
    yield Case(
        "gated unit, forward",
        inputs=lambda room, s: {"joined": room.normal(s["T"], 2 * s["F"])},
        kernel=lambda i, s: {"out": fused_silu_mul(i["joined"])},
        space=lambda s: gated_space(s, "gated_unit"),
        **_reference(lambda i, s: {"out": silu_mul(i["joined"])}),
        **common,
    )
    yield Case(
        "gated unit, backward",
        inputs=lambda room, s: {
            "joined": room.normal(s["T"], 2 * s["F"]),
            "grad": room.normal(s["T"], s["F"]),
        },
        kernel=lambda i, s: {"d_joined": torch.ops.qat.silu_mul_backward(i["grad"], i["joined"])},
        space=lambda s: gated_space(s, "gated_unit_backward"),
        **_reference(lambda i, s: _named(gradients(silu_mul, i["grad"], i["joined"]), ["joined"])),
        **common,
    )


def decode_case() -> Case:
    """One new position against a full cache."""
    return Case(
        "decode attention",
        inputs=_decode_inputs,
        **ways(_decode),
        exact=_decode_exactly,
        size=lambda c: {**_heads(c), "B": 1, "N": c["context"]},
        odd=(
            {"B": 2, "H": 4, "J": 2, "D": 16, "N": 71},
            {"B": 1, "H": 3, "J": 3, "D": 16, "N": 9},
        ),
        wide=({"B": 3, "H": 16, "J": 8, "D": 128, "N": 1999},),
        moved=lambda i, o, s: num_bytes(i["qkv"], i["cache"], o["out"]),
        slack=1e-3,  # a new key on the edge of two bfloat16 numbers may become either
    )


def gradients(function: Callable[..., Any], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What autograd makes of `grad`, for each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad)


def product_flops(size: Size) -> float:
    """FLOPs of one matmul of all heads over the keys that a causal query sees."""
    S = size["S"]
    return size["B"] * size["H"] * size["D"] * S * (S + 1)


def _reference(function: Way) -> dict[str, Way]:
    """The plain way of a function that chooses, whose kernel is called by its operator."""
    return {"reference": ways(function)["reference"]}


def _named(found: Any, names: Any) -> Outputs:  # noqa: ANN401 - an operator's tuple
    return {f"d_{name}": tensor for name, tensor in zip(names, found, strict=True)}


def _heads(config: Mapping[str, Any]) -> dict[str, int]:
    return {
        "H": config["num_attention_heads"],
        "J": config["num_key_value_heads"],
        "D": config["head_dim"],
    }


def _attention_size(config: Mapping[str, Any]) -> Size:
    return {"B": config["sequences"], "S": config["length"], **_heads(config)}


def _scale(size: Size) -> float:
    return size["D"] ** -0.5


def _attention_inputs(room: Room, size: Size) -> Inputs:
    B, S, H, J, D = (size[name] for name in "BSHJD")
    heads = zip("qkv", (H, J, J), strict=True)
    made = {n: room.normal(B, S, count, D, dtype=room.half).transpose(1, 2) for n, count in heads}
    return {**made, "p": room.positions(B, S), "grad": room.normal(B, S, H, D, dtype=room.half)}


def _qkv(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs["q"], inputs["k"], inputs["v"], inputs["p"]


def _joined_inputs(room: Room, size: Size) -> Inputs:
    B, S, H, J, D = (size[name] for name in "BSHJD")
    angle = room.uniform(B, S, D // 2, high=6.0).repeat(1, 1, 2)
    return {
        "qkv": room.normal(B, S, (H + 2 * J) * D, dtype=room.half),
        "cos": angle.cos().to(room.half),
        "sin": angle.sin().to(room.half),
        "norms": [room.uniform(D, low=0.5, high=1.5) for _ in range(2)],
        "p": room.positions(B, S),
        "grad": room.normal(B, S, H, D, dtype=room.half),
    }


def _rest(inputs: Inputs, size: Size) -> tuple:
    angles = inputs["cos"], inputs["sin"]
    return *angles, *inputs["norms"], inputs["p"], _scale(size), EPS, size["H"]


def _joined_backward(inputs: Inputs, size: Size) -> Outputs:
    if "turned" not in inputs:  # kept from forward: made once, outside the clock
        inputs["turned"] = joined_operator(inputs["qkv"], *_rest(inputs, size))[1]
    grad, turned, rest = inputs["grad"], inputs["turned"], _rest(inputs, size)[:-1]
    backward = torch.ops.qat.joined_tile_attention_backward
    return {"d_qkv": backward(grad, turned, inputs["qkv"], *rest, False)[0]}


def _decode_inputs(room: Room, size: Size) -> Inputs:
    B, H, J, D, N = (size[name] for name in "BHJDN")
    angle = room.uniform(N, D // 2, high=6.0).repeat(1, 2)
    caches = (room.normal(B, J, N, D) for _ in range(2))
    return {
        "qkv": room.normal(B, (H + 2 * J) * D, dtype=torch.float32),
        "cache": Cache(*caches),
        "position": torch.tensor([N - 1], device=room.device),
        "angles": Angles(angle.cos(), angle.sin()),
        "gains": [room.uniform(D, low=0.5, high=1.5) for _ in range(2)],
    }


def _decode(inputs: Inputs, size: Size) -> Outputs:
    heads = Heads(_scale(size), *inputs["gains"], EPS)
    qkv, cache, position, angles = (inputs[n] for n in ("qkv", "cache", "position", "angles"))
    out = decode_attention(qkv, cache, position, angles, heads)
    return {"out": out, "new_key": cache.keys[:, :, -1], "new_value": cache.values[:, :, -1]}


def _decode_exactly(inputs: Inputs, size: Size) -> Outputs:
    B, H, J, D, _ = (size[name] for name in "BHJDN")
    kept = inputs["cache"].keys.dtype
    query, key, value = inputs["qkv"].double().view(B, -1, D).split([H, J, J], 1)
    cos, sin = (angle[-1].double() for angle in inputs["angles"])

    def turned(x: Tensor, gain: Tensor) -> Tensor:
        x = functional.rms_norm(x, (D,), gain.double(), EPS)
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    query, key = (turned(x, g) for x, g in zip((query, key), inputs["gains"], strict=True))
    # rounded to float32 first, as both ways do: then to what the cache holds
    new = [x.float().to(kept).double() for x in (key, value)]
    seen = [t.double().clone() for t in inputs["cache"]]
    for cache, added in zip(seen, new, strict=True):
        cache[:, :, -1] = added
    keys, values = (cache.repeat_interleave(H // J, 1) for cache in seen)
    weights = ((keys @ query[..., None])[..., 0] * _scale(size)).softmax(-1)
    out = (weights[..., None] * values).sum(2).flatten(1)
    return {"out": out, "new_key": key, "new_value": value}
