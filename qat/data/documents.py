"""Read a text or a chat from a row of data in any of the supported formats."""

import json
import re
from typing import Any, NamedTuple

from qat.data.config import DataFormat
from qat.errors import DataError
from qat.hooks import extension

Row = dict[str, Any]
Message = dict[str, Any]
"""A turn as chat templates read it: `role` and `content`, both text, and of `reasoning_content`,
`tool_calls`, `name` and `tool_call_id` what it has. The first turn also holds the `tools` of the
chat. `weight` is 0 in an assistant's turn that does not count."""
Document = str | list[Message]
"""A text, or the messages of a chat in order."""


class Place(NamedTuple):
    """The location of a row, for error messages."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
BESIDE_TURNS = (
    *("tools", "functions", "system", "system_prompt", "history"),
    "chat_template_kwargs",
)
"""Fields of a row that change the rendering of its chat."""
IN_TURNS = ("tool_calls", "function_call", "weight")
"""Fields of a turn that is more than its text."""
CALLABLE = ("tools", "tool_calls")
"""Fields of a message with the functions that may be called, and with those that it calls."""
QUESTIONS = ("prompt", "question")
ANSWERS = ("completion", "answer", "response")
"""Field names of a question and an answer in the format `pairs`."""
NOTHING = ("", "[]", "{}", "null")
"""Texts that stand for an empty field."""
SEPARATOR = "<|endoftext|>"
SURROGATES = re.compile("[\ud800-\udfff]")
"""Lone surrogates, which are not valid in UTF-8."""


def detect(place: Place, row: Row, text_field: str) -> DataFormat:
    """Return the format that has the fields of a row.

    Raises:
        DataError: no format has them.
    """
    if not isinstance(row, dict):
        raise DataError(f"{place} is {row!r:.60}, expected an object with fields; mend the row")
    fields = row.keys()
    if "messages" in fields:
        return "messages"
    if "conversations" in fields:
        return "sharegpt"
    if {"instruction", "output"} <= fields:
        return "alpaca"
    if text_field in fields:
        return "plain"
    # an answer makes no sense without its context, which this format would drop
    if fields & set(QUESTIONS) and fields & set(ANSWERS) and "context" not in fields:
        return "pairs"
    raise DataError(
        f"{place} has the fields {sorted(fields)}, expected messages, conversations, instruction "
        f"and output, prompt and completion, question and answer, or {text_field}; "
        "name the field of a text with --text-field, or rename them"
    )


def document_of(place: Place, row: Row, data_format: DataFormat, text_field: str) -> Document:
    """Return the document of a row: a text, or a chat with its history, system text and tools.

    Raises:
        DataError: the row lacks the fields of its format, holds something that the chat would lose,
            or text that UTF-8 cannot encode.
    """
    is_text = data_format == "plain"
    document = string(place, row, text_field) if is_text else _chat(place, row, data_format)
    found = SURROGATES.search(json.dumps(document, ensure_ascii=False))
    if found is not None:
        raise DataError(
            f"{place} has {found[0]!r} in its text, half of a surrogate pair, expected whole "
            "characters; mend the row"
        )
    return document


def _chat(place: Place, row: Row, data_format: DataFormat) -> list[Message]:
    messages = _turns(place, row, data_format)
    if all(is_empty(row.get(field)) for field in BESIDE_TURNS):
        return messages
    return extension("qat.chats", "tools").with_beside(place, row, messages)


def _turns(place: Place, row: Row, data_format: DataFormat) -> list[Message]:
    """Return the turns that the format has fields for."""
    match data_format:
        case "alpaca":
            question = string(place, row, "instruction")
            if isinstance(row.get("input"), str) and row["input"].strip():
                question += "\n\n" + row["input"]
            answer = string(place, row, "output")
            return [message_of("user", question), message_of("assistant", answer)]
        case "pairs":  # either may be a list of messages
            return [*_side(place, row, QUESTIONS, "user"), *_side(place, row, ANSWERS, "assistant")]
        case "sharegpt":
            turns = _field(place, row, "conversations", list)
            return [_turn(place, turn, "from", "value") for turn in turns]
    return _messages(place, row)


def _side(place: Place, row: Row, names: tuple[str, ...], role: str) -> list[Message]:
    name = next((name for name in names if isinstance(row, dict) and name in row), names[0])
    if isinstance(row, dict) and isinstance(row.get(name), list):
        return _messages(place, row, name)
    return [message_of(role, string(place, row, name).removesuffix(SEPARATOR))]


def _messages(place: Place, row: Row, field: str = "messages") -> list[Message]:
    return [_turn(place, turn, "role", "content") for turn in _field(place, row, field, list)]


def _turn(place: Place, turn: Row, role_field: str, text_field: str) -> Message:
    role = string(place, turn, role_field)
    is_text = role in ROLES and isinstance(turn.get(text_field), str)
    if not is_text or not all(is_empty(turn.get(field)) for field in IN_TURNS):
        return extension("qat.chats", "tools").turn_of(place, turn, role_field, text_field)
    message = message_of(ROLES[role], turn[text_field])
    if isinstance(turn.get("reasoning_content"), str):
        message["reasoning_content"] = turn["reasoning_content"]
    return message


def message_of(role: str, content: str) -> Message:
    """Return a turn of text alone."""
    return {"role": role, "content": content}


def is_empty(value: object) -> bool:
    """Return whether a field holds nothing, or a text that stands for nothing."""
    return value in (None, [], {}) or (isinstance(value, str) and value.strip() in NOTHING)


def string(place: Place, row: Row, field: str) -> str:
    """Return the text in a field of a row.

    Raises:
        DataError: the row has no such field, or something else in it.
    """
    return _field(place, row, field, str)


def _field(place: Place, row: Row, field: str, kind: type) -> Any:  # noqa: ANN401
    if not isinstance(row, dict) or field not in row:
        found = f"has the fields {sorted(row)}" if isinstance(row, dict) else f"is {row!r:.60}"
        raise DataError(f"{place} {found}, expected {field!r}; mend the row or set --format")
    if not isinstance(row[field], kind) or (kind is list and not row[field]):
        expected = "a non-empty list" if kind is list else "text"
        found = f"{place} has {field}={row[field]!r:.60}"
        raise DataError(f"{found}, expected {expected}; mend the row")
    return row[field]
