"""Turn a text into batches of overlapping windows, in which each token is scored once.

Shapes: N tokens of a document, B windows, S tokens in a window.
"""

import logging
import math
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from qat.data.config import chosen_targets
from qat.data.packing import NO_LABEL, Batch
from qat.data.sources import holds_rows, open_source, whole_text
from qat.data.text import (
    Tokens,
    check_vocabulary,
    encode,
    render,
    special_tokens,
    text_ids,
)
from qat.errors import ConfigError, DataError
from qat.evaluate.config import EvalConfig
from qat.evaluate.divergence import cached_divergence
from qat.logs import progress
from qat.models.language_model import LanguageModel

logger = logging.getLogger(__name__)


class Text(NamedTuple):
    """A tokenized text: one document per row of a file of rows, one in all for other files."""

    documents: list[Tokens]
    """Documents with the special tokens that the tokenizer or the chat template adds; rows also end
    with the end token, as in a cache."""
    num_bytes: int  # length in UTF-8 bytes; if only assistants count, the length of what they say
    special: frozenset[int] = frozenset()  # the tokenizer's `qat.data.text.special_tokens`


class Window(NamedTuple):
    """Tokens `begin` to `end` of a text; those from `first_scored` on are scored."""

    begin: int
    end: int
    first_scored: int


def read_text(config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Read and tokenize the text file: rows as in `qat cache`, any other file as one text.

    Raises:
        DataError: the file is missing or not UTF-8, a row is malformed, or nothing is scored.
        ConfigError: `targets=assistant` for plain text, or chats need a template.
    """
    if holds_rows(config.text):
        text = _rows_text(config, tokenizer)
    else:
        chosen_targets(config.targets, "plain", f"text={config.text}")
        content = whole_text(config.text)
        tokens = Tokens(text_ids(content, tokenizer), None)
        text = Text([tokens], len(content.encode()), special_tokens(tokenizer))
    if not any(_targets(tokens)[1:].any() for tokens in text.documents):
        count = sum(len(tokens.ids) for tokens in text.documents)
        raise DataError(
            f"{config.text}: holds {count} tokens, and none that counts behind another one; "
            "expected at least 2; give a longer text"
        )
    return text


def _rows_text(config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Text:
    source = open_source(str(config.text), config.format, config.text_field, setting="text")
    targets = chosen_targets(config.targets, source.format, f"text={config.text}")
    rendered = (
        render(document, tokenizer, config.thinking, targets) for document in source.documents
    )
    renderings = list(chain.from_iterable(rendered))
    num_bytes = sum(
        len(rendering.text[begin:end].encode())
        for rendering in renderings
        for begin, end in (
            ((0, None),) if rendering.target_spans is None else rendering.target_spans
        )
    )
    text = Text(encode(renderings, tokenizer), num_bytes, special_tokens(tokenizer))
    if targets == "assistant":
        counts = sum(int(_targets(tokens).sum()) for tokens in text.documents)
        total = sum(len(tokens.ids) for tokens in text.documents)
        logger.info(
            "%s: what assistants say counts, %d of the %d tokens of %d chats; --targets all "
            "counts all",
            config.text,
            counts,
            total,
            len(renderings),
        )
    return text


def _targets(tokens: Tokens) -> Tensor:
    """Return which tokens count, `(N,)` bool."""
    if tokens.is_target is None:
        return torch.ones(len(tokens.ids), dtype=torch.bool)
    return torch.from_numpy(tokens.is_target)


def windows(num_tokens: int, context: int, stride: int) -> list[Window]:
    """Return windows of `context` tokens every `stride` that score each token but the first once.

    All but the last have `context` tokens; each token after the first window has at least
    `context - stride` tokens of context. `stride` is below `context`
    (`EvalConfig.check_named`).
    """
    found = [Window(0, min(context, num_tokens), 1)]
    while found[-1].end < num_tokens:
        begin = found[-1].begin + stride
        found.append(Window(begin, min(begin + context, num_tokens), found[-1].end))
    return found


def text_batches(text: Text, context: int, stride: int, batch_size: int) -> Iterator[Batch]:
    """Yield the windows of each document as batches without teacher targets, with a progress bar.

    The mask is true where a window's prediction is scored; windows without such a position are
    dropped. If a document's first token is special, it replaces the first token of each of its
    windows, which is never scored: models trained with such a token in front fail without it.

    Args:
        text: documents to score.
        context: tokens in a window.
        stride: tokens between the starts of two windows, below `context`.
        batch_size: windows in a batch.
    """
    whole, last = [], []
    for tokens in text.documents:
        ids, counts = torch.tensor(tokens.ids, dtype=torch.int64), _targets(tokens)
        pieces = [_Piece(ids, counts, each) for each in windows(len(ids), context, stride)]
        whole += pieces[:-1]
        last += pieces[-1:]
    # last windows may be shorter: sort them longest first, and give the shortest a batch of its own
    last.sort(key=lambda piece: piece.window.begin - piece.window.end)
    pieces = [piece for piece in (*whole, *last) if piece.is_scored().any()]
    *many, one = pieces
    groups = [many[start : start + batch_size] for start in range(0, len(many), batch_size)]
    with progress("judging on the text", len(pieces), "windows") as ticker:
        for group in [*groups, [one]]:
            yield _window_batch(group, text.special)
            ticker.advance(len(group))


class _Piece(NamedTuple):
    """A window of a document."""

    ids: Tensor  # token ids of the whole document, `(N,)` int64
    counts: Tensor  # flags of the tokens that count, `(N,)` bool
    window: Window

    def input_ids(self, special: frozenset[int]) -> Tensor:
        """Return the window's tokens, the first replaced by the document's first if special."""
        ids = self.ids[self.window.begin : self.window.end].clone()
        if int(self.ids[0]) in special:
            ids[0] = self.ids[0]
        return ids

    def is_scored(self) -> Tensor:
        """Return where the window's predictions count, `(S,)` bool: never at its last token."""
        begin, end, first_scored = self.window
        scored = self.counts[begin + 1 : end] & (torch.arange(begin + 1, end) >= first_scored)
        return torch.nn.functional.pad(scored, (0, 1))


def _window_batch(group: list[_Piece], special: frozenset[int]) -> Batch:
    input_ids = pad_sequence([piece.input_ids(special) for piece in group], batch_first=True)
    mask = pad_sequence([piece.is_scored() for piece in group], batch_first=True)
    # positions of padding are 0, so that a window does not seem longer (rotary scaling)
    position_ids = pad_sequence(
        [torch.arange(piece.window.end - piece.window.begin) for piece in group], batch_first=True
    )
    labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=NO_LABEL)
    return without_teacher(input_ids, position_ids, mask, labels)


def without_teacher(input_ids: Tensor, position_ids: Tensor, mask: Tensor, labels: Tensor) -> Batch:
    """Return a batch of sequences without teacher targets; each argument is `(B, S)`."""
    B, S = input_ids.shape
    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        mask=mask,
        labels=labels,
        topk_ids=torch.empty(B, S, 0, dtype=torch.int64),
        topk_logprobs=torch.empty(B, S, 0),
        tail_logprob=torch.zeros(B, S),
        sample_ids=torch.empty(B, S, 0, dtype=torch.int64),
        sample_counts=torch.empty(B, S, 0),
    )


# Perplexity of a text over sliding windows.


class Perplexity(NamedTuple):
    """The perplexity of a model on a text."""

    num_tokens: int  # scored: all but a text's first; in chats the assistants' tokens
    nats_per_token: float  # mean of `-log q` over the tokens scored
    ppl: float  # perplexity `exp(nats_per_token)`; depends on the tokenizer
    bits_per_byte: float  # bits of the tokens scored over bytes of the text; whatever the tokenizer


def text_perplexity(
    model: LanguageModel, text: Text, *, context: int, stride: int, batch_size: int
) -> Perplexity:
    """Compute the perplexity of a text over windows of `context` tokens every `stride`.

    Each token is scored once, by the method of Hugging Face's guide to the perplexity of
    fixed-length models: it has at least `context - stride` tokens of context, except in the first
    window.

    Raises:
        ConfigError: `context` exceeds the model's positions, or the model has no embedding for a
            token.
    """
    check_context(model, context)
    largest = max(max(tokens.ids, default=0) for tokens in text.documents)
    check_vocabulary(largest, model.config.vocab_size)
    batches = text_batches(text, context, stride, batch_size)
    judged = cached_divergence(model, batches)
    nats = math.log(judged.ppl)
    bits = nats * judged.num_tokens / math.log(2)
    return Perplexity(judged.num_tokens, nats, judged.ppl, bits / text.num_bytes)


def check_context(model: LanguageModel, context: int) -> None:
    """Refuse windows that are longer than the model's context.

    Raises:
        ConfigError: `context` exceeds the model's positions.
    """
    limit = model.longest
    if context > limit:
        raise ConfigError(
            f"context={context}, but the model has positions for {limit} tokens; "
            f"use --context {limit} or less"
        )
