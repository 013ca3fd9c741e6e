"""Judge our students and coreai-opt's palettes on WikiText-2, as lm-eval's task `wikitext` does.

python measure_wikitext.py TEACHER wiki.test.raw --shortest 6 --palettes 2 4 --text ROWS.jsonl \
    --students DIR/ane2 DIR/run_ane2 --figures figures.jsonl

A word's perplexity is `exp(nats of all tokens / words)`: words between white space of the raw page,
tokens of the page without the data set's spaces, each page after one begin token, in windows of
the model's own length. KL in nats a token, from the float model, over the whole vocabulary.

The palettes are of Apple's coreai-opt: levels for each 16 rows of a linear by its exact k-means
(`k-means`), of rows divided by a scale each (`k-means, row scales`), or with squared gradients of
the float model's loss as weights (`sensitive k-means`, on sequences of `--text`). Embedding and
head stay in floating point there, and have 8 bits in our students.

Shapes: S tokens, D model width, V words.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from coreai_opt import palettization as apple
from coreai_opt.common import ExportBackend
from coreai_opt.palettization import spec as granularity
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from figures import record

from qat.models.cost import linear_bits
from qat.models.load import load_model, load_tokenizer

ROWS, CHUNK = 16, 256
TEXT_LENGTH = 128
WAYS = ("k-means", "sensitive k-means", "k-means, row scales")


class Window(NamedTuple):
    """Tokens that are read at once, of which some are predicted."""

    ids: Tensor
    """`(1, S)`."""
    targets: Tensor
    """The tokens after the last places."""


def pages(path: Path) -> Iterator[str]:
    """Yield the pages of a raw file of WikiText, as EleutherAI/wikitext_document_level does."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        title = line.replace("= = =", "===").replace("= =", "==").strip()
        if title.startswith("= ") and title.endswith(" ="):
            if "\n".join(lines).strip():
                yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def windows(page: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[Window]:
    """Yield the windows of a page, each token being predicted once."""
    ids = tokenizer(wikitext_detokenizer({"page": page}), add_special_tokens=False).input_ids
    found = get_rolling_token_windows(ids, tokenizer.bos_token_id, length, 1)
    for context, targets in map(make_disjoint_window, found):
        yield Window(torch.tensor([context + targets[:-1]]), torch.tensor(targets))


@torch.no_grad()
def hidden(model: PreTrainedModel, window: Window) -> Tensor:
    """Return what the head reads at the places that predict, `(S, D)`."""
    states = model.model(input_ids=window.ids, use_cache=False).last_hidden_state
    return states[0, -len(window.targets) :]


@torch.no_grad()
def judge(
    heads: tuple[nn.Module, nn.Module], text: list[Window], known: list[Tensor], found: list[Tensor]
) -> Tensor:
    """Return sums over the tokens of `text`: nats, KL from the teacher, equal top-1 tokens.

    `heads` read what teacher and student have `known` and `found` of the text.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for window, before, after in zip(text, known, found, strict=True):
        for part in torch.arange(len(before)).split(CHUNK):
            p, q = heads[0](before[part]).log_softmax(-1), heads[1](after[part]).log_softmax(-1)
            sums[0] += F.nll_loss(q, window.targets[part], reduction="sum").double()
            sums[1] += (p.exp() * (p - q)).sum().double()
            sums[2] += (p.argmax(-1) == q.argmax(-1)).sum().double()
    return sums


def palettize(model: PreTrainedModel, bits: int, way: str, ids: Tensor) -> PreTrainedModel:
    """Return `model` with the linears of its layers as coreai-opt's palettes."""
    rows = granularity.PerGroupedChannelGranularity(axis=0, group_size=ROWS)
    spec = apple.PalettizationSpec(
        n_bits=bits, granularity=rows, enable_per_channel_scale=way == WAYS[2]
    )
    chosen = apple.ModuleKMeansPalettizerConfig(
        op_input_spec=None, op_output_spec=None, op_state_spec={"weight": spec}
    )
    config = apple.KMeansPalettizerConfig(
        global_config=chosen, module_name_configs={"lm_head": None}
    )
    palettizer = apple.KMeansPalettizer(model, config)
    prepared = palettizer.prepare((ids[:1],))
    if way == WAYS[1]:
        with palettizer.calibration_mode(loss_fn=next_token_loss) as calibration:
            for row in ids:
                calibration.step(prepared(row[None], use_cache=False), row[None])
    return palettizer.finalize(backend=ExportBackend.Torch).eval()


def next_token_loss(output: object, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next tokens."""
    return F.cross_entropy(output.logits[0, :-1], ids[0, 1:])


def sequences(path: Path, tokenizer: PreTrainedTokenizerBase, most: int) -> Tensor:
    """Return the first tokens of rows of text, `(most, TEXT_LENGTH)` or fewer sequences."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    ids = tokenizer("\n".join(row["text"] for row in rows), add_special_tokens=False).input_ids
    count = min(most, len(ids) // TEXT_LENGTH)
    return torch.tensor(ids[: count * TEXT_LENGTH]).view(count, TEXT_LENGTH)


def main() -> None:
    """Print and record perplexity, KL and equal top-1 tokens of each model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher")
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("--shortest", type=int, default=0, help="the shortest pages only")
    parser.add_argument("--palettes", type=int, nargs="*", default=[])
    parser.add_argument("--ways", nargs="*", default=WAYS)
    parser.add_argument("--text", type=Path, required=True, help="rows for sensitive k-means")
    parser.add_argument("--sequences", type=int, default=24, help="of --text")
    parser.add_argument("--students", type=Path, nargs="*", default=[])
    parser.add_argument("--figures", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)

    def load(path: str) -> PreTrainedModel:
        return load_model(path, device="cpu", dtype="fp32").model.eval()

    teacher, tokenizer = load(given.teacher), load_tokenizer(given.teacher)
    raw = sorted(pages(given.wikitext), key=len)[: given.shortest or None]
    words = sum(len(re.split(r"\s+", page)) for page in raw)
    length = teacher.config.max_position_embeddings
    text = [window for page in raw for window in windows(page, tokenizer, length)]
    tokens = sum(len(window.targets) for window in text)
    known = [hidden(teacher, window) for window in text]
    print(f"{len(raw)} pages, {words} words, {tokens} tokens", flush=True)

    def note(what: str, model: PreTrainedModel, bits: float) -> None:
        states = known if model is teacher else [hidden(model, window) for window in text]
        heads = teacher.lm_head, model.lm_head
        nats, kl, same = judge(heads, text, known, states).tolist()
        found = {"kl": kl / tokens, "top1": same / tokens, "linear_bits": bits}
        perplexity = math.exp(nats / words)
        print(f"{what}: {perplexity:.3f} {json.dumps(found)}", flush=True)
        measured = {**found, "pages": len(raw), "words": words, "tokens": tokens}
        name = f"wikitext_word_ppl {Path(given.teacher).stem}, {what}"
        record(given.figures, name, perplexity, "1", "none", measured=measured)

    note("float", teacher, 32.0)
    for student in given.students:
        model = load(str(student))
        note(student.name, model, linear_bits(model))
    ids = sequences(given.text, tokenizer, given.sequences)
    for way in given.ways:
        for bits in given.palettes:
            model = palettize(load(given.teacher), bits, way, ids)
            note(f"{way}, {bits} bits", model, float(bits))


if __name__ == "__main__":
    main()
