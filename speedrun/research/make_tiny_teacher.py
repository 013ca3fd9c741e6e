"""Train the embedded teacher: a small Qwen3 on the English text that ships with every Python.

    python speedrun/research/make_tiny_teacher.py --out checkpoints/tiny-qwen3
    python speedrun/research/make_tiny_teacher.py again checkpoints/tiny-qwen3 --figures FILE.jsonl
    python speedrun/research/make_tiny_teacher.py freeze qat/data/stdlib.jsonl.gz

Documents that `qat cache` would hold out (same hash, same seed) are never trained on: they choose
the epoch that is kept and give the perplexity in the README. Runs on CUDA and on CPU.

Shapes: N rows, L tokens a row.
"""

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter
from pydantic import Field
from research_records import record
from teacher_model import (
    HEAD_DIM,
    Shape,
    judge,
    learning_rate,
    loss_sum,
    new_qwen3,
    parameter_groups,
)
from tiny_teacher_text import (
    Corpus,
    as_chat,
    encode,
    freeze,
    pack,
    read_corpus,
    stdlib_documents,
    train_tokenizer,
)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from qat.backend import device as backend
from qat.backend.base import Backend
from qat.config import Settings
from qat.data.packing import NO_LABEL

README = Path(__file__).with_name("tiny_teacher_readme.md")


class TeacherConfig(Settings):
    """The shape of the tiny teacher and the settings of its training."""

    hidden: int = Field(256, ge=64, multiple_of=128)
    """Model width; heads are 64 wide."""
    layers: int = Field(6, ge=1)
    """Transformer blocks."""
    vocab: int = Field(4096, ge=512)
    """Entries of the tokenizer, special tokens included."""
    row: int = Field(512, ge=16)
    """Tokens a row: documents are packed end to end and never attend to each other."""
    rows: int = Field(16, ge=1)
    """Rows a step."""
    epochs: int = Field(40, ge=1)
    """Passes over the training documents."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate: 5 % warm-up, then a cosine to zero."""
    weight_decay: float = Field(1.5, ge=0)
    """AdamW's decay of matrices; high, because the text is short."""
    dropout: float = Field(0.2, ge=0, lt=1)
    """Dropout of what each attention and MLP adds to the residual stream."""
    chat_frac: float = Field(0.25, ge=0, le=1)
    """Share of documents seen as a chat: the first line asked, the rest answered."""
    seed: int = 0
    """Seed of initial weights, order and dropout."""
    max_steps: int | None = None
    """Stop after so many steps (a trial); the schedule ends there."""
    max_minutes: float = Field(60, gt=0)
    """The schedule reaches its end after so many minutes at the latest."""
    device: str = "auto"
    """Device to train on: auto, cpu or cuda."""


@dataclass
class Log:
    """The log of a training: one row per evaluation, and the weights of the best one."""

    rows: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    def add(self, model: nn.Module, row: dict[str, float]) -> None:
        """Append a row; keep the weights if no earlier row was as good."""
        if all(row["held_out_nats"] < other["held_out_nats"] for other in self.rows):
            self.best = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        self.rows.append(row)

    def best_row(self) -> dict[str, float]:
        """The row of the lowest held-out loss."""
        return min(self.rows, key=lambda row: row["held_out_nats"])


def epoch_batches(
    plain: list[list[int]], chats: list[list[int]], config: TeacherConfig, epoch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The steps of one epoch: documents in a new order, a share of them as chats."""
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + epoch)
    is_chat = torch.rand(len(plain), generator=generator) < config.chat_frac
    order = torch.randperm(len(plain), generator=generator).tolist()
    packed = pack([chats[i] if is_chat[i] else plain[i] for i in order], config.row)
    for rows in torch.randperm(len(packed[0]), generator=generator).split(config.rows):
        yield tuple(tensor[rows] for tensor in packed)


# ---- model


def build_model(config: TeacherConfig, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with tied embeddings, random weights from the seed, and residual dropout."""
    hidden = config.hidden
    kv_heads = max(1, hidden // HEAD_DIM // 2)
    shape = Shape(config.vocab, hidden, 3 * hidden, config.layers, kv_heads)
    return new_qwen3(shape, tokenizer, dropout=config.dropout, seed=config.seed)


@torch.no_grad()
def held_out_nats(
    model: nn.Module, packed: tuple[Tensor, ...], config: TeacherConfig, device: Backend
) -> float:
    """Mean cross-entropy over the held-out labels, in nats a token."""
    model.eval()
    batches = zip(*(tensor.split(config.rows) for tensor in packed), strict=True)
    total = sum(loss_sum(model, batch, device).item() for batch in batches)
    model.train()
    return total / (packed[2] != NO_LABEL).sum().item()


# ---- training


class Trainer:
    """One training run: model, optimizer, schedule and clock."""

    def __init__(self, model: Qwen3ForCausalLM, config: TeacherConfig, total_steps: int) -> None:
        self.config = config
        self.device = backend.select(config.device)
        self.model = model.to(self.device.device).train()
        groups = parameter_groups(model, config.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.total_steps = total_steps
        self.step_count = 0
        self.start = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def done_frac(self) -> float:
        """Return the finished part of the schedule, by steps or by minutes, whichever is larger."""
        by_time = self.seconds() / 60 / self.config.max_minutes
        return max(self.step_count / self.total_steps, by_time)

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """One optimizer step; the mean loss in nats a token, detached."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.lr, self.done_frac())
        loss = loss_sum(self.model, batch, self.device) / (batch[2] != NO_LABEL).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1
        return loss.detach()

    def epoch(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
        """The mean training loss of one epoch, cut short where the schedule ends."""
        losses = []
        for batch in batches:
            if self.done_frac() >= 1:
                break
            losses.append(self.step(batch))
        return torch.stack(losses).mean().item() if losses else math.nan


def train(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, config: TeacherConfig
) -> tuple[Qwen3ForCausalLM, Log]:
    """Train, judge each epoch on the held-out documents, and keep the best weights."""
    plain = encode(tokenizer, corpus.train)
    chats = encode(tokenizer, [as_chat(d) if "\n" in d else d for d in corpus.train])
    held_out = pack(encode(tokenizer, corpus.held_out), config.row)
    steps_an_epoch = sum(1 for _ in epoch_batches(plain, chats, config, 0))
    total = config.max_steps or config.epochs * steps_an_epoch
    trainer, log = Trainer(build_model(config, tokenizer), config, total), Log()
    for epoch in range(math.ceil(total / steps_an_epoch)):
        train_nats = trainer.epoch(epoch_batches(plain, chats, config, epoch))
        if math.isnan(train_nats):
            break
        row = {"epoch": epoch + 1, "step": trainer.step_count, "train_nats": train_nats}
        row["held_out_nats"] = held_out_nats(trainer.model, held_out, config, trainer.device)
        log.add(trainer.model, row | {"seconds": trainer.seconds()})
        print(json.dumps({k: round(v, 4) for k, v in log.rows[-1].items()}), file=sys.stderr)
    trainer.model.load_state_dict(log.best)
    return trainer.model, log


# ---- result


def command(config: TeacherConfig) -> str:
    """Return the command that makes this teacher again, with every setting spelled out."""
    values = config.model_dump(exclude_none=True, exclude={"device", "max_minutes"})
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]
    return " ".join(
        ["python speedrun/research/make_tiny_teacher.py --out checkpoints/tiny-qwen3", *flags]
    )


def readme(figures: dict, corpus: Corpus, log: Log, config: TeacherConfig) -> str:
    """The README of the checkpoint: what it is, how good, and how it came about."""
    row = "| {epoch} | {step} | {train_nats:.4f} | {held_out_nats:.4f} | {seconds:.0f} |"
    table = "\n".join(row.format(**values) for values in log.rows)
    return README.read_text(encoding="utf-8").format(
        **figures,
        vocab=config.vocab,
        train_documents=len(corpus.train),
        hash=corpus.hash,
        seed=config.seed,
        device=backend.select(config.device).name(),
        torch=torch.__version__,
        seconds=log.rows[-1]["seconds"],
        best_epoch=log.best_row()["epoch"],
        epochs=log.rows[-1]["epoch"],
        command=command(config),
        table=table,
    )


DEFAULTS = TeacherConfig()
app = App(help=__doc__.splitlines()[0])


@app.default
def main(
    *,
    out: Path,
    config: Annotated[TeacherConfig, Parameter(name="*")] = DEFAULTS,
) -> None:
    """Train a teacher and write it to OUT with a README that says how good it is.

    Args:
        out: directory of the checkpoint.
        config: shape and training.
    """
    texts = read_corpus()
    tokenizer = train_tokenizer(texts.train, config.vocab)
    model, log = train(texts, tokenizer, config)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    device = backend.select(config.device)
    figures = judge(out, texts.held_out, row=config.row, rows=config.rows, device=device)
    (out / "README.md").write_text(readme(figures, texts, log, config), encoding="utf-8")
    print(json.dumps({"out": str(out)} | log.best_row() | figures))


@app.command(name="freeze")
def freeze_corpus(out: Path) -> None:
    """Write the documents of this Python's standard library to OUT, for `--data stdlib`."""
    corpus = freeze(out, list(stdlib_documents()))
    print(f"{len(corpus.train)} documents to train on, {len(corpus.held_out)} held out")


@app.command
def again(teacher: Path, *, figures: Path, device: str = "auto") -> None:
    """Judge TEACHER on the documents that are held out, and record its perplexity in FIGURES."""
    config = TeacherConfig()
    held_out = read_corpus().held_out
    where = backend.select(device)
    found = judge(teacher, held_out, row=config.row, rows=config.rows, device=where)
    print(json.dumps(found))
    value = round(found["perplexity"], 2)
    record(figures, "tiny_teacher_perplexity", value, "per token", "", runs=len(held_out))


@app.command
def size(teacher: Path, *, figures: Path) -> None:
    """Record the size of the directory TEACHER in FIGURES, a record's figures.jsonl."""
    megabytes = sum(file.stat().st_size for file in teacher.iterdir()) / 1e6
    record(figures, "tiny_teacher_mb", round(megabytes, 2), "MB", "<= 16")


if __name__ == "__main__":
    app()
