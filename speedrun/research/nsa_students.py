"""What the scripts about the quality of sparse attention share: texts as rows, and distillation.

Shapes: B rows, S positions, V vocabulary.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.convert.calibrate import TokenBatch
from qat.models.language_model import LanguageModel
from qat.nsa.fit import natural_size
from qat.quant.weight import rms

PAIRS = (("question", "answer"), ("instruction", "output"), ("prompt", "completion"))
"""Fields of a row that hold what is asked and what is answered."""
LR_GATES = 3e-3
"""Of gates and pooling weights, relative to their natural size."""
WARM_UP = 20
EVAL_ROWS = 4
"""Rows of held-out text whose logits exist together."""


@dataclass(frozen=True)
class Divergence:
    """Means over held-out positions, nats."""

    kl: float
    """KL(teacher || student)."""
    kl_beyond: float
    """The same of the positions that sparse attention does not read all keys for."""
    teacher_ce: float
    """The teacher's cross-entropy: whether the text is one that it knows."""


def chat_rows(
    paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> Tensor:
    """`(count, length)`: conversations of as many turns as fill a row, cut at its end.

    Raises:
        SystemExit: the texts do not fill so many rows.
    """
    rows, turns = [], []
    sources = [_pairs(path) for path in paths]
    while sources and len(rows) < count:
        source = sources[len(rows) % len(sources)]
        pair = next(source, None)
        if pair is None:
            sources.remove(source)
            continue
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if len(text) < length:  # hardly any token is shorter than a character
            continue
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) >= length:
            rows.append(ids[:length])
            turns = []
    if len(rows) < count:
        raise SystemExit(f"the texts fill {len(rows)} rows of {length} tokens, expected {count}")
    return torch.tensor(rows)


def _pairs(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if path.suffix == ".json" else map(json.loads, text.splitlines())
    for row in rows:
        asked, answered = next(pair for pair in PAIRS if pair[0] in row)
        yield " ".join(filter(None, (row[asked], row.get("input", "")))), row[answered]


def token_batches(rows: Tensor, size: int) -> list[TokenBatch]:
    """Rows of one document each, `size` at a time."""
    positions = torch.arange(rows.shape[1], device=rows.device)
    return [TokenBatch(ids, positions.expand(len(ids), -1)) for ids in rows.split(size)]


def log_probs(model: LanguageModel, batch: TokenBatch) -> Tensor:
    """`(B, S, V)` float32."""
    hidden = model.hidden(*batch, is_packed=False)
    return model.logits(hidden).float().log_softmax(-1)


@torch.no_grad()
def divergence(
    student: LanguageModel, teacher: LanguageModel, rows: Tensor, reach: int
) -> Divergence:
    """Compare the two on held-out rows."""
    sums = torch.zeros(3, dtype=torch.float64, device=rows.device)
    for batch in token_batches(rows, EVAL_ROWS):
        log_p, log_q = log_probs(teacher, batch), log_probs(student, batch)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        labels = batch.input_ids[:, 1:, None]
        ce = -log_p[:, :-1].gather(-1, labels)
        sums += torch.stack([kl.mean(), kl[:, reach:].mean(), ce.mean()]).double() * len(kl)
    return Divergence(*(sums / len(rows)).tolist())


def distil(
    student: LanguageModel,
    teacher: LanguageModel,
    rows: Tensor,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    note: Callable[[int, float], None] = lambda step, kl: None,
    seed: int = 0,
) -> float:
    """Train every parameter of `student` on the exact KL to `teacher`; seconds that it took.

    AdamW, cosine to zero; `note(step, kl)` is called twenty times.
    """
    optimizer = torch.optim.AdamW(groups(student, lr), betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, steps))
    order = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(rows), (batch_size,), generator=order).to(rows.device)
        (batch,) = token_batches(rows[chosen], batch_size)
        with torch.no_grad():
            log_p = log_probs(teacher, batch)
        log_q = log_probs(student, batch)
        loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            note(step + 1, loss.item())
    return time.perf_counter() - began


def groups(student: LanguageModel, lr: float) -> list[dict[str, object]]:
    """Every parameter at a rate relative to its size; what sparse attention adds at its own."""
    found = []
    for name, parameter in student.model.named_parameters():
        is_gate = ".nsa." in name
        size = natural_size(name, parameter) if is_gate else rms(parameter)
        found.append({"params": [parameter], "lr": (LR_GATES if is_gate else lr) * size})
    return found


def lr_share(step: int, steps: int) -> float:
    """Of the peak: linear up, then a cosine to zero."""
    warm_up = min(WARM_UP, steps // 4 + 1)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
