"""Measures what rows of a cache are worth to a teacher, and how fast and how full they are packed.

Every document of the text is asked about as a whole and in rows: what a row's counted tokens cost
the teacher where a piece begins a document and where it goes on with one, beside the same tokens
with all of their document before them. Then the packer takes turns with the one that cut a stream
of documents anywhere (of commit `STREAM`), over the same tokens.

    python speedrun/research/measure_rows.py --teacher DIR --text FILE --figures FILE.jsonl
"""

import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from cyclopts import App
from research_records import ROOT, record

from qat.data import packing
from qat.data.config import CacheConfig, chosen_targets
from qat.data.packing import PackedRows, Packer, position_ids
from qat.data.sources import open_source
from qat.data.text import Tokens, begin_token, encode, end_token, render, special_tokens
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, load_tokenizer
from qat.models.teacher_cache import suited_length

app = App(help=__doc__)
STREAM = "5941068"
"""The last commit whose packer cut a stream of documents anywhere."""
BATCH_TOKENS = 8192
LENGTHS = (64, 256)
"""Measured beside the length that follows the data."""
ROUNDS, SPEED_TOKENS = 5, 2_000_000
BASE = 100_000
"""Above any document's length: a token's number is its document's times this plus its place."""


class Cost(NamedTuple):
    """Nats of the tokens that count in some pieces, in their rows and with whole documents."""

    in_rows: float
    whole: float
    count: int

    def ppl(self) -> float:
        """Perplexity in the rows."""
        return math.exp(self.in_rows / self.count)


@app.default
def measure(
    *,
    teacher: str,
    text: str,
    figures: Path,
    documents: int = 200,
    device: str = "auto",
    dtype: str = "fp32",
) -> None:
    """Append `cut_rest_teacher_ppl_ratio` and what belongs to it to FIGURES."""
    tokenizer = load_tokenizer(teacher)
    source = open_source(text)
    read = list(islice(source.documents, 1000))
    length = suited_length(CacheConfig(teacher=teacher, data=text), source.format, read)
    targets = chosen_targets("auto", source.format, text)
    rendered = chain.from_iterable(render(each, tokenizer, "false", targets) for each in read)
    tokens = encode(list(rendered), tokenizer)
    special, end = special_tokens(tokenizer), end_token(tokenizer)
    speeds(tokens, length, old_arguments=(end, begin_token(tokenizer)), figures=figures)
    model = load_teacher(teacher, device=device, dtype=dtype)
    asked = tokens[:documents]
    whole = [nats(model, np.array([each.ids]))[0] for each in asked]
    for each in (*LENGTHS, length):
        first, rest = costs(model, asked, whole, length=each, special=special)
        ratio, inherent = (
            rest.ppl() / first.ppl(),
            math.exp(rest.whole / rest.count - first.whole / first.count),
        )
        print(
            f"rows of {each}: {first.count} tokens in pieces that begin a document, perplexity "
            f"{first.ppl():.2f}; {rest.count} in those that go on with one, {rest.ppl():.2f} "
            f"(ratio {ratio:.3f}; with whole documents {inherent:.3f})"
        )
        is_default = each == length
        name = "cut_rest_teacher_ppl_ratio" + ("" if is_default else f"_{each}")
        goal = "<= 1.3" if is_default else "stated"
        record(figures, name, round(ratio, 3), "ratio", goal)
        record(figures, f"{name}_whole", round(inherent, 3), "ratio, nothing cut", "stated")


def costs(
    model: LanguageModel,
    documents: list[Tokens],
    whole: list[np.ndarray],
    *,
    length: int,
    special: frozenset[int],
) -> tuple[Cost, Cost]:
    """Of pieces that begin a document, and of those that go on with one."""
    packed, numbers = (
        packed_of(documents, ids, length=length, special=special)
        for ids in (
            [each.ids for each in documents],
            [BASE * i + np.arange(len(each.ids)) for i, each in enumerate(documents)],
        )
    )
    assert (packed.mask == numbers.mask).all()
    positions = position_ids(torch.from_numpy(packed.starts)).numpy()
    found = {True: [0.0, 0.0, 0], False: [0.0, 0.0, 0]}
    size = max(1, BATCH_TOKENS // length)
    for begin in range(0, len(packed.tokens), size):
        rows = slice(begin, begin + size)
        each_NL = nats(model, packed.tokens[rows], positions[rows])
        for row, said in zip(range(begin, begin + size), each_NL, strict=False):
            edges = [*np.flatnonzero(packed.starts[row]).tolist(), length]
            for start, stop in zip(edges, edges[1:], strict=False):
                places = numbers.tokens[row, start:stop]
                counts = packed.mask[row, start:stop][:-1]
                if not counts.any():
                    continue
                goes_on = places[-1] - places[0] != stop - start - 1
                predicted = places[1:][counts]
                entry = found[bool(goes_on)]
                entry[0] += said[start : stop - 1][counts].sum()
                entry[1] += sum(whole[n // BASE][n % BASE - 1] for n in predicted.tolist())
                entry[2] += len(predicted)
    return Cost(*found[False]), Cost(*found[True])


def packed_of(
    documents: list[Tokens], ids: list, *, length: int, special: frozenset[int]
) -> PackedRows:
    """Other tokens in the rows of these documents."""
    packer = Packer(length, 0, special)
    for document, tokens in zip(documents, ids, strict=True):
        packer.push(tokens, document.is_target)
    packer.finish()
    return packer.take(packer.num_full)


@torch.no_grad()
def nats(
    model: LanguageModel, tokens_NL: np.ndarray, positions_NL: np.ndarray | None = None
) -> np.ndarray:
    """What the token after each position but the last costs the model, `(N, L - 1)`."""
    ids = torch.from_numpy(tokens_NL).long().to(model.device)
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    places = places if positions_NL is None else torch.from_numpy(positions_NL)
    logits = model.logits(model.hidden(ids, places.to(model.device)))[:, :-1].float()
    found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return found.double().cpu().numpy()


def speeds(
    documents: list[Tokens], length: int, *, old_arguments: tuple[int, int | None], figures: Path
) -> None:
    """Tokens a second of both packers, taking turns, and how much of the rows is padding."""
    old = packer_of(STREAM)
    total = sum(len(each.ids) for each in documents)
    many = documents * -(-SPEED_TOKENS // total)
    ways: dict[str, Callable[[], Iterator[PackedRows]]] = {
        "stream": lambda: packed_by_stream(old.Packer(length, *old_arguments), many),
        "documents": lambda: packed_by_documents(Packer(length, old_arguments[0]), many),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    padding: dict[str, float] = {}
    for name, way in chain.from_iterable([ways.items()] * ROUNDS):
        began = time.perf_counter()
        found = list(way())
        seconds[name].append(time.perf_counter() - began)
        padding[name] = 1 - sum(p.num_tokens for p in found) / sum(p.tokens.size for p in found)
    for name, taken in seconds.items():
        rates = [total * len(many) // len(documents) / each for each in taken]
        speed, share = statistics.median(rates), 100 * padding[name]
        print(f"{name}: {speed:,.0f} tokens/s packed, {share:.2f} % padding in rows of {length}")
        record(
            figures, f"packing_tok_s_{name}", round(speed), "tokens/s", "stated", runs=ROUNDS,
            spread=round(statistics.stdev(rates)),
        )  # fmt: skip
        record(figures, f"packing_padding_percent_{name}", round(share, 2), "%", "stated")


def packed_by_documents(packer: Packer, documents: list[Tokens]) -> Iterator[PackedRows]:
    """What the packer makes of documents, whole."""
    for ids, is_target in documents:
        packer.push(ids, is_target)
        if packer.num_full >= packing.LOOKAHEAD:
            yield packer.take(packer.num_full)
    packer.finish()
    yield packer.take(packer.num_full)


def packed_by_stream(packer: object, documents: list[Tokens]) -> Iterator[PackedRows]:
    """What the former packer makes of them."""
    for ids, is_target in documents:
        packer.push(ids, is_target)
        if packer.num_full >= packing.LOOKAHEAD:
            yield packer.take(packer.num_full)
    yield packer.take(packer.num_left)


def packer_of(commit: str) -> ModuleType:
    """`qat/data/packing.py` as it was in a commit."""
    words = ["git", "show", f"{commit}:qat/data/packing.py"]
    source = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    module = ModuleType("packing_then")
    exec(compile(source, "packing_then", "exec"), vars(module))  # noqa: S102 - of this repository
    return module


if __name__ == "__main__":
    app()
