"""From a document (text or chat) to the texts that are tokenised.

A chat is rendered with the tokenizer's own template, once for each thinking mode asked for. Where
its assistants speak is found by rendering it again with marks in place of their words: what lies
between the marks is the template and the other speakers, and the same in both.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

from qat.data.config import Targets, Thinking
from qat.data.sources import Document, Message
from qat.data.template import templated
from qat.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODES: dict[Thinking, tuple[str, ...]] = {
    "false": ("false",),
    "true": ("true",),
    "both": ("true", "false"),
    "none": ("none",),
    "all": ("true", "false", "none"),
}
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
LAST_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*\Z")
MARK = "qat-3f9c61d2-speaks"
"""Stands for what an assistant says: nothing that a template would trim, and nobody says it."""

Span = tuple[int, int]
"""Where something begins and ends in a text, in characters."""


class Rendering(NamedTuple):
    """A text and whether a chat template has already written its special tokens."""

    text: str
    is_templated: bool
    spoken: tuple[Span, ...] | None = None
    """What the assistants say, which alone counts; None where all of the text does."""


def num_characters(document: Document) -> int:
    """Characters of a text, or of all that is said in a chat."""
    if isinstance(document, str):
        return len(document)
    return sum(len(message["content"]) for message in document)


def render(
    document: Document,
    tokenizer: "PreTrainedTokenizerBase",
    thinking: Thinking,
    targets: Targets = "all",
) -> list[Rendering]:
    """The texts of a document: one for plain text, one for each thinking mode of a chat.

    `false` drops what assistants thought; the last answer stands behind what the template prompts
    for it without thinking, be it an empty thinking block. `true` leaves thinking to the template,
    `none` joins the messages by blank lines without one. Plain text counts whole, whatever the
    targets.

    Raises:
        ConfigError: a chat is to be templated, and the tokenizer has no template.
        DataError: the template refuses a chat; or assistants alone are to count, and a chat has
            none, or where they speak cannot be told.
    """
    if isinstance(document, str):
        return [Rendering(document, is_templated=False)]
    if targets == "assistant" and all(message["role"] != "assistant" for message in document):
        raise DataError(
            f"{_called(document)} has no assistant's turn, expected one to learn from; "
            "mend the row, or let all tokens count with --targets all"
        )
    renderings = []
    for mode in MODES[thinking]:
        text, has_block = _chat_text(document, tokenizer, mode)
        spoken = None
        if targets == "assistant":
            marked, _ = _chat_text(_marked(document), tokenizer, mode)
            spoken = _spans(text, marked, has_block=has_block)
        if spoken == ():
            raise DataError(
                f"where the assistant speaks in {_called(document)} cannot be told: the chat "
                "template writes other things around other answers; let all tokens count with "
                "--targets all, or join the messages without it by --thinking none"
            )
        renderings.append(Rendering(text, is_templated=mode != "none", spoken=spoken))
    return renderings


def _chat_text(
    messages: list[Message], tokenizer: "PreTrainedTokenizerBase", mode: str
) -> tuple[str, bool]:
    """The chat as a text, and whether empty thinking blocks in it are the prompt's, not spoken."""
    if mode == "none":
        return "\n\n".join(message["content"] for message in messages), False
    if not tokenizer.chat_template:
        raise ConfigError(
            f"thinking={mode} needs a chat template, but the tokenizer has none; "
            "use --thinking none or the tokenizer of a chat model"
        )
    if mode == "true":
        return _template(messages, tokenizer, enable_thinking=True), False
    thoughtless = [_without_thoughts(message) for message in messages]
    text = _template(thoughtless, tokenizer, enable_thinking=False)
    if messages[-1]["role"] != "assistant" or "think" not in str(tokenizer.chat_template):
        return text, False
    prompt = _template(thoughtless[:-1], tokenizer, enable_thinking=False, is_prompt=True)
    block = LAST_EMPTY_THOUGHT.search(prompt)
    if block is None:
        return text, False
    before = prompt[: block.start()]
    if text.startswith(before) and not text.startswith(prompt):
        text = prompt + text[len(before) :]
    return text, True


def _template(
    messages: list[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    enable_thinking: bool,
    is_prompt: bool = False,
) -> str:
    """The chat as the template writes it; with `is_prompt`, up to where the model is to answer."""
    try:
        return templated(
            messages, tokenizer, enable_thinking=enable_thinking, add_generation_prompt=is_prompt
        )
    except DataError as error:
        raise DataError(f"{_called(messages)}: {error}") from None


def _without_thoughts(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": THOUGHT.sub("", message["content"])}


def _marked(messages: list[Message]) -> list[Message]:
    """The chat with a mark for all that its assistants say and think."""
    mark = {"role": "assistant", "content": MARK}
    return [mark if message["role"] == "assistant" else message for message in messages]


def _spans(text: str, marked: str, *, has_block: bool) -> tuple[Span, ...]:
    """What stands in `text` where `marked` has marks; nothing if the two do not fit.

    An empty thinking block that the template puts before a mark gives way to a thought, unless it
    is the prompt's.
    """
    parts = marked.split(MARK)
    if not has_block:
        parts = [LAST_EMPTY_THOUGHT.sub("", part) for part in parts]
    first, *others = parts
    if not others or not text.startswith(first):
        return ()
    spans, begin = [], len(first)
    for part in others[:-1]:
        end = text.find(part, begin)
        if end < 0:
            return ()
        spans.append((begin, end))
        begin = end + len(part)
    end = len(text) - len(others[-1])
    if end < begin or not text.endswith(others[-1]):
        return ()
    return (*spans, (begin, end))


def _called(messages: list[Message]) -> str:
    """What a message calls a chat: how it begins."""
    return f"the chat that begins {messages[0]['content']!r:.60}"
