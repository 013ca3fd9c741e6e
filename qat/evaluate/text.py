"""A text as batches: of overlapping windows, each token scored once, or packed as in a cache.

Shapes: N tokens of the text, B windows, S tokens in a window.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.data import packing
from qat.data.batch import NO_LABEL, Batch
from qat.data.chat import Document, render
from qat.data.text import begin_token, encode, end_token
from qat.errors import ConfigError, DataError
from qat.logs import progress


class Text(NamedTuple):
    """A text as a tokenizer sees it."""

    ids: Tensor
    """`(N,)` int64, with the tokens that the tokenizer puts around a text."""
    num_bytes: int
    """Length in UTF-8."""
    begin: int | None = None
    """`qat.data.text.begin_token`, which `ids` then begin with."""


class Window(NamedTuple):
    """Tokens `begin` to `end` of a text; those from `first_scored` on are predicted."""

    begin: int
    end: int
    first_scored: int


def read_text(path: Path, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Read and tokenize a UTF-8 file.

    Raises:
        DataError: no such file, not UTF-8, or fewer than two tokens.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected a UTF-8 text file; check --text"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8; expected a UTF-8 text file; convert it first"
        ) from None
    ids, begin = tokenizer(content, verbose=False)["input_ids"], begin_token(tokenizer)
    if begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    ids = torch.tensor(ids, dtype=torch.int64)
    if len(ids) < 2:
        raise DataError(f"{path}: holds {len(ids)} tokens; expected at least 2; give a longer text")
    return Text(ids, len(content.encode()), begin)


def windows(num_tokens: int, context: int, stride: int) -> list[Window]:
    """Windows of `context` tokens every `stride` that score each token but the first once.

    All but the last have `context` tokens; each token after the first window sees at least
    `context - stride` tokens before it.

    Raises:
        ConfigError: `stride` leaves tokens out because it is not less than `context`.
    """
    if stride >= context:
        raise ConfigError(
            f"stride={stride} with context={context}; expected a stride below the context, so that "
            f"every token has one before it; use --stride {max(context // 2, 1)}"
        )
    found = [Window(0, min(context, num_tokens), 1)]
    while found[-1].end < num_tokens:
        begin = found[-1].begin + stride
        found.append(Window(begin, min(begin + context, num_tokens), found[-1].end))
    return found


def text_batches(
    ids: Tensor, context: int, stride: int, batch_size: int, *, begin: int | None = None
) -> Iterator[Batch]:
    """The windows of a text as batches without a teacher's word, with a progress bar.

    The mask is true where a window's prediction is scored.

    Args:
        ids: `(N,)` int64.
        context: tokens in a window.
        stride: tokens from one window to the next, below `context`.
        batch_size: windows in a batch.
        begin: takes the place of each window's first token, which is never scored: models that
            learned with it are at a loss without it.

    Raises:
        ConfigError: `stride` is not less than `context`.
    """
    spans = windows(len(ids), context, stride)
    # the last window may be shorter: it goes alone
    whole, last = spans[:-1], spans[-1:]
    groups = [whole[start : start + batch_size] for start in range(0, len(whole), batch_size)]
    with progress("judging on the text", len(spans), "windows") as ticker:
        for group in [*groups, last]:
            yield _window_batch(ids, group, begin)
            ticker.advance(len(group))


def _window_batch(ids: Tensor, group: list[Window], begin: int | None) -> Batch:
    input_ids = torch.stack([ids[window.begin : window.end] for window in group])
    if begin is not None:
        input_ids[:, 0] = begin
    B, S = input_ids.shape
    position_ids = torch.arange(S).expand(B, S)
    labels = torch.cat([input_ids[:, 1:], torch.full((B, 1), NO_LABEL)], dim=1)
    predicted = position_ids + 1 + torch.tensor([[window.begin] for window in group])
    is_scored = predicted >= torch.tensor([[window.first_scored] for window in group])
    return _without_teacher(input_ids, position_ids, is_scored & (labels != NO_LABEL), labels)


def packed_batches(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    max_sequences: int,
    batch_size: int,
) -> list[Batch]:
    """Documents in sequences of `length` tokens as a cache packs them, without a teacher's word.

    No document sees another one; the last sequence is padded if they end before `max_sequences`.

    Raises:
        DataError: the documents hold no text.
    """
    packer = packing.Packer(length, end_token(tokenizer), begin_token(tokenizer))
    for document in documents:
        for ids, _ in encode(render(document, tokenizer, "none"), tokenizer):
            if len(ids) > 1:
                packer.push(ids)
        if packer.num_full >= max_sequences:
            break
    if packer.num_left == 0:
        raise DataError("the text holds no token to judge by; expected some; name another text")
    packed = packer.take(min(max_sequences, packer.num_left))
    tokens, starts, mask = (
        torch.from_numpy(array).split(batch_size)
        for array in (packed.tokens.astype("int64"), packed.starts, packed.mask)
    )
    return [
        _without_teacher(
            ids, packing.position_ids(begins), counts, packing.labels(ids, begins, counts)
        )
        for ids, begins, counts in zip(tokens, starts, mask, strict=True)
    ]


def _without_teacher(
    input_ids: Tensor, position_ids: Tensor, mask: Tensor, labels: Tensor
) -> Batch:
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
