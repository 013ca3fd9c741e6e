"""Measures how well gradients of and through adapters agree with a dense float64 reference.

The reference is the same small Qwen3 model with two plain matmuls beside each dense weight, by
autograd. Compared are, in every linear, the gradients of its input, of `lora_in` and of `lora_out`,
in float32, with the linears used alone, formed once a step, and joined (as a GPU trains).

python speedrun/research/measure_lora.py --figures FILE.jsonl
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from research_records import record
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from qat.backend.device import select
from qat.bench.student import quantize_at_random_
from qat.models.language_model import LanguageModel
from qat.models.regions import join_projections
from qat.nn.quant_linear import QuantLinear
from qat.nn.step import JoinedLinears, form_weights, quant_linears
from qat.nn.swap import add_adapters, linear_names, replace_module
from qat.quant.lora import LORA_NAMES, Lora
from qat.quant.spec import PRESETS
from qat.quant.weight import dequantize

GOAL = 0.9999
RANK = 16
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BATCH, LENGTH = 4, 64

Gradients = dict[tuple[str, str], Tensor]
"""By name of the linear and what the gradient is of."""


def main() -> None:
    """Print the worst cosine of every way and kind, and record the worst of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    device = select(arguments.device).device
    worst = [measure(seed, device) for seed in range(arguments.seeds)]
    value = min(worst)
    print(f"worst of {len(worst)} seeds: {value:.9f}")
    if arguments.figures:
        goal = f">= {GOAL}"
        record(arguments.figures, "lora_gradient_cosine", value, "cosine", goal, runs=len(worst))
    raise SystemExit(value < GOAL)


def measure(seed: int, device: torch.device) -> float:
    """The lowest cosine over all ways, linears and kinds of gradient."""
    torch.manual_seed(seed)
    student = adapted_student(seed)
    ids = torch.randint(SHAPE["vocab_size"], (BATCH, LENGTH + 1))
    exact = gradients(as_dense(student), ids, (DenseAdapter,))
    lowest = []
    for way, prepare in WAYS.items():
        model = copy.deepcopy(student).to(device)
        prepare(model)
        found = gradients(model, ids.to(device), (QuantLinear, JoinedLinears))
        # a joined linear's input is that of its first member
        missing = {key for key in exact.keys() - found.keys() if key[1] != "input"}
        assert not missing, f"{way} has no gradient of {sorted(missing)}"
        for kind in ("input", *LORA_NAMES):
            cosines = [cosine(found[key], exact[key]) for key in found if key[1] == kind]
            lowest.append(min(cosines))
            print(f"seed {seed}  {way:7s} {kind:8s} {len(cosines):3d} linears  {lowest[-1]:.9f}")
    return min(lowest)


def adapted_student(seed: int) -> PreTrainedModel:
    """A model of random two- and four-bit codes, with adapters a third as large as the weights."""
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
    quantize_at_random_(model, PRESETS["q2a4"])
    add_adapters(model, linear_names(model), RANK, seed)
    with torch.no_grad():
        for linear in quant_linears(model).values():
            linear.lora_out.normal_(0, linear.lora_size() / 3)
    return model


class DenseAdapter(nn.Module):
    """A dense weight and, beside it, an adapter as everybody writes it."""

    def __init__(self, weight: Tensor, lora: Lora) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.lora_out, self.lora_in = map(nn.Parameter, lora)

    def forward(self, x: Tensor) -> Tensor:
        """`x @ W.T + (x @ lora_in.T) @ lora_out.T`."""
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_in), self.lora_out)


def as_dense(student: PreTrainedModel) -> PreTrainedModel:
    """The reference in float64 (transformers computes norms and angles in float32 in any model)."""
    dense = copy.deepcopy(student)
    for name, linear in quant_linears(student).items():
        replace_module(dense, name, DenseAdapter(dequantize(linear.quantized()), linear.lora()))
    return dense.double()


def form(model: PreTrainedModel) -> None:
    """As in a training step."""
    form_weights(model, torch.float32)


def join(model: PreTrainedModel) -> None:
    """As in a compiled training step."""
    join_projections(model)
    form(model)


WAYS: dict[str, Callable[[PreTrainedModel], None]] = {
    "alone": lambda _: None,
    "formed": form,
    "joined": join,
}


def gradients(model: PreTrainedModel, ids: Tensor, kinds: tuple[type, ...]) -> Gradients:
    """Gradients of the next words' cross-entropy in every linear of `kinds`."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    positions = torch.arange(LENGTH, device=ids.device).expand(BATCH, -1)
    language_model = LanguageModel(model)
    with watched_inputs(model, kinds) as seen:
        hidden = language_model.hidden(inputs, positions)
        logits = language_model.head(hidden)
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = {(name, "input"): x.grad for name, x in seen.items()}
    for name, parameter in model.named_parameters():
        owner, _, local = name.rpartition(".")
        if local in LORA_NAMES:
            found[owner, local] = parameter.grad
    return found


@contextmanager
def watched_inputs(model: PreTrainedModel, kinds: tuple[type, ...]) -> Iterator[dict[str, Tensor]]:
    """The input of each module of `kinds` that runs, kept with its gradient."""
    seen: dict[str, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def watch(module: nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].retain_grad()
        first = module.linears[0] if isinstance(module, JoinedLinears) else module
        seen[names[first]] = inputs[0]

    modules = [module for module in model.modules() if isinstance(module, kinds)]
    hooks = [module.register_forward_pre_hook(watch) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def cosine(found: Tensor, exact: Tensor) -> float:
    """Of two gradients as vectors, in float64."""
    return F.cosine_similarity(found.cpu().double().flatten(), exact.flatten(), dim=0).item()


if __name__ == "__main__":
    main()
