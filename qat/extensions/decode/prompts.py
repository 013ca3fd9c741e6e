"""Prompts of a corpus, from a file or from the begin token, and the text of a sampled row."""

import re
from itertools import islice
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from qat.data.sources import Document, Message, open_source
from qat.data.text import MODES, begin_token, check_vocabulary, render_prompt, text_ids
from qat.errors import ConfigError, DataError
from qat.extensions.decode.config import SampleSettings
from qat.models.language_model import LanguageModel

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


def open_prompts(
    settings: SampleSettings, model: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Return all prompts in order, one per document and thinking mode, or one begin token.

    Raises:
        ConfigError: a prompt leaves no room in the model's context or holds a token without an
            embedding, chats come without a chat template, or no token begins a text.
        DataError: the prompts cannot be read, a chat has no question, or a template fails.
    """
    if settings.prompts is None:
        prompts = [_from_nothing(model, tokenizer)]
    else:
        documents = open_source(
            settings.prompts, settings.format, settings.text_field, setting="prompts"
        ).documents
        asked = (p for each in documents for p in _prompts_of(each, settings, tokenizer))
        most = -(-settings.rows // settings.samples) if settings.rows else None
        prompts = list(islice(asked, most))
    largest = max(max(prompt.ids, default=0) for prompt in prompts)
    check_vocabulary(largest, model.config.vocab_size)
    long = [n for n, prompt in enumerate(prompts) if len(prompt.ids) >= model.longest]
    if long:
        first, others = prompts[long[0]], len(long) - 1
        raise ConfigError(
            f"prompt {long[0] + 1} ({first.said!r:.60}) has {len(first.ids)} tokens, but the "
            f"model's window has {model.longest}, expected room for an answer; shorten it or leave "
            "it out" + (f", and {others} more that are too long" if others else "")
        )
    return prompts


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
        return {"messages": [*prompt.said, turn]}, answer
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
) -> list[Prompt]:
    """Return a document's prompts, one per thinking mode."""
    if isinstance(document, str):
        if settings.raw or not tokenizer.chat_template:
            ids = text_ids(document, tokenizer)
            if not ids:
                raise DataError(
                    "a prompt holds no token, expected something to continue; leave it out, or "
                    "begin from nothing with --rows N and no --prompts"
                )
            return [Prompt(ids, document, "none")]
        document = [{"role": "user", "content": document}]
    while document and document[-1]["role"] == "assistant":
        document = document[:-1]
    if not document:
        raise DataError(
            "a chat of the prompts holds answers alone, expected something to answer; mend the row"
        )
    prompts = []
    for mode in MODES[settings.thinking]:
        text, is_templated, _ = render_prompt(document, tokenizer, mode)
        if is_templated:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            ids = text_ids(text, tokenizer)
        opening = "<think>\n" if OPEN_THOUGHT.search(text) else ""
        prompts.append(Prompt(ids, document, mode, opening))
    return prompts
