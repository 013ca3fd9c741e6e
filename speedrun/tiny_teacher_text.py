"""The tiny teacher's text: documents, their split, a tokenizer, and rows packed from them.

Shapes: N rows, L tokens a row.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from qat.data.batch import NO_LABEL
from qat.data.config import CacheSettings
from qat.data.split import split_of
from qat.data.stdlib_text import stdlib_documents

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
NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass
class Corpus:
    """Documents in two disjoint lists, and where they came from."""

    train: list[str]
    held_out: list[str]
    python: str
    hash: str


def read_corpus(path: Path | None) -> Corpus:
    """The documents of this Python's standard library, or of a file that `write_corpus` made."""
    if path is None:
        python, documents = platform.python_version(), list(stdlib_documents())
    else:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        python, documents = json.loads(head)["python"], [json.loads(line)["text"] for line in lines]
    digest = xxhash.xxh3_64_hexdigest("\0".join(documents).encode())[:12]
    return Corpus(*split(documents), python, digest)


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """The documents that `qat cache` trains on by default, and those that it holds out."""
    seed = CacheSettings.model_fields["seed"].default
    fraction = CacheSettings.model_fields["held_out"].default
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    for document in documents:
        parts[split_of(document, seed, fraction)].append(document)
    return parts["train"], parts["held_out"]


def write_corpus(path: Path) -> None:
    """Write this Python's documents as JSON lines, its version first."""
    lines = [{"python": platform.python_version()}]
    lines += [{"text": document} for document in stdlib_documents()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


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
