"""The gates' cases of all kernels: inputs, both implementations, and the sizes that are timed.

Shapes: B sequences or columns of a block, S positions, T tokens, H query heads, J key-value heads,
D width of a head or of the model, F width of gates, N positions of a cache, O out_features, I
in_features, K teacher tokens kept, V vocabulary, C codebook entries.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qat.extensions.bench.config import shape_called
from qat.extensions.decode.kernels.cache import Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.lut_matvec import Norm, matvec, matvec_add
from qat.extensions.decode.kernels.lut_rows import (
    MMA_FORMATS,
    UNIT,
    LutRows,
    Rows,
    gathered,
    order_of,
    spread,
)
from qat.extensions.lab.kernels.gates import (
    InputMaker,
    Inputs,
    KernelCase,
    Outputs,
    Size,
    dispatched,
    num_bytes,
)
from qat.extensions.lab.kernels.tune import (
    block_pass_space,
    choose_space,
    form_space,
    gated_space,
    gather_space,
    matvec_space,
    reduce_space,
)
from qat.kernels.adamw import Moving, Noise, Rates, stochastic_adamw_
from qat.kernels.attention import packed_attention, tile_attention
from qat.kernels.column_sweep import refit_scale, settle_columns
from qat.kernels.glu import fused_silu_mul, silu_mul
from qat.kernels.head import Head, LogitGradients, chosen_logits, hidden_gradient, other_words
from qat.kernels.joined_attention import (
    joined_attention,
    joined_tile_attention,
    joined_tile_operator,
)
from qat.kernels.kl_of_logits import Scale, kl_of_logits
from qat.kernels.lut_weight import choose, form, pull_back
from qat.kernels.topk import BLOCK, summarize, top_k_of_blocks
from qat.quant.error_feedback import Columns
from qat.quant.weight import PackedIndices, Scales, packed_width

Work = Mapping[str, Any]  # a shape's configuration together with the sizes of a batch
TRAINING = {"sequences": 512, "length": 64, "kept": 64, "logit_rows": 8192, "context": 2048}
TRIAL = {"sequences": 2, "length": 8, "kept": 8, "logit_rows": 16, "context": 32}
"""The sizes of the smallest shape, for a quick check that everything runs."""
EPS = 1e-6


def work_of(shape: str) -> dict[str, Any]:
    """Return a published shape's dimensions, and those of a batch, the cache's pass and a context.

    Raises:
        ConfigError: no shape has that name.
    """
    return {**shape_called(shape), **(TRIAL if shape == "tiny" else TRAINING)}


def all_cases() -> dict[str, KernelCase]:
    """Return all cases by name, in the order in which they run."""
    every = (
        *attention_cases(),
        *joined_cases(),
        *gated_cases(),
        decode_case(),
        *(
            make(f"{source} {bits}-bit", size, source, bits)
            for source in ("packed", "latent")
            for bits, size in ((2, _mlp_in), (4, _joined_heads))
            for make in (form_case, pull_back_case)
        ),
        *(case for bits, d in ((8, 4), (6, 2)) for case in vector_cases(bits, d)),
        both_case(2),
        both_case(8, d=4),
        *token_cases(),
        matvec_add_case("down, exact levels", 2, _mlp_out, has_exact_levels=True),
        *decode_cases(mlp=16, attention=16, head=16),
        matvec_case("gates and ups", 8, _mlp_in, is_gated=True, d=4),
        matvec_add_case("down", 8, _mlp_out, d=4),
        *head_cases(),
        divergence_case(),
        *top_k_cases(),
        adamw_case(),
        *column_cases(),
    )
    return {case.name: case for case in every}


def cases_named(only: str) -> list[KernelCase]:
    """Return the cases whose names contain a comma-separated part of `only`; all if empty."""
    parts = [part.strip() for part in only.split(",")]
    return [case for name, case in all_cases().items() if any(part in name for part in parts)]


# Kernels of a decoder layer: attention, its joined form, the gated unit, decoding.

ATTENTION = {
    "size": lambda c: {"B": c["sequences"], "S": c["length"], **_heads(c)},
    "odd": ({"B": 2, "S": 17, "H": 4, "J": 2, "D": 32}, {"B": 1, "S": 50, "H": 3, "J": 1, "D": 64}),
    "wide": (
        {"B": 3, "S": 100, "H": 16, "J": 8, "D": 128},
        {"B": 65, "S": 64, "H": 6, "J": 2, "D": 64},
    ),
    # eager PyTorch rounds the half-precision weights between two products at another point
    "slack": 2e-2,
}


def attention_cases() -> Iterator[KernelCase]:
    """Yield the cases of attention alone, with separate heads."""

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        B, S, H, J, D = (size[name] for name in "BSHJD")
        q, k, v = (maker.normal(B, S, n, D, dtype=maker.half).transpose(1, 2) for n in (H, J, J))
        positions, grad = maker.positions(B, S), maker.normal(B, S, H, D, dtype=maker.half)
        return {"qkvp": (q, k, v, positions), "grad": grad}

    def backward(i: Inputs, s: Size) -> Outputs:
        found = torch.ops.qat.tile_attention_backward(i["grad"], *i["qkvp"], _scale(s))
        return dict(zip(("d_q", "d_k", "d_v"), found, strict=True))

    def plain_backward(i: Inputs, s: Size) -> Outputs:
        *qkv, positions = i["qkvp"]
        found = gradients(lambda *x: packed_attention(*x, positions, _scale(s)), i["grad"], *qkv)
        return dict(zip(("d_q", "d_k", "d_v"), found, strict=True))

    yield KernelCase(
        "attention, forward",
        inputs=inputs,
        kernel=lambda i, s: {"out": tile_attention(*i["qkvp"], _scale(s))},
        reference=lambda i, s: {"out": packed_attention(*i["qkvp"], _scale(s))},
        moved=lambda i, o, s: num_bytes(i["qkvp"], o),
        flops=lambda s: 2 * product_flops(s),
        **ATTENTION,
    )
    yield KernelCase(
        "attention, backward",
        inputs=inputs,
        kernel=backward,
        reference=plain_backward,
        flops=lambda s: 5 * product_flops(s),
        **ATTENTION,
    )


def joined_cases() -> Iterator[KernelCase]:
    """Yield the cases of norms, rotary embedding and attention with concatenated heads."""

    long = {"B": 3, "S": 300, "H": 14, "J": 2, "D": 64}  # block by block
    sizes = ATTENTION | {"wide": (*ATTENTION["wide"], long)}

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        B, S, H, J, D = (size[name] for name in "BSHJD")
        angle = maker.uniform(B, S, D // 2, high=6.0).repeat(1, 1, 2)
        return {
            "qkv": maker.normal(B, S, (H + 2 * J) * D, dtype=maker.half),
            "cos": angle.cos().to(maker.half),
            "sin": angle.sin().to(maker.half),
            "norms": [maker.uniform(D, low=0.5, high=1.5) for _ in range(2)],
            "p": maker.positions(B, S),
            "grad": maker.normal(B, S, H, D, dtype=maker.half),
        }

    def rest(i: Inputs, s: Size) -> tuple:
        return i["cos"], i["sin"], *i["norms"], i["p"], _scale(s), EPS, s["H"]

    def backward(i: Inputs, s: Size) -> Outputs:
        if "saved" not in i:  # by the forward pass: computed once, outside the clock
            i["saved"] = joined_tile_operator(i["qkv"], *rest(i, s))
        operator = torch.ops.qat.joined_tile_attention_backward
        return {"d_qkv": operator(i["grad"], *i["saved"], i["qkv"], *rest(i, s)[:-1], False)[0]}

    def plain_backward(i: Inputs, s: Size) -> Outputs:
        found = gradients(lambda qkv: joined_attention(qkv, *rest(i, s)), i["grad"], i["qkv"])
        return {"d_qkv": found[0]}

    yield KernelCase(
        "joined attention, forward",
        inputs=inputs,
        kernel=lambda i, s: {"out": joined_tile_attention(i["qkv"], *rest(i, s))},
        reference=lambda i, s: {"out": joined_attention(i["qkv"], *rest(i, s))},
        moved=lambda i, o, s: num_bytes(i, o) - num_bytes(i["grad"]),
        flops=lambda s: 2 * product_flops(s),
        **sizes,
    )
    yield KernelCase(
        "joined attention, backward",
        inputs=inputs,
        kernel=backward,
        reference=plain_backward,
        flops=lambda s: 5 * product_flops(s),
        **sizes,
    )


def gated_cases() -> Iterator[KernelCase]:
    """Yield the cases of `silu(gate) * up` and its gradient."""
    common = {
        "size": lambda c: {"T": c["sequences"] * c["length"], "F": c["intermediate_size"]},
        "odd": ({"T": 7, "F": 37}, {"T": 3, "F": 1030}),
        "wide": ({"T": 1001, "F": 3071},),
        "slack": 2.0**-9,
    }

    def plain_backward(i: Inputs, s: Size) -> Outputs:
        return {"d_joined": gradients(silu_mul, i["grad"], i["joined"])[0]}

    yield KernelCase(
        "gated unit, forward",
        inputs=lambda maker, s: {"joined": maker.normal(s["T"], 2 * s["F"])},
        kernel=lambda i, s: {"out": fused_silu_mul(i["joined"])},
        reference=dispatched(lambda i, s: {"out": silu_mul(i["joined"])})["reference"],
        space=lambda s: gated_space(s, "gated_unit"),
        **common,
    )
    yield KernelCase(
        "gated unit, backward",
        inputs=lambda maker, s: {
            "joined": maker.normal(s["T"], 2 * s["F"]),
            "grad": maker.normal(s["T"], s["F"]),
        },
        kernel=lambda i, s: {"d_joined": torch.ops.qat.silu_mul_backward(i["grad"], i["joined"])},
        reference=dispatched(plain_backward)["reference"],
        space=lambda s: gated_space(s, "gated_unit_backward"),
        **common,
    )


def decode_case() -> KernelCase:
    """Return the case of one new position against a full cache."""

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        B, H, J, D, N = (size[name] for name in "BHJDN")
        angle = maker.uniform(N, D // 2, high=6.0).repeat(1, 2)
        caches = (maker.normal(B, J, N, D) for _ in range(2))
        return {
            "qkv": maker.normal(B, (H + 2 * J) * D, dtype=torch.float32),
            "cache": Cache(*caches),
            "position": torch.tensor([N - 1], device=maker.device),
            "angles": Angles(angle.cos(), angle.sin()),
            "gains": [maker.uniform(D, low=0.5, high=1.5) for _ in range(2)],
        }

    def run(i: Inputs, s: Size) -> Outputs:
        cache, heads = i["cache"], Scoring(_scale(s), *i["gains"], EPS)
        out = decode_attention(i["qkv"], cache, i["position"], i["angles"], heads)
        return {"out": out, "new_key": cache.keys[:, :, -1], "new_value": cache.values[:, :, -1]}

    def exact(i: Inputs, s: Size) -> Outputs:
        H, J, D = (s[name] for name in "HJD")
        query, key, value = i["qkv"].double().view(s["B"], -1, D).split([H, J, J], 1)
        cos, sin = (angle[-1].double() for angle in i["angles"])

        def turned(x: Tensor, gain: Tensor) -> Tensor:
            x = functional.rms_norm(x, (D,), gain.double(), EPS)
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat([-high, low], -1) * sin

        query, key = (turned(x, g) for x, g in zip((query, key), i["gains"], strict=True))
        seen = []
        for cache, new in zip(i["cache"], (key, value), strict=True):
            # rounded to float32 first, as in both implementations, then to the cache's dtype
            kept = new.float().to(cache.dtype).double()
            seen.append(torch.cat([cache[:, :, :-1].double(), kept[:, :, None]], 2))
        keys, values = (cache.repeat_interleave(H // J, 1) for cache in seen)
        weights = ((keys @ query[..., None])[..., 0] * _scale(s)).softmax(-1)
        out = (weights[..., None] * values).sum(2).flatten(1)
        return {"out": out, "new_key": key, "new_value": value}

    return KernelCase(
        "decode attention",
        inputs=inputs,
        **dispatched(run),
        exact=exact,
        size=lambda c: {**_heads(c), "B": 1, "N": c["context"]},
        odd=(
            {"B": 2, "H": 4, "J": 2, "D": 16, "N": 71},
            {"B": 1, "H": 3, "J": 3, "D": 16, "N": 9},
        ),
        wide=({"B": 3, "H": 16, "J": 8, "D": 128, "N": 1999},),
        moved=lambda i, o, s: num_bytes(i["qkv"], i["cache"], o["out"]),
        slack=1e-3,  # a new key on the edge of two bfloat16 numbers may round to either
    )


def gradients(function: Callable[..., Any], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of each input for the output gradient `grad`, by autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad)


def product_flops(size: Size) -> float:
    """Return the FLOPs of one matmul of all heads over the keys that a causal query sees."""
    S = size["S"]
    return size["B"] * size["H"] * size["D"] * S * (S + 1)


def _heads(work: Work) -> dict[str, int]:
    names = {"H": "num_attention_heads", "J": "num_key_value_heads", "D": "head_dim"}
    return {letter: work[name] for letter, name in names.items()}


def _scale(size: Size) -> float:
    return size["D"] ** -0.5


# Quantized linears: form and pull back in training, matrix-vector in decoding. Bits are per index;
# 16 is a dense matrix.

GROUP, PARTS = 16, 640
SHORT_SLACK = 5e-4  # largest rounding error of 16-bit levels (`short_levels`), relative to a level
FORM = {
    "odd": ({"O": 37, "I": 80}, {"O": 5, "I": 112}),
    "wide": ({"O": 1031, "I": 1040}, {"O": 129, "I": 3056}),
}


def decode_cases(*, mlp: int, attention: int, head: int) -> Iterator[KernelCase]:
    """Yield the five matrices of a decoding step, by bits per index; 16 is dense."""

    yield matvec_case("queries, keys, values", attention, _joined_heads)
    yield matvec_add_case(
        "attention out",
        attention,
        lambda c: {"O": c["hidden_size"], "I": c["num_attention_heads"] * c["head_dim"]},
    )
    yield matvec_case("gates and ups", mlp, _mlp_in, is_gated=True)
    yield matvec_add_case("down", mlp, _mlp_out)
    yield matvec_case("head", head, lambda c: {"O": c["vocab_size"], "I": c["hidden_size"]})


def token_cases() -> Iterator[KernelCase]:
    """Yield the five matrices in the formats of the student whose token is tuned as a whole."""
    yield from decode_cases(mlp=2, attention=4, head=4)


def vector_cases(bits: int, d: int) -> Iterator[KernelCase]:
    """Yield the choice of a latent weight's codewords, forming it from them, and gradients."""
    name, C = f"packed {2**bits} x {d}", 2**bits

    def run(i: Inputs, s: Size) -> Outputs:
        return {"indices": choose(*i["weight"]).indices()}

    yield KernelCase(
        f"choose, {C} x {d}",
        inputs=lambda maker, s: {"weight": _weight(maker, s, "latent", bits, d=d)},
        **dispatched(run),
        exact=dispatched(run)["reference"],
        size=_mlp_in,
        slack=0.0,  # the same codewords on every device
        flops=lambda s: 2.0 * s["O"] * s["I"] * C,
        space=lambda s: choose_space(s, C, d),
        counts=False,  # bound by comparisons
        **FORM,
    )
    yield form_case(name, _mlp_in, "packed", bits, d=d)
    yield pull_back_case(name, _mlp_in, "packed", bits, d=d)


def form_case(
    name: str, size: Callable[[Work], Size], source: str, bits: int, *, d: int = 1
) -> KernelCase:
    """Return the case of forming a weight from indices or a latent, codebook and scales."""
    both = dispatched(lambda i, s: {"W": form(*i["weight"], i["dtype"])})
    return KernelCase(
        f"form, {name}",
        inputs=lambda maker, s: {
            "weight": _weight(maker, s, source, bits, d=d),
            "dtype": maker.dtype,
        },
        **both,
        exact=both["reference"],
        size=size,
        slack=0.0,  # the same bits on every device
        space=lambda s: form_space(s, bits, d, is_packed=source == "packed"),
        **FORM,
    )


def pull_back_case(
    name: str, size: Callable[[Work], Size], source: str, bits: int, *, d: int = 1
) -> KernelCase:
    """Return the case of the gradients of scales and codebook."""
    return KernelCase(
        f"pull back, {name}",
        inputs=lambda maker, s: {
            "weight": _weight(maker, s, source, bits, d=d),
            "dW": maker.normal(s["O"], s["I"]),
        },
        **dispatched(lambda i, s: pull_back(i["dW"], *i["weight"], wanted=("codebook", "scales"))),
        size=size,
        space=None if d == 1 else lambda s: reduce_space(s, 2**bits, d),
        counts=d == 1,  # bound by the matmul that sums by codeword
        **FORM,
    )


def both_case(bits: int, *, d: int = 1) -> KernelCase:
    """Return a step's whole work on a latent weight as one case, for levels and vectors alike."""

    def run(i: Inputs, s: Size) -> Outputs:
        latent, *rest = i["weight"]
        source = choose(latent, *rest)
        W = form(source, *rest, i["dW"].dtype)
        return {"W": W, **pull_back(i["dW"], source, *rest, wanted=("codebook", "scales"))}

    return KernelCase(
        f"form and pull back, latent {_format(bits, d)}",
        inputs=lambda maker, s: {
            "weight": _weight(maker, s, "latent", bits, d=d),
            "dW": maker.normal(s["O"], s["I"]),
        },
        **dispatched(run),
        size=_mlp_in,
        counts=False,  # each part is its own case
        **FORM,
    )


def matvec_case(
    name: str, bits: int, size: Callable[[Work], Size], *, is_gated: bool = False, d: int = 1
) -> KernelCase:
    """Return a product with a norm before it and optionally a gated unit after it."""

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        shape = {**size, "O": size["O"] * (2 if is_gated else 1)}
        return {
            **_factors(maker, shape, bits, is_short=True, d=d),
            "squares": maker.uniform(1, PARTS),
        }

    def run(i: Inputs, s: Size) -> Outputs:
        return {"y": matvec(i["x"], i["rows"], norm=Norm(i["squares"], EPS), is_gated=is_gated)}

    def exact(i: Inputs, s: Size) -> Outputs:
        y = _product(i["x"], i["rows"])
        y = y * torch.rsqrt(i["squares"].double().sum(1, keepdim=True) / s["I"] + EPS)
        if is_gated:
            gate, up = y.chunk(2, 1)
            y = functional.silu(gate) * up
        return {"y": y}

    return KernelCase(
        f"matvec, {name}, {_format(bits, d)}",
        inputs=inputs,
        **dispatched(run),
        exact=exact,
        size=size,
        odd=({"O": 37, "I": 192}, {"O": 9, "I": 80}),
        wide=({"O": 333, "I": 1040},),
        moved=_moved_rows,
        slack=_slack(bits, d),
        space=lambda s: matvec_space(s, bits, is_short=True, is_gated=is_gated, d=d),
    )


def matvec_add_case(
    name: str,
    bits: int,
    size: Callable[[Work], Size],
    *,
    has_exact_levels: bool = False,
    d: int = 1,
) -> KernelCase:
    """Return a product that is added to the residual stream."""
    is_short = not has_exact_levels

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        return {
            **_factors(maker, size, bits, is_short=is_short, d=d),
            "residual": maker.normal(1, size["O"], dtype=torch.float32),
            "gamma": maker.uniform(size["O"], low=0.5, high=1.5),
        }

    def run(i: Inputs, s: Size) -> Outputs:
        return matvec_add(i["x"], i["rows"], i["residual"], i["gamma"], order=UNIT)._asdict()

    def exact(i: Inputs, s: Size) -> Outputs:
        residual = i["residual"].double() + _product(i["x"], i["rows"])
        scaled = residual * i["gamma"].double()
        scaled = scaled.unflatten(1, (-1, UNIT)).transpose(1, 2).flatten(1)  # stays float64
        return {"residual": residual, "scaled": scaled, "squares": residual.square().sum(1)}

    return KernelCase(
        f"matvec, {name}, {_format(bits, d)}",
        inputs=inputs,
        **dispatched(run),
        exact=exact,
        size=size,
        compared=lambda o: {**o, "squares": o["squares"].sum(1)},  # a partial sum per tile
        odd=({"O": 48, "I": 192}, {"O": 16, "I": 80}),
        wide=({"O": 336, "I": 1040},),
        moved=_moved_rows,
        slack=_slack(bits, d) if is_short else 2e-6,
        space=lambda s: matvec_space(s, bits, is_short=is_short, d=d),
        counts=not has_exact_levels,
    )


def _slack(bits: int, d: int) -> float:
    """Return the slack: levels are rounded for tensor cores, codewords are not."""
    return SHORT_SLACK if d == 1 and (bits, d) in MMA_FORMATS else 2e-6


def _format(bits: int, d: int) -> str:
    """Return `N-bit` for levels and `entries x d` for codewords."""
    return f"{2**bits} x {d}" if d > 1 else f"{bits}-bit"


def _weight(maker: InputMaker, size: Size, source: str, bits: int, *, d: int = 1) -> tuple:
    """Return source, codebook and scales in groups of 16 with 8 bits, as in the presets."""
    O, I = size["O"], size["I"]
    if d == 1:
        codebook = maker.normal(2**bits, dtype=torch.float32).sort().values
    else:
        codebook = maker.normal(2**bits, d, dtype=torch.float16).float()
    scales = Scales(maker.uniform(O, I // GROUP, low=0.05, high=1.5), bits=8)
    if source == "latent":
        return maker.normal(O, I), codebook, scales
    octets = maker.integers(256, O, packed_width(I // d, bits), dtype=torch.uint8)
    return PackedIndices(octets, bits, I, d), codebook, scales


def _factors(maker: InputMaker, size: Size, bits: int, *, is_short: bool, d: int) -> Inputs:
    """Return a matrix, and a vector in the order in which it is read."""
    if bits == 16:
        rows: Rows = maker.normal(size["O"], size["I"])
    else:
        rows = LutRows.of(*_weight(maker, size, "packed", bits, d=d), is_short=is_short)
    x = maker.normal(1, size["I"], dtype=torch.float32)
    return {"x": spread(x, order_of(rows)), "rows": rows}


def _product(x: Tensor, rows: Rows) -> Tensor:
    W = rows.double() if isinstance(rows, Tensor) else rows.dense().double()
    return gathered(x, order_of(rows)).double() @ W.T


def _moved_rows(inputs: Inputs, outputs: Outputs, size: Size) -> int:
    rows = inputs["rows"]
    read = rows if isinstance(rows, Tensor) else (rows.octets, rows.scales)
    return num_bytes(read, inputs["x"], outputs)


def _joined_heads(work: Work) -> Size:
    heads = work["num_attention_heads"] + 2 * work["num_key_value_heads"]
    return {"O": heads * work["head_dim"], "I": work["hidden_size"]}


def _mlp_in(work: Work) -> Size:
    return {"O": work["intermediate_size"], "I": work["hidden_size"]}


def _mlp_out(work: Work) -> Size:
    return {"O": work["hidden_size"], "I": work["intermediate_size"]}


# Kernels over the vocabulary, then those of the optimizer and the converter.


def head_cases() -> Iterator[KernelCase]:
    """Yield the losses' passes over the head: chosen words, their gradient, and all others."""

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        T, K, V, D = (size[name] for name in "TKVD")
        # IDs of a row are distinct, as a teacher's are
        ids = maker.integers(V, T, 1) + torch.arange(K, device=maker.device) * (V // K)
        return {
            "hidden": maker.normal(T, D) * D**-0.5,
            "weight": maker.normal(V, D),
            "ids": ids % V,
            "g_chosen": maker.normal(T, K, dtype=torch.float32),
        }

    def gather_sum(i: Inputs, s: Size) -> Outputs:
        out = torch.empty_like(i["hidden"])
        g_logits = LogitGradients(i["ids"], i["g_chosen"], s["K"])
        hidden_gradient(g_logits, None, i["weight"], out=out)
        return {"d_hidden": out}

    def all_others(i: Inputs, s: Size) -> Outputs:
        others = other_words(i["hidden"], Head(i["weight"]), i["ids"], want_slope=True)
        return {"lse": others.lse, "slope": others.slope}

    def rows_read(i: Inputs, s: Size) -> int:
        return s["T"] * s["K"] * s["D"] * i["weight"].element_size()

    common = {
        "inputs": inputs,
        "size": lambda c: {
            "T": c["sequences"] * c["length"],
            "K": c["kept"],
            "V": c["vocab_size"],
            "D": c["hidden_size"],
        },
        "odd": ({"T": 5, "K": 7, "V": 130, "D": 48}, {"T": 3, "K": 20, "V": 301, "D": 40}),
        "wide": ({"T": 131, "K": 64, "V": 10_007, "D": 1032},),
    }
    yield KernelCase(
        "gather-dot",
        **dispatched(
            lambda i, s: {"logits": chosen_logits(i["hidden"], Head(i["weight"]), i["ids"])}
        ),
        moved=lambda i, o, s: rows_read(i, s) + num_bytes(i["hidden"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_dot"),
        **common,
    )
    yield KernelCase(
        "gather-sum",
        **dispatched(gather_sum),
        moved=lambda i, o, s: rows_read(i, s) + num_bytes(i["g_chosen"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_sum"),
        slack=2.0**-9,
        **common,
    )
    yield KernelCase(
        "other words",
        **dispatched(all_others),
        # a logit of four bytes and its share are written by one kernel and read by the next
        moved=lambda i, o, s: 2 * s["T"] * s["V"] * (4 + i["hidden"].element_size()),
        flops=lambda s: 4.0 * s["T"] * s["V"] * s["D"],
        slack=2.0**-9,
        counts=False,  # mostly library matmuls
        **common,
    )


def divergence_case() -> KernelCase:
    """Return the KL divergence of two models' logits with its gradient, a few rows at a time."""

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        both = (maker.normal(size["T"], size["V"], dtype=torch.float32) for _ in range(2))
        return {**dict(zip(("teacher", "student"), both, strict=True)),
                "mask": maker.integers(4, size["T"]) > 0}  # fmt: skip

    def run(i: Inputs, s: Size) -> Outputs:
        scale, dtype = Scale(2.0, 0.5, softcap=30.0), i["student"].dtype
        found = kl_of_logits(i["teacher"], i["student"], i["mask"], scale, slope=dtype)
        return found._asdict()

    return KernelCase(
        "divergence",
        inputs=inputs,
        **dispatched(run),
        size=lambda c: {"T": -(-c["logit_rows"] // 16), "V": c["vocab_size"]},
        odd=({"T": 3, "V": 333}, {"T": 2, "V": 1000}),
        wide=({"T": 37, "V": 151_935},),
        moved=lambda i, o, s: 2 * num_bytes(i["teacher"], i["student"]) + num_bytes(o),
        slack=4e-6,
    )


def top_k_cases() -> Iterator[KernelCase]:
    """Yield the cache's pass over logits, and the selection of the top K from its blocks."""

    def with_blocks(maker: InputMaker, size: Size) -> Inputs:
        logits = maker.normal(size["T"], size["V"])
        return {"logits": logits, "blocks": summarize(logits)}

    def exact(i: Inputs, s: Size) -> Outputs:
        logits = i["logits"].double()
        values, ids = (t[:, : s["K"]] for t in logits.sort(dim=1, descending=True, stable=True))
        total = logits.logsumexp(1)
        tail = logits.scatter(1, ids, -torch.inf).logsumexp(1) - total
        return {"values": values, "ids": ids, "log_sum_exp": total, "tail_logprob": tail}

    common = {
        "size": lambda c: {"T": c["logit_rows"], "V": c["vocab_size"], "K": c["kept"]},
        "odd": ({"T": 3, "V": 333, "K": 2}, {"T": 2, "V": 1000, "K": 7}),
        "wide": ({"T": 37, "V": 151_935, "K": 64},),
        "slack": 4e-6,
        "floor": 1.0,
    }
    yield KernelCase(
        "top-k, block pass",
        inputs=lambda maker, s: {"logits": maker.normal(s["T"], s["V"])},
        **dispatched(lambda i, s: summarize(i["logits"])._asdict()),
        space=block_pass_space,
        **common,
    )
    yield KernelCase(
        "top-k, selection",
        inputs=with_blocks,
        **dispatched(lambda i, s: top_k_of_blocks(i["logits"], s["K"], i["blocks"])._asdict()),
        moved=lambda i, o, s: (
            num_bytes(i["blocks"], o) + s["T"] * s["K"] * BLOCK * i["logits"].element_size()
        ),
        exact=exact,
        counts=False,  # part of cache building, and bound by comparisons
        **common,
    )


def adamw_case() -> KernelCase:
    """Return AdamW on bfloat16, where every result must be a neighbour of the exact one."""
    rates = Rates(lr=1e-2, decay=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)

    def inputs(maker: InputMaker, size: Size) -> Inputs:
        p, g, m = (maker.normal(size["O"], size["I"], dtype=torch.float32) for _ in range(3))
        moving = Moving(*(t.bfloat16() for t in (p, g, 0.1 * m, 0.3 * m.square())))
        factors = torch.tensor([0.5, 1 - 0.9**3, (1 - 0.95**3) ** 0.5], device=maker.device)
        return {"moving": moving, "shared": factors}

    def run(i: Inputs, s: Size) -> Outputs:
        moving = i["moving"]
        stochastic_adamw_(moving, i["shared"], rates, Noise(seed=0, step=0, index=0))
        return {"p": moving.parameter, "m": moving.exp_avg, "v": moving.exp_avg_sq}

    def exact(i: Inputs, s: Size) -> Outputs:
        p, g, m, v = (tensor.double() for tensor in i["moving"])
        factor, bias1, root_bias2 = i["shared"].double()
        g = g * factor
        m = rates.beta1 * m + (1 - rates.beta1) * g
        v = rates.beta2 * v + (1 - rates.beta2) * g.square()
        change = (m / bias1) / (v.sqrt() / root_bias2 + rates.eps)
        return {"p": p - rates.decay * p - rates.lr * change, "m": m, "v": v}

    return KernelCase(
        "AdamW, stochastic rounding",
        inputs=inputs,
        **dispatched(run),
        exact=exact,
        size=_mlp_in,
        odd=({"O": 37, "I": 11}, {"O": 2, "I": 2500}),
        wide=({"O": 1027, "I": 1025},),
        slack=2.0**-7,  # one unit in the last place of bfloat16
    )


def column_cases() -> Iterator[KernelCase]:
    """Yield the two steps within a block of a converter's sweep."""

    def to_settle(maker: InputMaker, size: Size) -> Inputs:
        """Return short binary fractions: sums are exact, so no choice depends on rounding."""
        B, O, C = (size[name] for name in "BOC")

        def fractions(*shape: int, high: int, unit: float) -> Tensor:
            return (maker.integers(2 * high + 1, *shape) - high).float() * unit

        weight = fractions(B, O, high=32, unit=1 / 16) + 2.0**-10
        coupling = fractions(B, B, high=2, unit=1 / 8).fill_diagonal_(0.0)
        levels = torch.arange(C, device=maker.device).float()[:, None] / 4 - C / 8
        return {
            "weight": weight,
            "scales": 2.0 ** maker.integers(3, 1, O).float(),
            "levels": levels.expand(C, O).contiguous(),
            "target": weight + fractions(B, O, high=8, unit=1 / 16),
            "coupling": coupling,
        }

    def to_refit(maker: InputMaker, size: Size) -> Inputs:
        B, O, C = (size[name] for name in "BOC")
        levels = maker.normal(C, O, dtype=torch.float32).sort(0).values
        weight = maker.normal(B, O, dtype=torch.float32)
        return {
            "weight": weight,
            "scales": maker.uniform(1, O, low=0.1, high=1.1).half().float(),
            "levels": levels,
            "chosen": levels.gather(0, maker.integers(C, B, O)),
            "target": weight + 0.3 * maker.normal(B, O, dtype=torch.float32),
            # the curvature of a real Hessian is positive
            "coupling": 0.09 * maker.normal(B, B, dtype=torch.float32).fill_diagonal_(0.0),
            "diagonal": maker.uniform(B, low=0.5, high=1.5),
        }

    def columns_of(i: Inputs) -> Columns:
        """Return a block before its first choice; without choices it has the lowest level."""
        weight, scales, levels = i["weight"], i["scales"], i["levels"]
        chosen = i.get("chosen", levels[:1].expand_as(weight)).clone()
        return Columns(weight, weight - chosen * scales, chosen, scales, levels)

    def settle(i: Inputs, s: Size) -> Outputs:
        columns = columns_of(i)
        settle_columns(columns, i["target"].clone(), i["coupling"])
        return {"chosen": columns.chosen, "residual": columns.residual}

    def refit(i: Inputs, s: Size) -> Outputs:
        columns, target = columns_of(i), i["target"].clone()
        columns.scales = columns.scales.clone()
        refit_scale(columns, target, i["coupling"], i["diagonal"])
        return {"scales": columns.scales, "residual": columns.residual, "target": target}

    common = {
        "size": lambda c: {"B": 16, "C": 4, "O": c["intermediate_size"]},
        "odd": ({"B": 20, "O": 129, "C": 4}, {"B": 7, "O": 40, "C": 16}),
        "wide": ({"B": 16, "O": 3071, "C": 4},),
        "counts": False,  # bound by the sequential loop over columns
    }
    yield KernelCase("columns, settle", inputs=to_settle, **dispatched(settle), slack=0.0, **common)
    # scales are rounded to float16: a tie may round the other way
    yield KernelCase("columns, refit", inputs=to_refit, **dispatched(refit), slack=2e-3, **common)
