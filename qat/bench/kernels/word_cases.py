"""The kernels over the vocabulary, and those of optimizer and converter.

Shapes: T tokens, K teacher tokens kept, V vocabulary, D width, O rows, B columns of a block, C
codebook entries.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from qat.bench.kernels.case import (
    Case,
    Inputs,
    Outputs,
    Room,
    Size,
    block_pass_space,
    gather_space,
    num_bytes,
    ways,
)
from qat.kernels.adamw import Moving, Noise, Rates, stochastic_adamw_
from qat.kernels.column_sweep import refit_scale, settle_columns
from qat.kernels.head import Head, LogitGradients, chosen_logits, hidden_gradient, other_words
from qat.kernels.topk import BLOCK, summarize, top_k_of_blocks
from qat.quant.columns import Columns

RATES = Rates(lr=1e-2, decay=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)
HEAD_ODD = ({"T": 5, "K": 7, "V": 130, "D": 48}, {"T": 3, "K": 20, "V": 301, "D": 40})
HEAD_WIDE = ({"T": 131, "K": 64, "V": 10_007, "D": 1032},)


def word_cases() -> Iterator[Case]:
    """Losses, cache, optimizer and converter."""
    yield from head_cases()
    yield from top_k_cases()
    yield adamw_case()
    yield from column_cases()


def head_cases() -> Iterator[Case]:
    """The losses' passes over the head: chosen words, their gradient, and all others."""
    common = {"inputs": _head_inputs, "size": _head_size, "odd": HEAD_ODD, "wide": HEAD_WIDE}
    yield Case(
        "gather-dot",
        **ways(lambda i, s: {"logits": chosen_logits(i["hidden"], Head(i["weight"]), i["ids"])}),
        moved=lambda i, o, s: _gathered(i, s) + num_bytes(i["hidden"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_dot"),
        **common,
    )
    yield Case(
        "gather-sum",
        **ways(_gather_sum),
        moved=lambda i, o, s: _gathered(i, s) + num_bytes(i["g_chosen"], i["ids"], o),
        space=lambda s: gather_space(s, "gather_sum"),
        slack=2.0**-9,
        **common,
    )
    yield Case(
        "other words",
        **ways(_other_words),
        # a logit is written, read, and its share written and read: four bytes, then two
        moved=lambda i, o, s: s["T"] * s["V"] * (4 + i["hidden"].element_size()),
        flops=lambda s: 4.0 * s["T"] * s["V"] * s["D"],
        slack=2.0**-9,
        counts=False,  # mostly matmuls of a library
        **common,
    )


def top_k_cases() -> Iterator[Case]:
    """The cache's pass over logits, and what picks the top K from its blocks."""
    common = {
        "size": lambda c: {"T": c["logit_rows"], "V": c["vocab_size"], "K": c["kept"]},
        "odd": ({"T": 3, "V": 333, "K": 2}, {"T": 2, "V": 1000, "K": 7}),
        "wide": ({"T": 37, "V": 151_935, "K": 64},),
        "slack": 4e-6,
        "floor": 1.0,
    }
    yield Case(
        "top-k, block pass",
        inputs=lambda room, s: {"logits": room.normal(s["T"], s["V"])},
        **ways(lambda i, s: summarize(i["logits"])._asdict()),
        space=block_pass_space,
        **common,
    )
    yield Case(
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


def adamw_case() -> Case:
    """AdamW on bfloat16: every result is a neighbour of the exact one."""
    return Case(
        "AdamW, stochastic rounding",
        inputs=_adamw_inputs,
        **ways(_adamw),
        exact=_adamw_exactly,
        size=lambda c: {"O": c["intermediate_size"], "I": c["hidden_size"]},
        odd=({"O": 37, "I": 11}, {"O": 2, "I": 2500}),
        wide=({"O": 1027, "I": 1025},),
        slack=2.0**-7,  # one last bit of bfloat16
    )


def column_cases() -> Iterator[Case]:
    """The two steps inside a block of a converter's sweep."""
    common = {
        "odd": ({"B": 20, "O": 129, "C": 4}, {"B": 7, "O": 40, "C": 16}),
        "wide": ({"B": 16, "O": 3071, "C": 4},),
        "counts": False,  # bound by walking columns one after the other
    }
    size = {"B": 16, "C": 4}
    yield Case(
        "columns, settle",
        inputs=_settle_inputs,
        **ways(_settle),
        size=lambda c: {**size, "O": c["intermediate_size"]},
        slack=0.0,
        **common,
    )
    yield Case(
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
