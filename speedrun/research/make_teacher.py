"""Train a teacher of about 90 million parameters on a folder of texts, in minutes on one GPU.

    python speedrun/research/make_teacher.py --texts DIR --out checkpoints/teacher

The texts are split by document before anything is trained: OUT/texts/distil.jsonl is what the
teacher learns from (and what a student may), validate.jsonl and report.jsonl are held out, and
report_other.jsonl holds the sources left out entirely. Shapes: N rows, L tokens a row, T = N * L.
"""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from cyclopts import App, Parameter
from muon import Muon
from pydantic import Field
from teacher_model import HEAD_DIM, Shape, judge, learning_rate, new_qwen3, parameter_groups
from teacher_rows import endless_batches, pack_rows, with_empty_rows
from teacher_texts import Piece, read_pieces, split, without_repetition, write_pieces
from tiny_teacher_text import encode, train_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from qat.backend import device as backend
from qat.config import Settings
from qat.data.packing import NO_LABEL
from qat.models.regions import compute_in
from qat.nn.sites import close_sites, experts_of, open_sites, routers

README = Path(__file__).with_name("teacher_readme.md")
BALANCE = 0.01
"""Of the loss that lets all experts be used (arXiv:2101.03961, eq. 4), beside the cross-entropy."""
SYNCHRONISE_EVERY = 10
"""Steps that the host may run ahead of the device: how exactly the schedule knows the time."""
JUDGED = ("validate", "report", "report_other")


class TeacherConfig(Settings):
    """What the teacher is and how it is trained."""

    hidden: int = Field(768, ge=64, multiple_of=64)
    """Model width; heads are 64 wide, a third as many for keys and values."""
    layers: int = Field(12, ge=1)
    """Transformer blocks."""
    ffn: int = Field(2048, ge=64)
    """Width inside an MLP, or inside one expert."""
    experts: int = Field(0, ge=0)
    """Experts of every MLP; 0 for a dense model."""
    chosen: int = Field(2, ge=1)
    """Experts that a token is sent to."""
    vocabulary: int = Field(16384, ge=512)
    """Entries of the tokenizer, special tokens included."""
    row: int = Field(512, ge=16)
    """Tokens a row; a row begins with a document, and several fill it."""
    rows: int = Field(64, ge=1)
    """Rows a step."""
    max_seconds: float = Field(200, gt=0)
    """Seconds of training, compilation before it not counted; the learning rate ends at zero."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate of Muon (matrices) and AdamW (embeddings, norms)."""
    weight_decay: float = Field(0.5, ge=0)
    """Decay of matrices and embeddings, times the learning rate."""
    dropout: float = Field(0.2, ge=0, lt=1)
    """Dropout of what each attention and MLP adds to the residual stream."""
    evaluations: int = Field(8, ge=1)
    """Times that the validation documents are judged, evenly over the time."""
    tokenizer_characters: int = Field(30_000_000, ge=1)
    """Characters of random training documents that make the tokenizer."""
    quotes: int = Field(8, ge=1)
    """Most documents taken that quote the same passage."""
    validate_share: float = Field(0.01, gt=0, lt=0.5)
    """Share of each source's characters held out for the training log."""
    report_share: float = Field(0.03, gt=0, lt=0.5)
    """Share of each source's characters held out for reports."""
    leave_out: tuple[str, ...] = ("moby-dick",)
    """Sources that go whole to report_other.jsonl."""
    seed: int = 0
    """Seed of splits, initial weights, order and dropout."""
    device: str = "auto"
    """auto, cpu or cuda."""


# ---- training


def head_nats(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Cross-entropy behind the head, in nats summed over labels, `()` float32."""
    logits_TV = F.linear(hidden_TD, weight_VD).float()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=NO_LABEL, reduction="sum")


class Trainer:
    """One training run: model, optimizers, and rows on the device; the clock is the caller's."""

    def __init__(self, model: PreTrainedModel, config: TeacherConfig) -> None:
        self.config = config
        self.device = backend.select(config.device)
        self.dtype = self.device.dtype("auto")
        self.model = model.to(self.device.device).train()
        self._end_precision = compute_in(self.model, self.dtype)
        open_sites(model)
        chosen_by = routers(model).values()
        self._routed: list[Tensor] = []
        for router in chosen_by:
            router.register_forward_hook(lambda _module, _args, out: self._routed.append(out[0]))
        apart = {id(p) for router in chosen_by for p in router.parameters()}
        layers = model.model.layers.parameters()
        matrices = [p for p in layers if p.ndim > 1 and id(p) not in apart]
        experts = {
            child.weight: count
            for module in model.modules()
            for name, child in module.named_children()
            if (count := experts_of(module, name))
        }
        self._muon = Muon(
            matrices, experts=experts, weight_decay=config.weight_decay, dtype=self.dtype
        )
        self._adam = torch.optim.AdamW(self._adam_groups(matrices), betas=(0.9, 0.95))
        self._head_nats: Callable = head_nats
        if self.device.compiles():
            self._head_nats = torch.compile(head_nats)
            for layer in () if config.experts else model.model.layers:
                layer.forward = torch.compile(layer.forward)

    def _adam_groups(self, matrices: list[nn.Parameter]) -> list[dict]:
        moved = {id(matrix) for matrix in matrices}
        groups = parameter_groups(self.model, self.config.weight_decay)
        return [{**g, "params": [p for p in g["params"] if id(p) not in moved]} for g in groups]

    def nats(self, ids_NL: Tensor, labels_NL: Tensor) -> Tensor:
        """Cross-entropy of rows, whole rows attending, in nats summed over labels."""
        with self.device.autocast(self.dtype):
            # a mask given as None is the causal one, and nobody looks into positions for it;
            # a mixture takes no table of masks
            mask = None if self.config.experts else {"full_attention": None}
            hidden = self.model.model(
                input_ids=ids_NL, attention_mask=mask, use_cache=False
            ).last_hidden_state
            weight = self.model.lm_head.weight
            return self._head_nats(hidden.flatten(0, 1), weight, labels_NL.flatten())

    def gradients(self, ids_NL: Tensor, labels_NL: Tensor) -> Tensor:
        """Mean cross-entropy in nats, detached; its gradients are added to the parameters'."""
        self._routed.clear()
        loss = self.nats(ids_NL, labels_NL) / (labels_NL != NO_LABEL).sum()
        balance = load_balancing_loss_func(
            tuple(self._routed), self.config.experts, self.config.chosen
        ) if self._routed else 0.0  # fmt: skip
        (loss + BALANCE * balance).backward()
        return loss.detach()

    def move(self, lr: float) -> None:
        """One optimizer step from the gradients, which are then forgotten."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._muon.step(lr)
        self.model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def judge(self, ids_NL: Tensor, labels_NL: Tensor) -> float:
        """Mean cross-entropy over the labels of held-out rows, in nats a token."""
        self.model.eval()
        batches = zip(*(t.split(self.config.rows) for t in (ids_NL, labels_NL)), strict=True)
        total = sum(self.nats(*batch) for batch in batches)
        self.model.train()
        return total.item() / (labels_NL != NO_LABEL).sum().item()

    def finish(self) -> None:
        """Let the model be as its class says again."""
        self._end_precision()
        for layer in self.model.model.layers:
            vars(layer).pop("forward", None)
        close_sites(self.model)


def train(
    trainer: Trainer, training: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]
) -> list[dict[str, float]]:
    """Train for `max_seconds`; one row of the log an evaluation, the last at the end."""
    config, device = trainer.config, trainer.device
    held_out = with_empty_rows(held_out, config.rows)
    training, held_out = (
        tuple(t.to(device.device) for t in tensors) for tensors in (training, held_out)
    )
    order = endless_batches(len(training[0]), config.rows, config.seed)
    steps_an_epoch = max(1, len(training[0]) // config.rows)
    _compile(trainer, training, held_out)
    log: list[dict[str, float]] = []
    losses: list[Tensor] = []
    start, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        batch = next(order).to(device.device, non_blocking=True)
        losses.append(trainer.gradients(*(tensor[batch] for tensor in training)))
        trainer.move(learning_rate(config.lr, done))
        step += 1
        if step % SYNCHRONISE_EVERY == 0 or device.device.type == "cpu":
            device.synchronize()
        done = min(1.0, (time.monotonic() - start) / config.max_seconds)
        if done >= (len(log) + 1) / config.evaluations or done == 1:
            row = {"step": step, "epoch": step / steps_an_epoch}
            row |= {"train_nats": torch.stack(losses).mean().item()}
            row |= {"validate_nats": trainer.judge(*held_out)}
            row |= {"seconds": time.monotonic() - start}
            _report(row, config)
            log.append(row)
            losses = []
    return log


def _compile(trainer: Trainer, *shapes: tuple[Tensor, Tensor]) -> None:
    """Run everything once that training will run; nothing is moved."""
    training, held_out = shapes
    rows = trainer.config.rows
    trainer.gradients(*(tensor[:rows] for tensor in training))
    trainer.model.zero_grad(set_to_none=True)
    trainer.judge(*held_out)
    trainer.device.synchronize()


def _report(row: dict[str, float], config: TeacherConfig) -> None:
    positions = row["step"] * config.rows * config.row
    more = {
        "validate_perplexity": math.exp(row["validate_nats"]),
        "tokens_per_s": round(positions / row["seconds"]),
    }
    print(json.dumps({name: round(value, 4) for name, value in (row | more).items()}), flush=True)


# ---- result


def new_tokenizer(pieces: list[Piece], config: TeacherConfig) -> PreTrainedTokenizerFast:
    """A tokenizer from random training documents."""
    texts = [piece.text for piece in pieces]
    random.Random(config.seed).shuffle(texts)
    chosen, characters = [], 0
    for text in texts:
        if characters > config.tokenizer_characters:
            break
        chosen.append(text)
        characters += len(text)
    return train_tokenizer(chosen, config.vocabulary)


def new_model(config: TeacherConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The untrained teacher."""
    kv_heads = max(1, config.hidden // HEAD_DIM // 3)
    shape = Shape(
        config.vocabulary, config.hidden, config.ffn, config.layers, kv_heads,
        config.experts, config.chosen,
    )  # fmt: skip
    return new_qwen3(shape, tokenizer, dropout=config.dropout, seed=config.seed)


def command(config: TeacherConfig) -> str:
    """What makes this teacher again, as far as it differs from the defaults."""
    values = config.model_dump(exclude_defaults=True, exclude={"device"})
    flags = []
    for name, value in values.items():
        for item in value if isinstance(value, tuple) else [value]:
            flags.append(f"--{name.replace('_', '-')} {item}")
    return " ".join(["python speedrun/research/make_teacher.py --texts TEXTS --out OUT", *flags])


def judge_splits(
    out: Path, splits: dict[str, list[Piece]], config: TeacherConfig
) -> dict[str, dict[str, float]]:
    """The saved model on each held-out list that is not empty, and on each source of `report`."""
    lists = {name: splits[name] for name in JUDGED if splits[name]}
    for source in sorted({piece.source for piece in splits["report"]}):
        chosen = [piece for piece in splits["report"] if piece.source == source]
        lists[f"report: {source}"] = chosen
    device = backend.select(config.device)
    return {
        name: judge(out, [p.text for p in chosen], row=config.row, rows=16, device=device)
        for name, chosen in lists.items()
    }


def readme(
    name: str,
    judged: dict[str, dict[str, float]],
    log: list[dict[str, float]],
    *,
    training: tuple[list[Piece], int],
    config: TeacherConfig,
) -> str:
    """The README of the checkpoint: what it is, how good, and how it came about."""
    pieces, tokens = training
    line = "| {name} | {perplexity:.2f} | {bits_per_byte:.3f} | {held_out_documents:,} | "
    line += "{held_out_tokens:,} |"
    row = "| {step} | {epoch:.2f} | {train_nats:.4f} | {validate_nats:.4f} | {seconds:.0f} |"
    last, counts = log[-1], Counter(piece.source for piece in pieces)
    positions = config.rows * config.row
    return README.read_text(encoding="utf-8").format(
        **next(iter(judged.values())),
        name=name,
        vocabulary=config.vocabulary,
        seconds=last["seconds"],
        device=backend.select(config.device).name(),
        judged="\n".join(line.format(name=key, **values) for key, values in judged.items()),
        left_out=", ".join(config.leave_out) or "none",
        train_documents=len(pieces),
        train_tokens=tokens,
        epochs=last["epoch"],
        tokens_a_step=positions,
        steps=last["step"],
        tokens_per_s=last["step"] * positions / last["seconds"],
        sources=", ".join(f"{source} {count:,}" for source, count in sorted(counts.items())),
        torch=torch.__version__,
        command=command(config),
        table="\n".join(row.format(**values) for values in log),
    )


DEFAULTS = TeacherConfig()
app = App(help=__doc__.splitlines()[0])


@app.default
def main(
    *,
    texts: Path,
    out: Path,
    config: Annotated[TeacherConfig, Parameter(name="*")] = DEFAULTS,
) -> None:
    """Train a teacher on TEXTS and write it to OUT, its documents to OUT/texts.

    Args:
        texts: folder whose sub-folders are sources, or a bundle from `pack`.
        out: directory of the checkpoint.
        config: shape and training.
    """
    start = time.monotonic()
    splits = split(
        without_repetition(read_pieces(texts), config.quotes),
        leave_out=config.leave_out,
        validate=config.validate_share,
        report=config.report_share,
        seed=config.seed,
    )
    for name, pieces in splits.items():
        write_pieces(out / "texts" / f"{name}.jsonl", pieces)
    tokenizer = new_tokenizer(splits["distil"], config)
    tokenizer.save_pretrained(out)
    rows = {
        name: pack_rows(encode(tokenizer, [piece.text for piece in splits[name]]), config.row)
        for name in ("distil", "validate")
    }
    tokens = {name: (labels != NO_LABEL).sum().item() for name, (_, labels) in rows.items()}
    model = new_model(config, tokenizer)
    facts = {"tokens": tokens, "parameters": model.num_parameters()}
    facts |= {"rows": len(rows["distil"][0]), "seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(facts), flush=True)
    trainer = Trainer(model, config)
    log = train(trainer, rows["distil"], rows["validate"])
    trainer.finish()
    model.to(torch.bfloat16).save_pretrained(out)
    judged = judge_splits(out, splits, config)
    training = (splits["distil"], tokens["distil"])
    text = readme(out.name, judged, log, training=training, config=config)
    (out / "README.md").write_text(text, encoding="utf-8")
    perplexities = {name: round(values["perplexity"], 3) for name, values in judged.items()}
    print(json.dumps({"out": str(out), "perplexity": perplexities} | log[-1]))


@app.command
def pack(texts: Path, out: Path) -> None:
    """Write the documents of the folder TEXTS as one bundle OUT (JSON lines, .xz)."""
    pieces = read_pieces(texts)
    write_pieces(out, pieces)
    characters = Counter()
    for piece in pieces:
        characters[piece.source] += len(piece.text)
    print(json.dumps({"out": str(out), "megabytes": out.stat().st_size / 1e6} | characters))


if __name__ == "__main__":
    app()
