"""The tiny teacher's text: documents, their split, a tokenizer, and rows packed from them.

The documents are the docstrings of one Python's standard library, frozen in `qat/data`: another
Python has others, and what is judged on them could not be compared.

Shapes: N rows, L tokens a row.
"""

import ast
import gzip
import importlib.util
import inspect
import json
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qat.data.config import CacheSettings
from qat.data.packing import NO_LABEL
from qat.data.sources import open_source
from qat.data.stream import divided, split_of

MIN_CHARACTERS = 80
SKIPPED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}"""
SETTINGS = CacheSettings(data="stdlib", sequence_length=512)
"""Settings of the split of `qat cache --data stdlib`, which does not depend on the length."""
NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Corpus:
    """Documents in two disjoint lists."""

    train: list[str]
    held_out: list[str]

    @property
    def hash(self) -> str:
        """12 hex digits of both."""
        both = "\0".join([*self.train, "", *self.held_out])
        return xxhash.xxh3_64_hexdigest(both.encode())[:12]


def read_corpus() -> Corpus:
    """Return the training and held-out documents that `qat cache --data stdlib` uses by default."""
    return split(list(open_source("stdlib").documents))


def split(documents: list[str]) -> Corpus:
    """The documents by the split that `qat cache` gives them by default."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for document, side in divided(documents, SETTINGS):
        parts[side].append(document)
    return Corpus(**parts)


def freeze(path: Path, documents: list[str]) -> Corpus:
    """Write `documents` to `path`, gzipped JSON lines, and return the corpus that they are.

    A document that is held out is left out if a tenth of its runs of eight words stand in training
    documents, or if it is near-identical to one: who learned those would be judged by what it read.
    """
    sides = [split_of(document, SETTINGS.seed, SETTINGS.held_out) for document in documents]
    runs = [runs_of_words(document) for document in documents]
    pairs = zip(runs, sides, strict=True)
    learned = set().union(*(own for own, side in pairs if side == "train"))
    apart = [
        document
        for document, own, side in zip(documents, runs, sides, strict=True)
        if side == "train" or len(own & learned) < len(own) / 10
    ]
    kept = [
        document
        for document, side in divided(apart, SETTINGS)
        if side == split_of(document, SETTINGS.seed, SETTINGS.held_out)
    ]
    lines = "".join(json.dumps({"text": document}) + "\n" for document in kept)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    return split(kept)


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """All runs of eight words, or the whole of a shorter text."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 8]) for i in range(max(1, len(words) - 7))}


# ---- what ships with a Python


def stdlib_documents() -> Iterator[str]:
    """Docstrings of this Python's standard library and the topics of `pydoc`, each text once.

    Sources are parsed, never imported, in the sorted order of their paths. Texts shorter than 80
    characters are left out.
    """
    seen = set()
    for text in _all_texts():
        if len(text) >= MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield text


def _all_texts() -> Iterator[str]:
    paths = []
    for folder, below, files in os.walk(sysconfig.get_path("stdlib")):
        below[:] = set(below) - SKIPPED_DIRECTORIES
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths):
        yield from docstrings(path.read_bytes())
    if importlib.util.find_spec("pydoc_data") is not None:
        from pydoc_data.topics import topics

        yield from (inspect.cleandoc(topics[name]) for name in sorted(topics))


def docstrings(source: bytes) -> Iterator[str]:
    """The dedented docstrings of a module, its classes and functions, in the order of the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text


# ---- tokens


def as_chat(document: str) -> str:
    """A document as one exchange: its first line is the question, the rest the answer."""
    question, _, answer = document.partition("\n")
    thought = NO_THOUGHT if len(document) % 2 else ""
    return (
        f"<|im_start|>user\n{question.strip()}<|im_end|>\n"
        f"<|im_start|>assistant\n{thought}{answer.strip()}"
    )


def train_tokenizer(documents: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen3's special tokens and a ChatML template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    thoughts = [AddedToken(token, normalized=False) for token in ("<think>", "</think>")]
    tokenizer.add_tokens(thoughts)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    """Token ids of each document, the end token last."""
    encoded = tokenizer(documents, return_attention_mask=False, verbose=False)["input_ids"]
    return [[*tokens, tokenizer.eos_token_id] for tokens in encoded]


def pack(documents: list[list[int]], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Documents end to end in rows: ids, positions, labels, each `(N, L)` int64.

    Positions restart with each document and row; the first token of a document is not a label.
    """
    ids = torch.tensor([token for document in documents for token in document])
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[torch.tensor([0, *map(len, documents[:-1])]).cumsum(0)] = True
    labels = torch.cat([ids[1:].masked_fill(starts[1:], NO_LABEL), torch.tensor([NO_LABEL])])
    pad = -len(ids) % length
    ids_NL = F.pad(ids, (0, pad)).view(-1, length)
    labels_NL = F.pad(labels, (0, pad), value=NO_LABEL).view(-1, length)
    starts_NL = F.pad(starts, (0, pad)).view(-1, length)
    starts_NL[:, 0] = True
    steps_NL = torch.arange(length).expand_as(ids_NL)
    return ids_NL, steps_NL - (steps_NL * starts_NL).cummax(1).values, labels_NL
