"""Prompts of a corpus, from a file or from the begin token, and the text of a sampled row."""

import logging
import re
import sys
from collections.abc import Iterable
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from qat.data.documents import Document, Message
from qat.data.sources import Sourced, mixtures_in, open_source
from qat.data.text import (
    MODES,
    Rendering,
    begin_token,
    check_vocabulary,
    encoded,
    render_prompt,
    text_ids,
)
from qat.errors import ConfigError, DataError
from qat.extensions.decode.config import SampleSettings
from qat.models.language_model import LanguageModel

logger = logging.getLogger(__name__)

OPEN_THOUGHT = re.compile(r"<think>\s*\Z")


class Prompt(NamedTuple):
    """The tokens that the model continues, and their form in the row."""

    ids: list[int]
    """Token ids, at least one."""
    said: str | list[Message]
    """A text, or the messages of a chat before the answer."""
    mode: str
    """Thinking mode, one of `MODES`."""
    opening: str = ""
    """Start of the answer that the template has already written."""
    source: str = ""
    """Name of the text that it is from; empty if that has none."""


def open_prompts(
    settings: SampleSettings, model: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[int]]:
    """Return all prompts, one per document and thinking mode, and the number of each row's prompt.

    Without prompts all rows have the same one, a begin token. Several sources come in turns.

    Raises:
        ConfigError: a prompt leaves no room in the model's context or holds a token without an
            embedding, chats come without a chat template, or no token begins a text.
        DataError: the prompts cannot be read, a chat has no question, or a template fails.
    """
    if settings.prompts is None:
        prompts, order = [_from_nothing(model, tokenizer)], [0] * settings.rows
    elif (mixtures := mixtures_in(settings.prompts)) is not None:
        prompts, order = _mixed(mixtures, settings, tokenizer)
    else:
        source = open_source(
            settings.prompts, settings.format, settings.text_field, setting="prompts"
        )
        prompts = _first(source.rows, settings.rows or None, settings, tokenizer)
        rows = range(min(settings.rows or sys.maxsize, len(prompts) * settings.samples))
        order = [row // settings.samples for row in rows]
    if not all(prompt.ids for prompt in prompts):
        raise DataError(
            "a prompt holds no token, expected something to continue; leave it out, mend the chat "
            "template that writes nothing, or begin from nothing with --rows N and no --prompts"
        )
    largest = max(max(prompt.ids) for prompt in prompts)
    check_vocabulary(largest, model.config.vocab_size)
    long = [n for n, prompt in enumerate(prompts) if len(prompt.ids) >= model.longest]
    if long:
        first, others = prompts[long[0]], len(long) - 1
        raise ConfigError(
            f"prompt {long[0] + 1} ({first.said!r:.60}) has {len(first.ids)} tokens, but the "
            f"model's window has {model.longest}, expected room for an answer; shorten it or leave "
            "it out" + (f", and {others} more that are too long" if others else "")
        )
    return prompts, order


def _first(
    rows: Iterable[Sourced],
    most: int | None,
    settings: SampleSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    """Return the prompts for the first `most` rows to sample, or all."""
    found = (
        (prompt._replace(source=row.source), text)
        for row in rows
        for prompt, text in _prompts_of(row.document, settings, tokenizer)
    )
    asked = list(islice(found, None if most is None else -(-most // settings.samples)))
    texts = [text for _, text in asked if text is not None]
    found = iter(encoded(texts, tokenizer, is_templated=True, has_spans=False))
    return [each if text is None else each._replace(ids=next(found).ids) for each, text in asked]


def _mixed(
    mixtures: Any,  # noqa: ANN401
    settings: SampleSettings,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[Prompt], list[int]]:
    """Return the prompts of all sources, and the number of each row's: exact shares, in turns.

    A source with too few prompts repeats them. Without a number of rows they are as many as repeat
    none.

    Raises:
        ConfigError: prompts would come again without a draw, so that the answers would be the same.
    """
    opened = mixtures.open_parts(
        settings.prompts, settings.format, settings.text_field, setting="prompts"
    )
    shares = [part.share for part, _, _ in opened]
    counts = mixtures.counts_of(settings.rows, shares) if settings.rows else [None] * len(shares)
    found: list[list[Prompt]] = []
    for (_, name, source), most in zip(opened, counts, strict=True):
        rows = (Sourced(document, name) for document in source.documents)
        found.append(_first(rows, most, settings, tokenizer))
    if not settings.rows:
        whole = (
            len(own) * settings.samples / share for own, share in zip(found, shares, strict=True)
        )
        counts = mixtures.counts_of(int(round(min(whole), 6)), shares)
    for (part, name, _), own, count in zip(opened, found, counts, strict=True):
        if count <= len(own) * settings.samples:
            continue
        if settings.temperature == 0:
            raise ConfigError(
                f"{part.place} has {len(own)} prompts for its share of {count} rows, and at "
                "temperature=0 the same prompt has the same answer, expected enough of them; lower "
                "--rows or its share, or raise --temperature"
            )
        logger.info(
            "%s has %d prompts for its %d rows: they come again, with other draws",
            *(name, len(own), count),
        )
    starts = [0, *accumulate(map(len, found))]
    seen, order = [0] * len(found), []
    for turn in mixtures.in_turns(counts):
        order.append(starts[turn] + seen[turn] // settings.samples % len(found[turn]))
        seen[turn] += 1
    return list(chain.from_iterable(found)), order


def row_text(
    prompt: Prompt, new_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, object], str]:
    """Return a row in the format of `qat cache --data`, and the model's part of its text.

    `new_ids` exclude the end token; special tokens among them are dropped.
    """

    def decoded(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    if not isinstance(prompt.said, str):
        answer = decoded(new_ids).strip()
        turn = {"role": "assistant", "content": prompt.opening + answer}
        before = [{name: each[name] for name in each if name != "tools"} for each in prompt.said]
        tools = {name: each[name] for each in prompt.said for name in each if name == "tools"}
        return {"messages": [*before, turn], **tools}, answer
    # decode prompt and answer together: some tokenizers drop a leading space
    answer = decoded([*prompt.ids, *new_ids])[len(decoded(prompt.ids)) :].rstrip()
    is_from_nothing = len(prompt.ids) == 1
    return {"text": prompt.said + (answer.lstrip() if is_from_nothing else answer)}, answer


def _from_nothing(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Return a prompt of only the begin token, written out in the row unless readers add it."""
    begin = begin_token(tokenizer)
    known = (begin, tokenizer.bos_token_id, getattr(model.config, "bos_token_id", None))
    start = next((one for one in (*known, tokenizer.eos_token_id) if one is not None), None)
    if start is None:
        raise ConfigError(
            "the tokenizer has no token that begins or ends a text, expected one to begin from; "
            "give --prompts FILE, or set bos_token in its tokenizer_config.json"
        )
    return Prompt([start], "" if start == begin else tokenizer.decode([start]), "none")


def _prompts_of(
    document: Document, settings: SampleSettings, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Prompt, Rendering | None]]:
    """Return a document's prompts, one per thinking mode.

    One that a template wrote has no tokens yet; its text comes with it.
    """
    if isinstance(document, str):
        if settings.raw or not tokenizer.chat_template:
            return [(Prompt(text_ids(document, tokenizer), document, "none"), None)]
        document = [{"role": "user", "content": document}]
    while document and document[-1]["role"] == "assistant":
        document = document[:-1]
    if not document:
        raise DataError(
            "a chat of the prompts holds answers alone, expected something to answer; mend the row"
        )
    prompts = []
    for mode in MODES[settings.thinking]:
        text = render_prompt(document, tokenizer, mode)
        opening = "<think>\n" if OPEN_THOUGHT.search(text.text) else ""
        ids = [] if text.is_templated else text_ids(text.text, tokenizer)
        prompts.append((Prompt(ids, document, mode, opening), text if text.is_templated else None))
    return prompts
