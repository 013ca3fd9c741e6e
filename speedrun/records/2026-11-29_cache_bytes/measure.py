"""Measures what a cache keeps of a teacher: bytes a token, and the errors of loss and gradient.

    python speedrun/records/2026-11-29_cache_bytes/measure.py TEACHER STUDENT \
        --text emma=emma.txt --text own=own.jsonl

The student is judged on the first counted tokens of each text. What a cache can hold goes through
its codec and back; what it cannot is computed from the logits, its size from the bits that it would
take. Errors are against the KL over the whole vocabulary. Speeds are of decoding on one thread.

Shapes: T tokens, V vocabulary, D model width, K teacher tokens kept, n draws.
"""

import argparse
import json
import math
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from figures import record

from qat.data.codec import (
    CODE_BITS,
    decode_draws,
    decode_top_k,
    draw,
    encode_draws,
    encode_top_k,
    id_bits,
    top_k,
    uniforms,
    unpack_bits,
)
from qat.data.config import CacheSettings
from qat.data.packing import position_ids
from qat.data.sources import open_source
from qat.data.stream import blocks
from qat.evaluate.judge import open_student
from qat.losses.formulas import Targets, loss_from_logits
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher

LENGTH = 256
"""Positions in a sequence."""
CHUNK = 256
"""Tokens whose logits exist at once."""
TOP_K, DRAWS = (8, 14, 16, 24, 32, 64), (16, 32, 50, 100)
WIDEST = max(TOP_K)
USUAL = 50
"""Number of draws of the figures."""
LEAST_MASS = (1e-2, 1e-3, 1e-4)
"""Least probability of a word that an adaptive top K keeps, of at most `WIDEST` words."""
STREAM = 12345
COLUMN_K = 16
"""Top K whose columns are compressed."""
LENGTH_BITS, RANGE_AND_TAIL = 6, 5
"""Bits that say how many words an adaptive top K keeps, and bytes of its range and tail mass."""
ROUNDS = 20
"""Times that targets are decoded for a speed; the median counts."""


class Variant(NamedTuple):
    """What a cache keeps of one chunk of tokens."""

    name: str
    loss: str
    targets: Targets
    num_bytes: int
    decode: Callable[[], object]


def counted_rows(
    text: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions and masks of sequences with at least `num_tokens` that count."""
    source = open_source(text)
    settings = CacheSettings(
        data=text,
        format=source.format,
        targets="all" if source.format == "plain" else "assistant",
        sequence_length=LENGTH,
        held_out=0,
        shard_size=8,
    )
    tokens, starts, masks = [], [], []
    for block in blocks(source.documents, tokenizer, settings):
        tokens.append(block.packed.tokens)
        starts.append(block.packed.starts)
        masks.append(block.packed.mask)
        if sum(mask.sum() for mask in masks) >= num_tokens:
            break
    ids, begins, mask = (torch.from_numpy(np.concatenate(each)) for each in (tokens, starts, masks))
    return ids.long(), position_ids(begins), mask


@torch.no_grad()
def hidden_states(model: LanguageModel, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Return the last hidden state of every token that counts, `(T, D)`."""
    found = [
        model.hidden(ids[row : row + 4], positions[row : row + 4])[mask[row : row + 4]]
        for row in range(0, len(ids), 4)
    ]
    return torch.cat(found)


def variants(logits: Tensor, place: int) -> Iterator[Variant]:
    """Yield what a cache may keep of `(T, V)` logits, decoded."""
    T, V = logits.shape
    nothing = torch.zeros(T, 0)
    mask, labels = torch.ones(T, dtype=torch.bool), torch.zeros(T, dtype=torch.int64)
    for k in TOP_K:
        rows = encode_top_k(top_k(logits, k), 1, V)
        decode = partial(decode_top_k, rows, length=T, k=k, vocab_size=V)
        ids, logprobs = (each[0] for each in decode())
        targets = Targets(
            mask, labels, ids, logprobs, rows["tail_logprob"][0], nothing.long(), nothing
        )
        size = sum(each.numel() * each.element_size() for each in rows.values())
        yield Variant(f"top-{k}", "tail", targets, size, decode)
    for n in DRAWS:
        drawn = draw(logits, uniforms(STREAM, torch.arange(T) + place, 1)[:, 0], n)
        rows = encode_draws(drawn[None].int(), mask[None], V)
        marks, octets = rows["sample_marks"], [rows["sample_ids"].numpy()]
        decode = partial(decode_draws, marks, octets, length=T, num_draws=n, vocab_size=V)
        ids, counts = (each[0] for each in decode())
        targets = Targets(mask, labels, nothing.long(), nothing, torch.zeros(T), ids, counts)
        yield Variant(f"{n} draws", "sampled", targets, marks.numel() + octets[0].size, decode)


def adaptive(teacher: Tensor, student: Tensor, least: float) -> tuple[Tensor, float]:
    """Return the KL of a top K of words above `least` with a tail, `(T,)`, and its bytes."""
    log_p, ids = teacher.log_softmax(1).topk(WIDEST, dim=1)
    is_kept = log_p > math.log(least)
    is_kept[:, 0] = True
    chosen = student.log_softmax(1).gather(1, ids)
    head = (log_p.exp() * (log_p - chosen)).masked_fill(~is_kept, 0.0).sum(1)
    inside = torch.zeros_like(student, dtype=torch.bool).scatter(1, ids, is_kept)
    tails = [
        each.log_softmax(1).masked_fill(inside, -torch.inf).logsumexp(1)
        for each in (teacher, student)
    ]
    kl = head + tails[0].exp() * (tails[0] - tails[1])
    bits = int(is_kept.sum()) * (id_bits(teacher.shape[1]) + CODE_BITS)
    return kl, (bits + LENGTH_BITS * len(teacher)) / 8 + RANGE_AND_TAIL * len(teacher)


def column_bits(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and codes of a top `COLUMN_K`, `(T, K)` and `(T, K - 1)`."""
    top = top_k(logits, COLUMN_K)
    codes = encode_top_k(top, len(logits), logits.shape[1])["topk_codes"]
    return top.ids.numpy(), unpack_bits(codes, CODE_BITS, COLUMN_K - 1).numpy()


def column_sizes(ids: np.ndarray, codes: np.ndarray, bits: int) -> dict[str, float]:
    """Return bits of an id and of a code of a top K: as stored, by zlib, and by their entropy.

    A column is one rank of all tokens, its low bytes before its high ones. The entropy is that of
    each rank alone.
    """

    def compressed(columns: np.ndarray) -> float:
        low, high = (columns.T & 255).astype("u1"), (columns.T >> 8).astype("<u2")
        return 8 * len(zlib.compress(low.tobytes() + high.tobytes(), 9)) / columns.size

    entropies = []
    for column in codes.T:
        _, counts = np.unique(column, return_counts=True)
        shares = counts / counts.sum()
        entropies.append(-(shares * np.log2(shares)).sum())
    return {
        "id_bits": float(bits),
        "id_bits_zlib": compressed(ids),
        "code_bits": float(CODE_BITS),
        "code_bits_zlib": compressed(codes),
        "code_bits_entropy": float(np.mean(entropies)),
    }


def seconds(decode: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        decode()
        times.append(time.perf_counter() - begun)
    return sorted(times)[ROUNDS // 2]


class Errors:
    """Sums over chunks of one variant's errors and bytes."""

    def __init__(self) -> None:
        self.loss = self.square = self.num_bytes = 0.0
        self.outer: Tensor | float = 0.0
        """Gradient of a linear behind the last layer, `(D, D)`, less the exact one."""

    def add(self, loss: Tensor, hidden: Tensor, exact: Tensor, num_bytes: float) -> None:
        """Add the loss of a chunk, whose exact gradient by the hidden states is `exact`."""
        (gradient,) = torch.autograd.grad(loss, hidden)
        self.outer = self.outer + hidden.detach().T @ (gradient - exact)
        self.square += (gradient - exact).square().sum().item()
        self.loss += loss.item()
        self.num_bytes += num_bytes


def measured(
    teacher: LanguageModel, student: LanguageModel, rows: tuple[Tensor, Tensor, Tensor], most: int
) -> dict[str, dict]:
    """Return the numbers of a text, of the columns of a top K, and of each variant."""
    teachers, students = (hidden_states(model, *rows)[:most] for model in (teacher, student))
    T, V = len(students), teacher.config.vocab_size
    errors: dict[str, Errors] = defaultdict(Errors)
    kl = entropy = square = 0.0
    outer: Tensor | float = 0.0
    columns, speeds = [], {}

    def student_logits(part: slice) -> tuple[Tensor, Tensor]:
        hidden = students[part].detach().requires_grad_()
        return hidden, student.logits(hidden).float()

    for first in range(0, T, CHUNK):
        part = slice(first, first + CHUNK)
        with torch.no_grad():
            wanted = teacher.logits(teachers[part]).float()
        log_p = wanted.log_softmax(1)
        own_entropy = -(log_p.exp() * log_p).sum().item()
        hidden, found = student_logits(part)
        loss = (log_p.exp() * (log_p - found.log_softmax(1))).sum()
        (exact,) = torch.autograd.grad(loss, hidden)
        kl, entropy = kl + loss.item(), entropy + own_entropy
        square, outer = square + exact.square().sum().item(), outer + hidden.detach().T @ exact
        for each in variants(wanted, first):
            hidden, found = student_logits(part)
            loss = loss_from_logits(found, each.targets, {each.loss: 1.0})["loss"]
            loss = loss - (own_entropy if each.loss == "sampled" else 0.0)
            errors[each.name].add(loss, hidden, exact, each.num_bytes)
            if first == 0:
                speeds[each.name] = len(wanted) / seconds(each.decode)
        for least in LEAST_MASS:
            hidden, found = student_logits(part)
            losses, num_bytes = adaptive(wanted, found, least)
            errors[f"p > {least:g}"].add(losses.sum(), hidden, exact, num_bytes)
        columns.append(column_bits(wanted))
    fixed = (id_bits(V) + 2) / 8  # the token, where a document begins, and whether it counts
    return {
        "text": {"tokens": T, "kl_nats": kl / T, "entropy_nats": entropy / T},
        "columns": column_sizes(*map(np.concatenate, zip(*columns, strict=True)), id_bits(V)),
        "variants": {
            name: {
                "bytes_per_token": each.num_bytes / T + fixed,
                "kl_error_frac": each.loss / kl - 1,
                "token_gradient_error_frac": math.sqrt(each.square / square),
                "sum_gradient_error_frac": float(each.outer.norm() / outer.norm()),
                "decoded_tokens_per_s": speeds.get(name),
            }
            for name, each in errors.items()
        },
    }


def main() -> None:
    """Measure every text; write `numbers.json` and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    teacher = load_teacher(asked.teacher, device="cpu", dtype="fp32")
    student, tokenizer = open_student(asked.student, device="cpu", dtype="fp32")
    found = {}
    for name, file in (each.split("=", 1) for each in asked.text):
        rows = counted_rows(file, tokenizer, asked.tokens)
        found[name] = measured(teacher, student, rows, asked.tokens)
        draws = found[name]["variants"][f"{USUAL} draws"]
        size, speed = draws["bytes_per_token"], draws["decoded_tokens_per_s"]
        figures = asked.out / "figures.jsonl"
        about = f"{USUAL}_draws_{name}"
        record(figures, f"cache_bytes_{about}", round(size, 1), "bytes a token", "<= 60")
        record(figures, f"cache_decode_tok_s_{about}", round(speed), "tokens/s", ">= 200000")
    (asked.out / "numbers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
