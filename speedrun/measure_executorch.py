"""Finds where the logits of an ExecuTorch program begin to differ from ours, and what makes them.

A student is converted for ExecuTorch as measure_shipped_inputs.py does it. Then:

- a program that also gives what each linear reads and writes: on these inputs, how many levels
  would be others of ours, and how far each product is from float64; and which level is the first of
  each row that is another than in our own run;
- a program of our own formula, in ExecuTorch's operators alone, without XNNPACK;
- our own model three times: inputs rounded in XNNPACK's order of operations; every module giving
  each value off by one unit in the last place; the second half read a token at a time;
- how far the program's logits and ours are from those of inputs that are not rounded.

pip install -e '.[executorch]'
python speedrun/measure_executorch.py MODEL=TEXT.txt --figures FILE.jsonl
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from figures import record
from measure_llamacpp import compared
from measure_shipped_inputs import KIND, TARGETS, rounding_student
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from qat.export import executorch
from qat.export.dense import dense_state_dict
from qat.export.parts import float_model, logits_of
from qat.models.checkpoint import load_checkpoint
from qat.models.noise import hooked, signs
from qat.models.stored_state import quantized_modules
from qat.nn.swap import CACHE
from qat.quant.activation import HIGHEST, LOWEST, Levels, token_levels

EPS = torch.finfo(torch.float32).eps
OFF = 1e-3
"""A logit this far off tells of another level: rounding alone moved none by more than 1e-4."""


class Run(NamedTuple):
    """What a model made of all rows."""

    logits: Tensor
    """`(B, S, V)`."""
    inputs: dict[str, Tensor]
    """Of each linear, `(B, S, I)`, before they are rounded."""
    outputs: dict[str, Tensor]
    """`(B, S, O)`."""


class Watched(executorch._Cached):
    """A program that also gives what each quantized linear reads and writes."""

    def __init__(self, model: PreTrainedModel, length: int, names: list[str]) -> None:
        super().__init__(model, length)
        self.seen: list[Tensor] = []
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda _module, args, output: self.seen.extend((args[0], output))
            )

    def forward(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Logits, then input and output of each linear in the order that they run."""
        self.seen.clear()
        return (super().forward(tokens, positions), *self.seen)


def main() -> None:
    """Print what each way finds; record how exact the program's products are, and the rest."""
    with rounding_student(__doc__, TARGETS) as (arguments, student, ids):
        model = load_checkpoint(student, torch.float32)
    figures = find(model, ids)
    if arguments.figures:
        for figure, (value, unit, goal) in figures.items():
            record(arguments.figures, figure, value, unit, goal)


@torch.no_grad()
def find(model: PreTrainedModel, ids: Tensor) -> dict[str, tuple[float, str, str]]:
    """The figures: value, unit, goal."""
    ours, theirs = our_run(model, ids, our_levels), program_run(model, ids)
    assert torch.equal(ours.logits, by_row(model, ids))
    frac, error = on_same_inputs(model, theirs)
    first_levels(ours, theirs)
    exact = by_row(floats(model), ids)
    say("the program", theirs.logits, ours.logits)
    far = say("  from inputs that are not rounded", theirs.logits, exact)
    own = say("  ours from these", ours.logits, exact)
    logits = without_xnnpack(model, ids)
    portable = say("without XNNPACK", logits, ours.logits)
    say("ours in XNNPACK's order", our_run(model, ids, xnnpack_levels).logits, ours.logits)
    with hooked(leaves(model), off_by(EPS)):
        moved = say("ours, every module off by a unit", by_row(model, ids), ours.logits)
    half = ids.shape[1] // 2
    stepped = torch.cat([by_token(model, row[None]) for row in ids])
    steps = say("ours, a token at a time", stepped[:, half:], ours.logits[:, half:])
    return {
        "executorch_level_diff": (frac, "fraction", "<= 1e-5"),
        "executorch_product_error": (error, "fraction", "<= 1e-6"),
        "executorch_portable_kl": (portable[1], "nats", "stated"),
        "a8_module_ulp_kl": (moved[1], "nats", "stated"),
        "a8_module_ulp_top1": (moved[2], "fraction", "stated"),
        "a8_by_token_top1": (steps[2], "fraction", "stated"),
        "executorch_float_inputs_kl": (far[1], "nats", "stated"),
        "a8_float_inputs_kl": (own[1], "nats", "stated"),
    }


def xnnpack_levels(x: Tensor) -> Levels:
    """Each token of `x` `(..., I)` float32 as XNNPACK rounds it: it divides once, by the range."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    span = torch.tensor(float(HIGHEST - LOWEST))  # a number over a tensor is no one division
    inverse = torch.where(low == high, 1.0, span / (high - low))
    below, above = LOWEST + low * inverse, HIGHEST + high * inverse
    zero = torch.where(below + above > 0, LOWEST - low * inverse, HIGHEST - high * inverse)
    zero = zero.clamp(LOWEST, HIGHEST).round()
    levels = ((x * inverse).round() + zero).clamp(LOWEST, HIGHEST)
    return Levels(levels, inverse.reciprocal(), zero)


def others(ours: Levels, theirs: Levels) -> Tensor:
    """Where levels are others, counted from their zero points; bool, `(..., I)`."""
    return (ours.levels - ours.zero) != (theirs.levels - theirs.zero)


def our_levels(x: Tensor) -> Levels:
    """As training, torchao and the student have them."""
    return token_levels(x, KIND)


def floats(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with the same weights, whose inputs are not rounded."""
    return float_model(model, dense_state_dict(model, torch.float32), torch.float32)


def our_run(model: PreTrainedModel, ids: Tensor, levels: Callable[[Tensor], Levels]) -> Run:
    """That of torch, a row at a time, inputs rounded by `levels`."""
    copy, seen = floats(model), {name: ([], []) for name in quantized_modules(model)}
    for name, (inputs, outputs) in seen.items():
        linear = copy.get_submodule(name)

        def rounded(_module: nn.Module, args: tuple, inputs: list = inputs) -> tuple[Tensor]:
            inputs.append(args[0])
            return (levels(args[0]).values(),)

        linear.register_forward_pre_hook(rounded)
        linear.register_forward_hook(lambda _m, _a, output, to=outputs: to.append(output))
    logits = by_row(copy, ids)
    inputs, outputs = ({name: torch.cat(s[i]) for name, s in seen.items()} for i in (0, 1))
    return Run(logits, inputs, outputs)


def program_run(model: PreTrainedModel, ids: Tensor) -> Run:
    """That of the program which the export writes, with what its linears read and wrote."""
    copy, modules = floats(model), quantized_modules(model)
    for name, module in modules.items():
        tensor = executorch._tensor(name, module)
        copy.get_submodule(name).weight = nn.Parameter(tensor, requires_grad=False)
    program = executorch._lowered(Watched(copy, ids.shape[1], list(modules)))
    parts = [torch.cat(part) for part in zip(*executed(program, ids), strict=True)]
    inputs, outputs = parts[1::2], parts[2::2]
    return Run(
        parts[0],
        dict(zip(modules, inputs, strict=True)),
        dict(zip(modules, outputs, strict=True)),
    )


def without_xnnpack(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of a program in which our own formula rounds, of ExecuTorch's operators alone."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    copy, few = floats(model), torch.arange(2)
    for name in quantized_modules(model):
        copy.get_submodule(name).register_forward_pre_hook(
            lambda _module, args: (our_levels(args[0]).values(),)
        )
    cached = executorch._Cached(copy, ids.shape[1]).eval()
    count = torch.export.Dim("count", min=1, max=cached.length)
    shapes = ({1: count}, {0: count})
    plain = torch.export.export(cached, (few[None], few), dynamic_shapes=shapes, strict=False)
    checks = EdgeCompileConfig(_check_ir_validity=False)
    lowered = to_edge_transform_and_lower(plain, compile_config=checks)
    return torch.cat([out[0] for out in executed(lowered.to_executorch().buffer, ids)])


def executed(program: bytes, ids: Tensor) -> list[list[Tensor]]:
    """What a program gives for each row, read as one prompt."""
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(program)
    forward, positions = loaded.load_method("forward"), torch.arange(ids.shape[1])
    return [[out.clone() for out in forward.execute([row[None], positions])] for row in ids]


def on_same_inputs(model: PreTrainedModel, theirs: Run) -> tuple[float, float]:
    """The share of levels that ours differ in, and the largest error of a product.

    The second is that of the product with levels in XNNPACK's order, against float64, of the
    largest value of its token.
    """
    count = differ = 0
    worst = 0.0
    for name, module in quantized_modules(model).items():
        x, found = theirs.inputs[name], xnnpack_levels(theirs.inputs[name])
        differ += others(our_levels(x), found).sum().item()
        count += x.numel()
        shifted = (found.levels - found.zero).double() * found.scale.double()
        exact = shifted @ module.quantized_weight().double().T
        error = (theirs.outputs[name].double() - exact).abs().amax(-1) / exact.abs().amax(-1)
        worst = max(worst, error.max().item())
    print(
        f"the program's own inputs: {differ} of {count} levels are others in our order; products "
        f"are within {worst:.2g} of the largest value of a token"
    )
    return differ / count, worst


def first_levels(ours: Run, theirs: Run) -> None:
    """Print where in each row, and in which linear, the first level is another, and why."""
    differ = {
        name: others(our_levels(x), xnnpack_levels(theirs.inputs[name])).sum(-1)
        for name, x in ours.inputs.items()
    }
    counts = torch.stack(list(differ.values()))  # (linears, B, S)
    places: list[tuple[int, int]] = []
    linears, formula = Counter(), 0
    for row, is_other in enumerate(counts.any(0)):
        if not is_other.any():
            continue
        place = int(is_other.nonzero()[0])
        name = next(name for name, count in differ.items() if count[row, place])
        x, other = (run.inputs[name][row, place] for run in (ours, theirs))
        formula += others(our_levels(other), xnnpack_levels(other)).any().item()
        places.append((place, row))
        linears[name.partition("layers.")[2]] += 1
        error = ((x - other).norm() / other.norm()).item()
        print(f"  row {row}: token {place}, {name}, whose input differs by {error:.2g} of itself")
    mean = sum(place for place, _ in places) / max(len(places), 1)
    print(
        f"first level that is another: at token {mean:.3g} of a row on average, in "
        f"{dict(linears)}; {formula} times by the formula, else by the input"
    )
    if places:
        place, row = max(places)
        grown = [
            f"{((x - theirs.inputs[name])[row, place].norm() / x[row, place].norm()).item():.1g}"
            for name, x in ours.inputs.items()
            if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj"))
        ]
        print(f"  how far inputs are from ours at that token of row {row}: {' '.join(grown)}")
    count = sum(x.numel() for x in ours.inputs.values())
    print(f"  levels that are others, in all rows: {counts.sum().item() / count:.2%}")


def by_row(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits `(B, S, V)`, a row at a time."""
    return torch.cat([logits_of(model, row[None]) for row in ids])


def by_token(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Logits `(1, S, V)`: half of the row at once, the rest a token at a time."""
    cache, half = DynamicCache(), row.shape[1] // 2
    parts = [row[:, :half], *row[:, half:].split(1, dim=1)]
    return torch.cat(
        [model(input_ids=part, use_cache=True, **{CACHE: cache}).logits for part in parts],
        dim=1,
    )


def leaves(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that compute a step of the model: linears, norms, activations, the embedding."""
    linears = quantized_modules(model)
    return [
        module
        for name, module in model.named_modules()
        if name in linears or not (name.rpartition(".")[0] in linears or list(module.children()))
    ]


def off_by(eps: float) -> Callable:
    """A hook that puts each value of a tensor off by `eps` of it, up or down."""
    generator = torch.Generator().manual_seed(0)

    def off(_module: nn.Module, _args: tuple, output: Tensor | tuple) -> Tensor | tuple:
        is_bare = isinstance(output, Tensor)
        return output * (1 + eps * signs(output, generator)) if is_bare else output

    return off


def say(name: str, found: Tensor, expected: Tensor) -> tuple[float, float, float]:
    """Print and give the largest difference, the KL, and the share of the same likeliest token."""
    most = (found - expected).abs().amax(-1)
    kl, agrees = compared(expected, found)
    first = [int(row.int().argmax()) if row.any() else len(row) for row in most > OFF]
    print(
        f"{name}: up to {most.max().item():.3g}, KL {kl:.3g} nats, the same likeliest token in "
        f"{agrees:.2%}; rows differ from token {sum(first) / len(first):.3g} on, on average",
        flush=True,
    )
    return most.max().item(), kl, agrees


if __name__ == "__main__":
    main()
