"""The kernels of quantized linears: form and pull back in training, matrix-vector in decoding.

Shapes: O out_features, I in_features, bits of an index (16: a dense matrix), group weights that
share a scale.
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
    form_space,
    matvec_space,
    num_bytes,
    ways,
)
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
from qat.quant.pack import Packed, packed_width
from qat.quant.weight import Scales

GROUP, EPS, PARTS = 16, 1e-6, 640
SHORT_SLACK = 5e-4
"""Levels of 16 bits (`short_levels`) err by at most that of themselves."""
FORM_ODD = ({"O": 37, "I": 80}, {"O": 5, "I": 112})
FORM_WIDE = ({"O": 1031, "I": 1040}, {"O": 129, "I": 3056})
VECTOR_ODD = ({"O": 37, "I": 192}, {"O": 9, "I": 80})
VECTOR_WIDE = ({"O": 333, "I": 1040},)


def linear_cases() -> Iterator[Case]:
    """Training's kernels by source and bits, then decoding's by kind of matrix."""
    for source, bits in (("packed", 2), ("packed", 4), ("latent", 2), ("latent", 4)):
        yield form_case(source, bits)
        yield pull_back_case(source, bits)
    yield from decode_cases(mlp=2, attention=4, head=4)
    yield matvec_add_case("down, exact levels", 2, _mlp_out, has_exact_levels=True)
    yield from decode_cases(mlp=16, attention=16, head=16)


def decode_cases(*, mlp: int, attention: int, head: int) -> Iterator[Case]:
    """The five matrices of a decoding step, by bits of their indices; 16: dense ones."""
    yield matvec_case("queries, keys, values", attention, _joined_heads)
    yield matvec_add_case("attention out", attention, _attention_out)
    yield matvec_case("gates and ups", mlp, _mlp_in, is_gated=True)
    yield matvec_add_case("down", mlp, _mlp_out)
    yield matvec_case("head", head, lambda c: {"O": c["vocab_size"], "I": c["hidden_size"]})


def form_case(source: str, bits: int) -> Case:
    """The weight, which is the same bits on every device: nothing is allowed beyond eager."""

    def run(inputs: Inputs, size: Size) -> Outputs:
        weight, dtype = inputs["weight"], inputs["dtype"]
        return {"W": form(*weight, dtype)}

    both = ways(run)
    return Case(
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


def pull_back_case(source: str, bits: int) -> Case:
    """The gradients of scales and codebook."""

    def run(inputs: Inputs, size: Size) -> Outputs:
        return pull_back(inputs["dW"], *inputs["weight"], wanted=("codebook", "scales"))

    return Case(
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
) -> Case:
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

    return Case(
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
) -> Case:
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

    return Case(
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


def _packed(room: Room, O: int, I: int, bits: int) -> Packed:
    octets = room.integers(256, O, packed_width(I, bits), dtype=torch.uint8)
    return Packed(octets, bits, I)


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
