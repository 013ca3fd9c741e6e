"""The angle between the gradient of the full KL and those of what a teacher cache can hold.

    qat convert DIR --to q2a4 --calibration FILE --out q2a4
    python speedrun/research/measure_gradient_angle.py --teacher DIR --student q2a4 --text FILE \
        --out angles.jsonl --figures figures.jsonl

The gradient is the whole one of all quantized weights, summed over a batch of 64 x 64 tokens, and
the angle the mean over 5 batches; beside it the mean angle between the gradients of single tokens'
last hidden states. Draws are the product's, all sizes of a token from one random number; K tokens
are the likeliest of many.

Shapes: T tokens, K teacher tokens kept, N draws of a token.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from cyclopts import App
from research_records import record
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.data.codec import draw
from qat.data.packing import Packer, position_ids
from qat.data.sources import open_source
from qat.data.text import encode, end_token, render
from qat.logs import progress
from qat.losses.formulas import NO_LABEL, Targets
from qat.losses.from_hidden import loss_from_hidden
from qat.losses.from_teacher import OnlineTargets, loss_from_teacher
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_teacher, load_tokenizer
from qat.nn.step import form_weights, quant_linears
from qat.nn.swap import to_latent

app = App(help=__doc__)
LENGTH = 64
DEFAULT_DRAWS = 50
ROWS = 1024
"""Tokens whose whole distribution exists at a time."""


class Target(NamedTuple):
    """One way to say what the teacher said."""

    loss: str
    size: int
    """Draws of a token, or K."""
    temperature: float = 1.0


SIZES = (4, 16, 64, 128, 256)
TARGETS = [
    *(Target("sampled", draws) for draws in (12, 25, DEFAULT_DRAWS, 100, 200)),
    *(Target("tail", K) for K in SIZES),
    *(Target("candidates", K, T) for T in (1.0, 2.0) for K in SIZES),
]


class Words(NamedTuple):
    """More of the teacher's word on T tokens than any target takes of it."""

    ids: Tensor
    """`(T, K)`, most likely first."""
    logprobs: Tensor
    """`(T, K)`, nats."""
    tail: Tensor
    """`(T,)`: log of the mass of all other words."""
    draws: dict[int, Tensor]
    """By N: `(T, N)`, ascending."""

    def targets(self, target: Target, mask: Tensor) -> Targets:
        """What a cache made for `target` would hold."""
        K = target.size if target.loss != "sampled" else 0
        draws = self.ids[:, :0] if K else self.draws[target.size]
        rest = torch.cat([self.logprobs[:, K:], self.tail[:, None]], 1)
        return Targets(
            mask=mask,
            labels=torch.full_like(mask, NO_LABEL, dtype=torch.int64),
            topk_ids=self.ids[:, :K],
            topk_logprobs=self.logprobs[:, :K],
            tail_logprob=rest.logsumexp(1),
            sample_ids=draws,
            sample_counts=torch.ones_like(draws, dtype=torch.float32),
        )


class Angles(NamedTuple):
    """How far one target's gradient is from the full one, on one batch."""

    weights_deg: float
    """Between the gradients of all quantized weights."""
    norm_ratio: float
    """Length of the target's gradient over that of the full one."""
    hidden_deg: float
    """Between the gradients of a token's last hidden state, the mean over tokens."""


@app.default
def measure(
    *,
    teacher: str,
    student: str,
    text: str,
    sequences: int = 64,
    batches: int = 5,
    device: str = "auto",
    out: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Print every target's angles, write them to OUT, and `sampled_gradient_angle_deg`."""
    models = (
        load_model(student, device=device, dtype="fp32"),
        load_teacher(teacher, device=device, dtype="fp32"),
    )
    prepare(models[0])
    torch.manual_seed(0)
    found: dict[Target, list[Angles]] = {target: [] for target in TARGETS}
    with progress("comparing gradients", batches * len(TARGETS), "gradients") as ticker:
        tokens = sequences_of(text, load_tokenizer(teacher), sequences)
        for batch in itertools.islice(tokens, batches):
            for target, angles in compare(*models, batch):
                found[target].append(angles)
                ticker.advance()
    rows = [summary(target, angles, sequences * LENGTH) for target, angles in found.items()]
    for row in rows:
        print(json.dumps(row))
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if figures is not None:
        row = rows[TARGETS.index(Target("sampled", DEFAULT_DRAWS))]
        record(
            figures,
            "sampled_gradient_angle_deg",
            round(row["weights_deg"], 2),
            "degrees",
            "<= 5",
            runs=row["batches"],
            spread=row["weights_deg_spread"],
        )


def sequences_of(
    text: str, tokenizer: PreTrainedTokenizerBase, sequences: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Ids, positions and mask of packed documents, batch by batch."""
    packer = Packer(LENGTH, end_token(tokenizer), lookahead=sequences)
    for document in open_source(text).documents:
        for ids, _ in encode(render(document, tokenizer, "none"), tokenizer):
            packer.push(ids)
        while packer.num_full >= sequences:
            packed = packer.take(sequences)
            ids, starts, mask = map(torch.from_numpy, packed[:3])
            yield ids.long(), position_ids(starts), mask


def prepare(student: LanguageModel) -> None:
    """Let all quantized weights get their gradient, the straight-through one, and nothing else."""
    to_latent(student.model, [*quant_linears(student.model)])
    student.model.requires_grad_(False)
    for linear in quant_linears(student.model).values():
        linear.weight.requires_grad_(True)
    form_weights(student.model, torch.float32)


def compare(
    student: LanguageModel, teacher: LanguageModel, batch: tuple[Tensor, Tensor, Tensor]
) -> Iterator[tuple[Target, Angles]]:
    """Each target's gradient against that of the full KL, on one batch."""
    ids, positions, mask = (tensor.to(student.device) for tensor in batch)
    with torch.no_grad():
        states = teacher.hidden(ids, positions).flatten(0, 1)
    hidden, mask = student.hidden(ids, positions), mask.flatten()
    leaf = hidden.detach().flatten(0, 1).requires_grad_()
    head = student.head_in(torch.float32)
    whole = OnlineTargets(
        mask, torch.full_like(ids.flatten(), NO_LABEL), states, teacher.head_in(torch.float32)
    )
    exact = loss_from_teacher(leaf, head, whole, {"kl": 1.0})["loss"]
    (of_hidden,) = torch.autograd.grad(exact, leaf)
    of_weights = weight_gradients(student, hidden, of_hidden)
    words = words_of(teacher, states)
    for target in TARGETS:
        targets = words.targets(target, mask)
        terms, temperature = {target.loss: 1.0}, target.temperature
        loss = loss_from_hidden(leaf, head, targets, terms, temperature=temperature)["loss"]
        (gradient,) = torch.autograd.grad(loss, leaf)
        cosine, ratio = against(weight_gradients(student, hidden, gradient), of_weights)
        per_token = torch.cosine_similarity(gradient[mask].double(), of_hidden[mask].double())
        yield target, Angles(degrees(cosine).item(), ratio, degrees(per_token).mean().item())


@torch.no_grad()
def words_of(teacher: LanguageModel, states: Tensor) -> Words:
    """The likeliest words of each token, and draws from all of them."""
    most = max(target.size for target in TARGETS if target.loss != "sampled")
    sizes = {target.size for target in TARGETS if target.loss == "sampled"}
    uniforms = torch.rand(len(states), dtype=torch.float64, device=states.device)
    parts, draws = [], {size: [] for size in sizes}
    for rows, numbers in zip(states.split(ROWS), uniforms.split(ROWS), strict=True):
        logits = teacher.logits(rows)
        log_p = logits.float().log_softmax(1)
        kept, ids = log_p.topk(most, dim=1)
        parts.append((ids, kept, log_p.scatter(1, ids, -torch.inf).logsumexp(1)))
        for size, drawn in draws.items():
            drawn.append(draw(logits, numbers, size))
    together = {size: torch.cat(drawn) for size, drawn in draws.items()}
    return Words(*map(torch.cat, zip(*parts, strict=True)), together)


def weight_gradients(student: LanguageModel, hidden: Tensor, gradient: Tensor) -> list[Tensor]:
    """What a gradient of the last hidden states means for every quantized weight."""
    hidden.backward(gradient.view_as(hidden), retain_graph=True)
    weights = [linear.weight for linear in quant_linears(student.model).values()]
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    return found


def against(gradients: list[Tensor], exact: list[Tensor]) -> tuple[Tensor, float]:
    """Cosine of the angle between two gradients in parts, and the ratio of their lengths."""

    def dot(some: list[Tensor], others: list[Tensor]) -> Tensor:
        pairs = zip(some, others, strict=True)
        return torch.stack([(a.double() * b.double()).sum() for a, b in pairs]).sum()

    lengths = dot(gradients, gradients).sqrt(), dot(exact, exact).sqrt()
    return dot(gradients, exact) / (lengths[0] * lengths[1]), (lengths[0] / lengths[1]).item()


def degrees(cosine: Tensor) -> Tensor:
    """The angle of a cosine that rounding may have put outside [-1, 1]."""
    return cosine.clamp(-1.0, 1.0).acos() * (180.0 / math.pi)


def summary(target: Target, angles: list[Angles], batch_tokens: int) -> dict[str, object]:
    """One line of results: means over batches, and their spread."""
    if not angles:
        raise SystemExit(f"the text holds no {batch_tokens} tokens; give a longer one")
    columns = {name: [getattr(a, name) for a in angles] for name in Angles._fields}
    means = {name: round(statistics.mean(values), 4) for name, values in columns.items()}
    spread = statistics.stdev(columns["weights_deg"]) if len(angles) > 1 else None
    return {
        **target._asdict(),
        **means,
        "weights_deg_spread": spread and round(spread, 4),
        "batches": len(angles),
        "batch_tokens": batch_tokens,
    }


if __name__ == "__main__":
    app()
