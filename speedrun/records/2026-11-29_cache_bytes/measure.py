"""Measures what a cache keeps of a teacher: bytes a token, and the errors of loss and gradient.

    python speedrun/records/2026-11-29_cache_bytes/measure.py TEACHER STUDENT \
        --text emma=emma.txt --text own=own.jsonl

The student is judged on the first counted tokens of each text. What a cache can hold goes through
its codec and back; what it cannot is computed from the logits, its size from the bits that it would
take. Errors are against the KL over the whole vocabulary. Speeds are of decoding on one thread.

Shapes: T tokens, V vocabulary, D model width, K teacher tokens kept, n draws.
"""

import json
import math
import statistics
import sys
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from cyclopts import App
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
LEAST_MASS = (1e-2, 1e-3)
"""Least probability of a word that an adaptive top K keeps, of at most `WIDEST` words."""
STREAM = 12345
LENGTH_BITS, RANGE_AND_TAIL = 6, 5
"""Bits that say how many words an adaptive top K keeps, and bytes of its range and tail mass."""
ROUNDS = 20
"""Times that targets are decoded for a speed; the median counts."""
EXACT = "all words"

app = App(help=__doc__)


class Variant(NamedTuple):
    """The targets that a cache keeps for one chunk of tokens."""

    name: str
    num_bytes: float
    loss: Callable[[Tensor], Tensor]
    """The summed KL of a student's logits `(T, V)`."""
    decode: Callable[[], object] | None = None


@torch.no_grad()
def hidden_states(
    models: Sequence[LanguageModel], tokenizer: PreTrainedTokenizerBase, text: str, num_tokens: int
) -> list[Tensor]:
    """Return each model's last hidden states of the first tokens that count, `(T, D)`."""
    source = open_source(text)
    settings = CacheSettings(
        data=text,
        format=source.format,
        targets="all" if source.format == "plain" else "assistant",
        sequence_length=LENGTH,
        held_out=0,
        shard_size=8,
    )
    found: list[list[Tensor]] = [[] for _ in models]
    for block in blocks(source.documents, tokenizer, settings):
        packed = block.packed
        ids, starts, mask = map(torch.from_numpy, (packed.tokens, packed.starts, packed.mask))
        for states, model in zip(found, models, strict=True):
            states.append(model.hidden(ids.long(), position_ids(starts))[mask])
        if sum(map(len, found[0])) >= num_tokens:
            break
    return [torch.cat(states)[:num_tokens] for states in found]


def variants(logits: Tensor, place: int) -> Iterator[Variant]:
    """Yield all words of `(T, V)` logits, and then what a cache may keep of them, decoded."""
    T, V = logits.shape
    log_p = logits.log_softmax(1)
    entropy = -(log_p.exp() * log_p).sum().item()
    yield Variant(EXACT, 0, lambda found: (log_p.exp() * (log_p - found.log_softmax(1))).sum())
    nothing, mask = torch.zeros(T, 0), torch.ones(T, dtype=torch.bool)
    none = nothing.long()
    empty = Targets(mask, none.new_zeros(T), none, nothing, torch.zeros(T), none, nothing)

    def loss(found: Tensor, targets: Targets, name: str, least: float) -> Tensor:
        return loss_from_logits(found, targets, {name: 1.0})["loss"] - least

    for k in TOP_K:
        rows = encode_top_k(top_k(logits, k), 1, V)
        decode = partial(decode_top_k, rows, length=T, k=k, vocab_size=V)
        ids, logprobs = (each[0] for each in decode())
        top = {"topk_ids": ids, "topk_logprobs": logprobs, "tail_logprob": rows["tail_logprob"][0]}
        kl = partial(loss, targets=empty._replace(**top), name="tail", least=0.0)
        yield Variant(f"top-{k}", sum(each.nbytes for each in rows.values()), kl, decode)
    for n in DRAWS:
        drawn = draw(logits, uniforms(STREAM, torch.arange(T) + place, 1)[:, 0], n)
        rows = encode_draws(drawn[None].int(), mask[None], V)
        marks, octets = rows["sample_marks"], [rows["sample_ids"].numpy()]
        decode = partial(decode_draws, marks, octets, length=T, num_draws=n, vocab_size=V)
        ids, counts = (each[0] for each in decode())
        targets = empty._replace(sample_ids=ids, sample_counts=counts)
        kl = partial(loss, targets=targets, name="sampled", least=entropy)
        yield Variant(f"{n} draws", marks.numel() + octets[0].size, kl, decode)
    yield from (adaptive(logits, least) for least in LEAST_MASS)


def adaptive(teacher: Tensor, least: float) -> Variant:
    """Return a top K of the words above `least` with a tail."""
    log_p, ids = teacher.log_softmax(1).topk(WIDEST, dim=1)
    is_kept = log_p > math.log(least)
    is_kept[:, 0] = True
    inside = torch.zeros_like(teacher, dtype=torch.bool).scatter(1, ids, is_kept)

    def tail(logits: Tensor) -> Tensor:
        return logits.log_softmax(1).masked_fill(inside, -torch.inf).logsumexp(1)

    def kl(student: Tensor) -> Tensor:
        chosen = student.log_softmax(1).gather(1, ids)
        head = (log_p.exp() * (log_p - chosen)).masked_fill(~is_kept, 0.0).sum(1)
        return (head + tail(teacher).exp() * (tail(teacher) - tail(student))).sum()

    bits = int(is_kept.sum()) * (id_bits(teacher.shape[1]) + CODE_BITS)
    num_bytes = (bits + LENGTH_BITS * len(teacher)) / 8 + RANGE_AND_TAIL * len(teacher)
    return Variant(f"p > {least:g}", num_bytes, kl)


def measured(
    teacher: LanguageModel, student: LanguageModel, teachers: Tensor, students: Tensor
) -> dict[str, dict]:
    """Return the numbers of a text, from hidden states `(T, D)`, and of each variant."""
    T, V = len(students), teacher.config.vocab_size
    sums: dict[str, dict] = defaultdict(lambda: defaultdict(float))
    speeds = {}
    for first in range(0, T, CHUNK):
        part = students[first : first + CHUNK]
        with torch.no_grad():
            wanted = teacher.logits(teachers[first : first + CHUNK]).float()
        exact = torch.zeros_like(part)
        for each in variants(wanted, first):
            hidden = part.clone().requires_grad_()
            loss = each.loss(student.logits(hidden).float())
            (gradient,) = torch.autograd.grad(loss, hidden)
            found, error = sums[each.name], gradient - exact
            found["loss"] += loss.item()
            found["bytes"] += each.num_bytes
            found["square"] += error.square().sum().item()
            found["outer"] += part.T @ error  # by a linear behind the last layer, `(D, D)`
            if each.name == EXACT:
                exact = gradient
            if each.decode and first == 0:
                times = timeit.repeat(each.decode, number=1, repeat=ROUNDS)
                speeds[each.name] = len(wanted) / statistics.median(times)
    whole = sums.pop(EXACT)
    fixed = (id_bits(V) + 2) / 8  # the token, where a document begins, and whether it counts
    return {
        "text": {"tokens": T, "kl_nats": whole["loss"] / T},
        "variants": {
            name: {
                "bytes_per_token": each["bytes"] / T + fixed,
                "kl_error_frac": each["loss"] / whole["loss"] - 1,
                "token_gradient_error_frac": math.sqrt(each["square"] / whole["square"]),
                "sum_gradient_error_frac": float(each["outer"].norm() / whole["outer"].norm()),
                "decoded_tokens_per_s": speeds.get(name),
            }
            for name, each in sums.items()
        },
    }


@app.default
def main(
    teacher: str,
    student: str,
    *,
    text: list[str],
    tokens: int = 4096,
    out: Path = Path(__file__).parent,
) -> None:
    """Measure each NAME=FILE of TEXT; write `numbers.json` and the figures to OUT."""
    torch.set_num_threads(1)
    ours, tokenizer = open_student(student, device="cpu", dtype="fp32")
    models = load_teacher(teacher, device="cpu", dtype="fp32"), ours
    found, figures = {}, out / "figures.jsonl"
    for name, file in (each.split("=", 1) for each in text):
        found[name] = measured(*models, *hidden_states(models, tokenizer, file, tokens))
        draws = found[name]["variants"][f"{USUAL} draws"]
        size, speed = round(draws["bytes_per_token"], 1), round(draws["decoded_tokens_per_s"])
        about = f"{USUAL}_draws_{name}"
        record(figures, f"cache_bytes_{about}", size, "bytes a token", "<= 60")
        record(figures, f"cache_decode_tok_s_{about}", speed, "tokens/s", ">= 200000")
    (out / "numbers.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
