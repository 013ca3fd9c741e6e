"""The kernels inside a decoder layer: attention, its joined form, the gated unit, decoding.

Shapes: B sequences, S positions, H query heads, J key-value heads, D head width, F width of gates,
N positions of a cache, T tokens.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qat.bench.kernels.gates import (
    Inputs,
    KernelCase,
    Outputs,
    Room,
    Size,
    Way,
    block_pass_space,
    form_space,
    gated_space,
    gather_space,
    matvec_space,
    num_bytes,
    ways,
)
from qat.kernels.adamw import Moving, Noise, Rates, stochastic_adamw_
from qat.kernels.attention import packed_attention, tile_attention
from qat.kernels.column_sweep import refit_scale, settle_columns
from qat.kernels.decode_attention import Angles, Cache, Scoring, decode_attention
from qat.kernels.glu import fused_silu_mul, silu_mul
from qat.kernels.head import Head, LogitGradients, chosen_logits, hidden_gradient, other_words
from qat.kernels.joined_attention import joined_attention, joined_tile_attention
from qat.kernels.joined_attention import joined_tile_operator as joined_operator
from qat.kernels.lut_matvec import (
    MMA_BITS,
    UNIT,
    LutRows,
    Norm,
    Rows,
    gathered,
    matvec,
    matvec_add,
    order_of,
    spread,
)
from qat.kernels.lut_weight import form, pull_back
from qat.kernels.topk import BLOCK, summarize, top_k_of_blocks
from qat.quant.error_feedback import Columns
from qat.quant.weight import PackedIndices, Scales, packed_width

EPS = 1e-6
ATTENTION_SLACK = 2e-2
"""Half-precision weights are rounded between two products, in eager PyTorch elsewhere than here."""
ODD = ({"B": 2, "S": 17, "H": 4, "J": 2, "D": 32}, {"B": 1, "S": 50, "H": 3, "J": 1, "D": 64})
WIDE = ({"B": 3, "S": 100, "H": 16, "J": 8, "D": 128}, {"B": 65, "S": 64, "H": 6, "J": 2, "D": 64})


def layer_cases() -> Iterator[KernelCase]:
    """Forward and backward of everything in a layer, then one step of decoding."""
    yield from attention_cases()
    yield from joined_cases()
    yield from gated_cases()
    yield decode_case()


def attention_cases() -> Iterator[KernelCase]:
    """Attention alone, heads apart."""
    common = {
        "inputs": _attention_inputs,
        "size": _attention_size,
        "odd": ODD,
        "wide": WIDE,
        "slack": ATTENTION_SLACK,
    }
    yield KernelCase(
        "attention, forward",
        kernel=lambda i, s: {"out": tile_attention(*_qkv(i), _scale(s))},
        reference=lambda i, s: {"out": packed_attention(*_qkv(i), _scale(s))},
        moved=lambda i, o, s: num_bytes(_qkv(i), o),
        flops=lambda s: 2 * product_flops(s),
        **common,
    )
    yield KernelCase(
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


def joined_cases() -> Iterator[KernelCase]:
    """Norms, rotary embedding and attention of heads that lie side by side."""
    common = {
        "inputs": _joined_inputs,
        "size": _attention_size,
        "odd": ODD,
        "wide": WIDE,
        "slack": ATTENTION_SLACK,
    }
    yield KernelCase(
        "joined attention, forward",
        kernel=lambda i, s: {"out": joined_tile_attention(i["qkv"], *_rest(i, s))},
        reference=lambda i, s: {"out": joined_attention(i["qkv"], *_rest(i, s))},
        moved=lambda i, o, s: num_bytes({k: v for k, v in i.items() if k not in {"grad"}}, o),
        flops=lambda s: 2 * product_flops(s),
        **common,
    )
    yield KernelCase(
        "joined attention, backward",
        kernel=_joined_backward,
        reference=lambda i, s: _named(
            gradients(lambda qkv: joined_attention(qkv, *_rest(i, s)), i["grad"], i["qkv"]),
            ["qkv"],
        ),
        flops=lambda s: 5 * product_flops(s),
        **common,
    )


def gated_cases() -> Iterator[KernelCase]:
    """`silu(gate) * up` and its gradient."""
    common = {
        "size": lambda c: {"T": c["sequences"] * c["length"], "F": c["intermediate_size"]},
        "odd": ({"T": 7, "F": 37}, {"T": 3, "F": 1030}),
        "wide": ({"T": 1001, "F": 3071},),
        "slack": 2.0**-9,
    }
    yield KernelCase(
        "gated unit, forward",
        inputs=lambda room, s: {"joined": room.normal(s["T"], 2 * s["F"])},
        kernel=lambda i, s: {"out": fused_silu_mul(i["joined"])},
        space=lambda s: gated_space(s, "gated_unit"),
        **_reference(lambda i, s: {"out": silu_mul(i["joined"])}),
        **common,
    )
    yield KernelCase(
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


def decode_case() -> KernelCase:
    """One new position against a full cache."""
    return KernelCase(
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
    heads = Scoring(_scale(size), *inputs["gains"], EPS)
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


# The kernels of quantized linears: form and pull back in training, matrix-vector in decoding.
#
# Shapes: O out_features, I in_features, bits of an index (16: a dense matrix), group weights that
# share a scale.

GROUP, PARTS = 16, 640
SHORT_SLACK = 5e-4
"""Levels of 16 bits (`short_levels`) err by at most that of themselves."""
FORM_ODD = ({"O": 37, "I": 80}, {"O": 5, "I": 112})
FORM_WIDE = ({"O": 1031, "I": 1040}, {"O": 129, "I": 3056})
VECTOR_ODD = ({"O": 37, "I": 192}, {"O": 9, "I": 80})
VECTOR_WIDE = ({"O": 333, "I": 1040},)


def linear_cases() -> Iterator[KernelCase]:
    """Training's kernels by source and bits, then decoding's by kind of matrix."""
    for source, bits in (("packed", 2), ("packed", 4), ("latent", 2), ("latent", 4)):
        yield form_case(source, bits)
        yield pull_back_case(source, bits)
    yield from decode_cases(mlp=2, attention=4, head=4)
    yield matvec_add_case("down, exact levels", 2, _mlp_out, has_exact_levels=True)
    yield from decode_cases(mlp=16, attention=16, head=16)


def decode_cases(*, mlp: int, attention: int, head: int) -> Iterator[KernelCase]:
    """The five matrices of a decoding step, by bits of their indices; 16: dense ones."""
    yield matvec_case("queries, keys, values", attention, _joined_heads)
    yield matvec_add_case("attention out", attention, _attention_out)
    yield matvec_case("gates and ups", mlp, _mlp_in, is_gated=True)
    yield matvec_add_case("down", mlp, _mlp_out)
    yield matvec_case("head", head, lambda c: {"O": c["vocab_size"], "I": c["hidden_size"]})


def form_case(source: str, bits: int) -> KernelCase:
    """The weight, which is the same bits on every device: nothing is allowed beyond eager."""

    def run(inputs: Inputs, size: Size) -> Outputs:
        weight, dtype = inputs["weight"], inputs["dtype"]
        return {"W": form(*weight, dtype)}

    both = ways(run)
    return KernelCase(
        f"form, {source} {bits}-bit",
        inputs=lambda room, s: {"weight": _weight(room, s, source, bits), "dtype": room.dtype},
        **both,
        exact=both["reference"],
        size=_mlp_in if bits == 2 else _joined_heads,
        odd=FORM_ODD,
        wide=FORM_WIDE,
        slack=0.0,
        space=lambda s: form_space(s, bits, is_packed=source == "packed"),
    )


def pull_back_case(source: str, bits: int) -> KernelCase:
    """The gradients of scales and codebook."""

    def run(inputs: Inputs, size: Size) -> Outputs:
        return pull_back(inputs["dW"], *inputs["weight"], wanted=("codebook", "scales"))

    return KernelCase(
        f"pull back, {source} {bits}-bit",
        inputs=lambda room, s: {
            "weight": _weight(room, s, source, bits),
            "dW": room.normal(s["O"], s["I"]),
        },
        **ways(run),
        size=_mlp_in if bits == 2 else _joined_heads,
        odd=FORM_ODD,
        wide=FORM_WIDE,
    )


def matvec_case(
    name: str, bits: int, size: Callable[[Mapping[str, Any]], Size], *, is_gated: bool = False
) -> KernelCase:
    """A product behind a norm, perhaps with a gated unit behind it."""

    def run(inputs: Inputs, size: Size) -> Outputs:
        norm = Norm(inputs["squares"], EPS)
        return {"y": matvec(inputs["x"], inputs["rows"], norm=norm, is_gated=is_gated)}

    def exact(inputs: Inputs, size: Size) -> Outputs:
        y = _product(inputs["x"], inputs["rows"])
        y = y * torch.rsqrt(inputs["squares"].double().sum(1, keepdim=True) / size["I"] + EPS)
        if is_gated:
            gate, up = y.chunk(2, 1)
            y = functional.silu(gate) * up
        return {"y": y}

    def inputs(room: Room, size: Size) -> Inputs:
        shape = {**size, "O": size["O"] * (2 if is_gated else 1)}
        return {
            **_factors(room, shape, bits, is_short=True),
            "squares": room.uniform(1, PARTS),
        }

    return KernelCase(
        f"matvec, {name}, {bits}-bit",
        inputs=inputs,
        **ways(run),
        exact=exact,
        size=size,
        odd=VECTOR_ODD,
        wide=VECTOR_WIDE,
        moved=_moved_rows,
        slack=SHORT_SLACK if bits in MMA_BITS else 2e-6,
        space=lambda s: matvec_space(s, bits, is_short=True),
    )


def matvec_add_case(
    name: str,
    bits: int,
    size: Callable[[Mapping[str, Any]], Size],
    *,
    has_exact_levels: bool = False,
) -> KernelCase:
    """A product onto the residual stream."""
    is_short = bits in MMA_BITS and not has_exact_levels

    def run(inputs: Inputs, size: Size) -> Outputs:
        stream = matvec_add(*(inputs[n] for n in ("x", "rows", "residual", "gamma")), order=UNIT)
        return stream._asdict()

    def exact(inputs: Inputs, size: Size) -> Outputs:
        residual = inputs["residual"].double() + _product(inputs["x"], inputs["rows"])
        squares = residual.square().sum(1)
        scaled = residual * inputs["gamma"].double()
        scaled = scaled.unflatten(1, (-1, UNIT)).transpose(1, 2).flatten(1)  # not to float32
        return {"residual": residual, "scaled": scaled, "squares": squares}

    def inputs(room: Room, size: Size) -> Inputs:
        return {
            **_factors(room, size, bits, is_short=is_short),
            "residual": room.normal(1, size["O"], dtype=torch.float32),
            "gamma": room.uniform(size["O"], low=0.5, high=1.5),
        }

    return KernelCase(
        f"matvec, {name}, {bits}-bit",
        inputs=inputs,
        **ways(run),
        exact=exact,
        size=size,
        compared=lambda o: {**o, "squares": o["squares"].sum(1)},  # in as many parts as tiles
        odd=({"O": 48, "I": 192}, {"O": 16, "I": 80}),
        wide=({"O": 336, "I": 1040},),
        moved=_moved_rows,
        slack=SHORT_SLACK if is_short else 2e-6,
        space=lambda s: matvec_space(s, bits, is_short=is_short),
        counts=not has_exact_levels,
    )


def _weight(room: Room, size: Size, source: str, bits: int) -> tuple:
    """Source, codebook and scales in groups of 16 with 8 bits, as presets have them."""
    O, I = size["O"], size["I"]
    codebook = room.normal(2**bits, dtype=torch.float32).sort().values
    scales = Scales(room.uniform(O, I // GROUP, low=0.05, high=1.5), bits=8)
    if source == "latent":
        return room.normal(O, I), codebook, scales
    return _packed(room, O, I, bits), codebook, scales


def _packed(room: Room, O: int, I: int, bits: int) -> PackedIndices:
    octets = room.integers(256, O, packed_width(I, bits), dtype=torch.uint8)
    return PackedIndices(octets, bits, I)


def _factors(room: Room, size: Size, bits: int, *, is_short: bool) -> Inputs:
    """A matrix, and a vector as it reads one."""
    if bits == 16:
        rows: Rows = room.normal(size["O"], size["I"])
    else:
        rows = LutRows.of(*_weight(room, size, "packed", bits), is_short=is_short)
    x = room.normal(1, size["I"], dtype=torch.float32)
    return {"x": spread(x, order_of(rows)), "rows": rows}


def _product(x: Tensor, rows: Rows) -> Tensor:
    W = rows.double() if isinstance(rows, Tensor) else rows.dense().double()
    return gathered(x, order_of(rows)).double() @ W.T


def _moved_rows(inputs: Inputs, outputs: Outputs, size: Size) -> int:
    rows = inputs["rows"]
    read = rows if isinstance(rows, Tensor) else (rows.octets, rows.scales)
    return num_bytes(read, inputs["x"], outputs)


def _joined_heads(config: Mapping[str, Any]) -> Size:
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    return {"O": heads * config["head_dim"], "I": config["hidden_size"]}


def _attention_out(config: Mapping[str, Any]) -> Size:
    return {"O": config["hidden_size"], "I": config["num_attention_heads"] * config["head_dim"]}


def _mlp_in(config: Mapping[str, Any]) -> Size:
    return {"O": config["intermediate_size"], "I": config["hidden_size"]}


def _mlp_out(config: Mapping[str, Any]) -> Size:
    return {"O": config["hidden_size"], "I": config["intermediate_size"]}


# The kernels over the vocabulary, and those of optimizer and converter.
#
# Shapes: T tokens, K teacher tokens kept, V vocabulary, D width, O rows, B columns of a block, C
# codebook entries.

RATES = Rates(lr=1e-2, decay=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)
HEAD_ODD = ({"T": 5, "K": 7, "V": 130, "D": 48}, {"T": 3, "K": 20, "V": 301, "D": 40})
HEAD_WIDE = ({"T": 131, "K": 64, "V": 10_007, "D": 1032},)


def word_cases() -> Iterator[KernelCase]:
    """Losses, cache, optimizer and converter."""
    yield from head_cases()
    yield from top_k_cases()
    yield adamw_case()
    yield from column_cases()


def head_cases() -> Iterator[KernelCase]:
    """The losses' passes over the head: chosen words, their gradient, and all others."""
    common = {"inputs": _head_inputs, "size": _head_size, "odd": HEAD_ODD, "wide": HEAD_WIDE}
    yield KernelCase(
        "gather-dot",
        **ways(lambda i, s: {"logits": chosen_logits(i["hidden"], Head(i["weight"]), i["ids"])}),
        moved=lambda i, o, s: _gathered(i, s) + num_bytes(i["hidden"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_dot"),
        **common,
    )
    yield KernelCase(
        "gather-sum",
        **ways(_gather_sum),
        moved=lambda i, o, s: _gathered(i, s) + num_bytes(i["g_chosen"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_sum"),
        slack=2.0**-9,
        **common,
    )
    yield KernelCase(
        "other words",
        **ways(_other_words),
        # a logit is written, read, and its share written and read: four bytes, then two
        moved=lambda i, o, s: s["T"] * s["V"] * (4 + i["hidden"].element_size()),
        flops=lambda s: 4.0 * s["T"] * s["V"] * s["D"],
        slack=2.0**-9,
        counts=False,  # mostly matmuls of a library
        **common,
    )


def top_k_cases() -> Iterator[KernelCase]:
    """The cache's pass over logits, and what picks the top K from its blocks."""
    common = {
        "size": lambda c: {"T": c["logit_rows"], "V": c["vocab_size"], "K": c["kept"]},
        "odd": ({"T": 3, "V": 333, "K": 2}, {"T": 2, "V": 1000, "K": 7}),
        "wide": ({"T": 37, "V": 151_935, "K": 64},),
        "slack": 4e-6,
        "floor": 1.0,
    }
    yield KernelCase(
        "top-k, block pass",
        inputs=lambda room, s: {"logits": room.normal(s["T"], s["V"])},
        **ways(lambda i, s: summarize(i["logits"])._asdict()),
        space=block_pass_space,
        **common,
    )
    yield KernelCase(
        "top-k, selection",
        inputs=_selection_inputs,
        **ways(lambda i, s: top_k_of_blocks(i["logits"], s["K"], i["blocks"])._asdict()),
        moved=lambda i, o, s: (
            num_bytes(i["blocks"], o) + s["T"] * s["K"] * BLOCK * i["logits"].element_size()
        ),
        exact=_select_exactly,
        counts=False,  # the cache's, and bound by comparisons
        **common,
    )


def adamw_case() -> KernelCase:
    """AdamW on bfloat16: every result is a neighbour of the exact one."""
    return KernelCase(
        "AdamW, stochastic rounding",
        inputs=_adamw_inputs,
        **ways(_adamw),
        exact=_adamw_exactly,
        size=lambda c: {"O": c["intermediate_size"], "I": c["hidden_size"]},
        odd=({"O": 37, "I": 11}, {"O": 2, "I": 2500}),
        wide=({"O": 1027, "I": 1025},),
        slack=2.0**-7,  # one last bit of bfloat16
    )


def column_cases() -> Iterator[KernelCase]:
    """The two steps inside a block of a converter's sweep."""
    common = {
        "odd": ({"B": 20, "O": 129, "C": 4}, {"B": 7, "O": 40, "C": 16}),
        "wide": ({"B": 16, "O": 3071, "C": 4},),
        "counts": False,  # bound by walking columns one after the other
    }
    size = {"B": 16, "C": 4}
    yield KernelCase(
        "columns, settle",
        inputs=_settle_inputs,
        **ways(_settle),
        size=lambda c: {**size, "O": c["intermediate_size"]},
        slack=0.0,
        **common,
    )
    yield KernelCase(
        "columns, refit",
        inputs=_refit_inputs,
        **ways(_refit),
        size=lambda c: {**size, "O": c["intermediate_size"]},
        slack=2e-3,  # scales are rounded to float16: a tie may go the other way
        **common,
    )


def _head_size(config: Mapping[str, Any]) -> Size:
    tokens, kept = config["sequences"] * config["length"], config["kept"]
    return {"T": tokens, "K": kept, "V": config["vocab_size"], "D": config["hidden_size"]}


def _head_inputs(room: Room, size: Size) -> Inputs:
    T, K, V, D = (size[name] for name in "TKVD")
    # ids of a row differ, as a teacher's do
    ids = room.integers(V, T, 1) + torch.arange(K, device=room.device) * (V // K)
    return {
        "hidden": room.normal(T, D) * D**-0.5,
        "weight": room.normal(V, D),
        "ids": ids % V,
        "g_chosen": room.normal(T, K, dtype=torch.float32),
    }


def _gathered(inputs: Inputs, size: Size) -> int:
    return size["T"] * size["K"] * size["D"] * inputs["weight"].element_size()


def _gather_sum(inputs: Inputs, size: Size) -> Outputs:
    out = torch.empty_like(inputs["hidden"])
    g_logits = LogitGradients(inputs["ids"], inputs["g_chosen"], size["K"])
    hidden_gradient(g_logits, None, inputs["weight"], out=out)
    return {"d_hidden": out}


def _other_words(inputs: Inputs, size: Size) -> Outputs:
    head = Head(inputs["weight"])
    return other_words(inputs["hidden"], head, inputs["ids"], want_slope=True)._asdict()


def _selection_inputs(room: Room, size: Size) -> Inputs:
    logits = room.normal(size["T"], size["V"])
    return {"logits": logits, "blocks": summarize(logits)}


def _select_exactly(inputs: Inputs, size: Size) -> Outputs:
    logits = inputs["logits"].double()
    values, ids = (t[:, : size["K"]] for t in logits.sort(dim=1, descending=True, stable=True))
    total = logits.logsumexp(1)
    tail = logits.scatter(1, ids, -torch.inf).logsumexp(1) - total
    return {"values": values, "ids": ids, "log_sum_exp": total, "tail_logprob": tail}


def _adamw_inputs(room: Room, size: Size) -> Inputs:
    half = torch.bfloat16
    p, g, m = (room.normal(size["O"], size["I"], dtype=torch.float32) for _ in range(3))
    moving = Moving(p.to(half), g.to(half), (0.1 * m).to(half), (0.3 * m.square()).to(half))
    factors = torch.tensor([0.5, 1 - 0.9**3, (1 - 0.95**3) ** 0.5], device=room.device)
    return {"moving": moving, "shared": factors}


def _adamw(inputs: Inputs, size: Size) -> Outputs:
    moving = inputs["moving"]
    stochastic_adamw_(moving, inputs["shared"], RATES, Noise(seed=0, step=0, index=0))
    return {"p": moving.parameter, "m": moving.exp_avg, "v": moving.exp_avg_sq}


def _adamw_exactly(inputs: Inputs, size: Size) -> Outputs:
    p, g, m, v = (tensor.double() for tensor in inputs["moving"])
    factor, bias1, root_bias2 = inputs["shared"].double()
    g = g * factor
    m = RATES.beta1 * m + (1 - RATES.beta1) * g
    v = RATES.beta2 * v + (1 - RATES.beta2) * g.square()
    change = (m / bias1) / (v.sqrt() / root_bias2 + RATES.eps)
    return {"p": p - RATES.decay * p - RATES.lr * change, "m": m, "v": v}


def _settle_inputs(room: Room, size: Size) -> Inputs:
    """Short binary fractions: every sum is exact, so that no choice hangs on a rounding."""
    B, O, C = (size[name] for name in "BOC")

    def fractions(*shape: int, high: int, unit: float) -> torch.Tensor:
        return (room.integers(2 * high + 1, *shape) - high).float() * unit

    weight = fractions(B, O, high=32, unit=1 / 16) + 2.0**-10
    coupling = fractions(B, B, high=2, unit=1 / 8).fill_diagonal_(0.0)
    levels = torch.arange(C, device=room.device).float()[:, None] / 4 - C / 8
    return {
        "weight": weight,
        "scales": 2.0 ** room.integers(3, 1, O).float(),
        "levels": levels.expand(C, O).contiguous(),
        "target": weight + fractions(B, O, high=8, unit=1 / 16),
        "coupling": coupling,
    }


def _columns(inputs: Inputs) -> Columns:
    """A block before its first choice: the lowest level everywhere."""
    weight, scales, levels = (inputs[name] for name in ("weight", "scales", "levels"))
    chosen = inputs.get("chosen", levels[:1].expand_as(weight)).clone()
    return Columns(weight, weight - chosen * scales, chosen, scales, levels)


def _settle(inputs: Inputs, size: Size) -> Outputs:
    columns = _columns(inputs)
    settle_columns(columns, inputs["target"].clone(), inputs["coupling"])
    return {"chosen": columns.chosen, "residual": columns.residual}


def _refit_inputs(room: Room, size: Size) -> Inputs:
    B, O, C = (size[name] for name in "BOC")
    levels = room.normal(C, O, dtype=torch.float32).sort(0).values
    weight = room.normal(B, O, dtype=torch.float32)
    return {
        "weight": weight,
        "scales": room.uniform(1, O, low=0.1, high=1.1).half().float(),
        "levels": levels,
        "chosen": levels.gather(0, room.integers(C, B, O)),
        "target": weight + 0.3 * room.normal(B, O, dtype=torch.float32),
        # the curvature of a real Hessian is positive
        "coupling": 0.09 * room.normal(B, B, dtype=torch.float32).fill_diagonal_(0.0),
        "diagonal": room.uniform(B, low=0.5, high=1.5),
    }


def _refit(inputs: Inputs, size: Size) -> Outputs:
    columns, target = _columns(inputs), inputs["target"].clone()
    columns.scales = columns.scales.clone()
    refit_scale(columns, target, inputs["coupling"], inputs["diagonal"])
    return {"scales": columns.scales, "residual": columns.residual, "target": target}
