"""Documents from files, directories, the standard library or the `datasets` hub."""

import re
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from qat.data.chat import Document, Message
from qat.data.config import DataFormat
from qat.data.text_files import (
    SEPARATOR,
    Place,
    Row,
    Rows,
    directory_rows,
    file_rows,
    is_text_file,
)
from qat.errors import DataError, how_to_install
from qat.online import is_online

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""How a data set is called on a hub."""

STDLIB = Path(__file__).with_name("stdlib.jsonl.gz")
"""Docstrings of one Python's standard library, so that all Pythons read the same text."""

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

QUESTIONS = ("prompt", "question")
ANSWERS = ("completion", "answer", "response")
"""What the fields of `pairs` are called."""


class DataSource(NamedTuple):
    """Documents in order, the format they were read as, and a short name for the data."""

    documents: Iterable[Document]
    format: DataFormat
    name: str


def open_source(
    data: str, data_format: DataFormat = "auto", text_field: str = "text"
) -> DataSource:
    """The documents of `data`; its existence and first row are checked now, the rest on reading.

    `qat.data.text_files` says which files are read, and how. Rows count from 1 in messages.

    Raises:
        DataError: nothing is there, it is empty, or a row lacks the fields of its format.
    """
    if data == "stdlib":
        data, data_format, text_field = str(STDLIB), "plain", "text"
    rows = _placed_rows(data)
    first = next(rows, None)
    if first is None:
        raise DataError(f"data={data} is empty, expected at least one row or paragraph of text")
    if data_format == "auto":
        data_format = _detect(*first, text_field)
    read = _reader(data_format, text_field)
    read(*first)
    documents = (read(place, row) for place, row in chain([first], rows))
    return DataSource(documents, data_format, _name(data))


def check_source(data: str, data_format: DataFormat = "auto", text_field: str = "text") -> None:
    """Refuse what `open_source` refuses; no row of a datasets id is fetched.

    Raises:
        DataError, HubError: see their messages.
    """
    if data == "stdlib" or Path(data).exists():
        open_source(data, data_format, text_field)
    else:
        _hub_name(data)


def _name(data: str) -> str:
    """What a file, directory or id is called, without what its kind and its settings add."""
    return Path(data.partition(":")[0].removesuffix(".gz")).stem


def _placed_rows(data: str) -> Rows:
    path = Path(data)
    if path.is_dir():
        return directory_rows(path)
    if path.is_file():
        return file_rows(path)
    return _hub_rows(data)


def _hub_rows(data: str) -> Rows:
    """Rows of a `datasets` id, written `owner/name[:config][@split]`."""
    name, config, split = _hub_name(data)
    import datasets

    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise DataError(
            f"data={data} is no file, and datasets cannot load it: {error}; check the name"
        ) from None
    return ((Place(data, number), row) for number, row in enumerate(rows, start=1))


def _hub_name(data: str) -> tuple[str, str, str]:
    """Name, configuration and split of a datasets id, which a hub has."""
    name, _, split = data.partition("@")
    name, _, config = name.partition(":")
    looks_local = is_text_file(Path(data)) or ("/" in name and Path(name).parent.is_dir())
    if looks_local or not HUB_ID.fullmatch(name):
        raise DataError(f"data={data} is no file or directory, expected one; check the path")
    if find_spec("datasets") is None:
        raise DataError(
            f"data={data} is no file or directory, and a datasets id needs the 'datasets' package; "
            f"check the path or run: {how_to_install('datasets')}"
        )
    is_online(name, "dataset")
    return name, config, split


def _detect(place: Place, row: Row, text_field: str) -> DataFormat:
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
    # a context would be left out, and the answer without it makes no sense
    if fields & set(QUESTIONS) and fields & set(ANSWERS) and "context" not in fields:
        return "pairs"
    raise DataError(
        f"{place} has the fields {sorted(fields)}, expected messages, conversations, instruction "
        f"and output, prompt and completion, question and answer, or {text_field}; "
        "name the field of a text with --text-field, or rename them"
    )


def _reader(data_format: DataFormat, text_field: str) -> Callable[[Place, Row], Document]:
    def plain(place: Place, row: Row) -> Document:
        return _string(place, row, text_field)

    readers = {
        "plain": plain,
        "alpaca": _alpaca,
        "pairs": _pair,
        "messages": _messages,
        "sharegpt": _sharegpt,
    }
    return readers[data_format]


def _alpaca(place: Place, row: Row) -> list[Message]:
    question = _string(place, row, "instruction")
    if isinstance(row.get("input"), str) and row["input"].strip():
        question += "\n\n" + row["input"]
    return [_message("user", question), _message("assistant", _string(place, row, "output"))]


def _pair(place: Place, row: Row) -> list[Message]:
    """A question and its answer; either may be a list of messages."""
    return [*_side(place, row, QUESTIONS, "user"), *_side(place, row, ANSWERS, "assistant")]


def _side(place: Place, row: Row, names: tuple[str, ...], role: str) -> list[Message]:
    name = next((name for name in names if isinstance(row, dict) and name in row), names[0])
    if isinstance(row, dict) and isinstance(row.get(name), list):
        return _messages(place, row, name)
    return [_message(role, _string(place, row, name).removesuffix(SEPARATOR))]


def _messages(place: Place, row: Row, field: str = "messages") -> list[Message]:
    return [_turn(place, turn, "role", "content") for turn in _list(place, row, field)]


def _sharegpt(place: Place, row: Row) -> list[Message]:
    return [_turn(place, turn, "from", "value") for turn in _list(place, row, "conversations")]


def _turn(place: Place, turn: Row, role_field: str, text_field: str) -> Message:
    role, content = _string(place, turn, role_field), _string(place, turn, text_field)
    if role not in ROLES:
        raise DataError(f"{place} has {role_field}={role!r}, expected one of {', '.join(ROLES)}")
    message = _message(ROLES[role], content)
    if isinstance(turn.get("reasoning_content"), str):
        message["reasoning_content"] = turn["reasoning_content"]
    return message


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _string(place: Place, row: Row, field: str) -> str:
    return _field(place, row, field, str)


def _list(place: Place, row: Row, field: str) -> list:
    return _field(place, row, field, list)


def _field(place: Place, row: Row, field: str, kind: type) -> Any:  # noqa: ANN401
    if not isinstance(row, dict) or field not in row:
        found = f"has the fields {sorted(row)}" if isinstance(row, dict) else f"is {row!r:.60}"
        raise DataError(f"{place} {found}, expected {field!r}; mend the row or set --format")
    if not isinstance(row[field], kind) or (kind is list and not row[field]):
        raise DataError(
            f"{place} has {field}={row[field]!r:.60}, expected a non-empty {kind.__name__}"
            if kind is list
            else f"{place} has {field}={row[field]!r:.60}, expected text; mend the row"
        )
    return row[field]
