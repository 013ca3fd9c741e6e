"""From a document (text or chat) to the texts that are tokenised.

A chat is rendered with the tokenizer's own template, once for each thinking mode asked for.
"""

import re
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from qat.data.config import Thinking
from qat.errors import ConfigError

Message = dict[str, str]
Document = str | list[Message]

MODES: dict[Thinking, tuple[str, ...]] = {
    "false": ("false",),
    "true": ("true",),
    "both": ("true", "false"),
    "none": ("none",),
    "all": ("true", "false", "none"),
}
THOUGHT = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


class Rendering(NamedTuple):
    """A text and whether a chat template has already written its special tokens."""

    text: str
    is_templated: bool


def render(
    document: Document, tokenizer: PreTrainedTokenizerBase, thinking: Thinking
) -> list[Rendering]:
    """The texts of a document: one for plain text, one for each thinking mode of a chat.

    `false` drops what assistants thought and the template's empty thinking blocks, `true` leaves
    thinking to the template, `none` joins the messages by blank lines without a template.

    Raises:
        ConfigError: a chat is to be templated, and the tokenizer has no template.
    """
    if isinstance(document, str):
        return [Rendering(document, is_templated=False)]
    return [_render_chat(document, tokenizer, mode) for mode in MODES[thinking]]


def _render_chat(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, mode: str
) -> Rendering:
    if mode == "none":
        text = "\n\n".join(message["content"] for message in messages)
        return Rendering(text, is_templated=False)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"thinking={mode} needs a chat template, but the tokenizer has none; "
            "use --thinking none or the tokenizer of a chat model"
        )
    if mode == "true":
        return Rendering(_template(messages, tokenizer, enable_thinking=True), is_templated=True)
    thoughtless = [_without_thoughts(message) for message in messages]
    text = _template(thoughtless, tokenizer, enable_thinking=False)
    return Rendering(EMPTY_THOUGHT.sub("", text), is_templated=True)


def _template(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool
) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=enable_thinking)


def _without_thoughts(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    return {"role": "assistant", "content": THOUGHT.sub("", message["content"])}
