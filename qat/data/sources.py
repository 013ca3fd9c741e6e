"""Documents from files, directories, the standard library or the `datasets` hub."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from qat.data.chat import Document, Message
from qat.data.config import DataFormat
from qat.data.stdlib_text import stdlib_documents
from qat.errors import DataError, how_to_install

SUFFIXES = (".json", ".jsonl", ".txt")
SEPARATOR = "<|endoftext|>"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

Row = dict[str, Any]


class _Place(NamedTuple):
    """Where a row stands, for messages."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


class Source(NamedTuple):
    """Documents in order, the format they were read as, and a short name for the data."""

    documents: Iterable[Document]
    format: DataFormat
    name: str


def open_source(data: str, data_format: DataFormat = "auto", text_field: str = "text") -> Source:
    """The documents of `data`; its existence and first row are checked now, the rest on reading.

    A text file is split into documents at `<|endoftext|>` if it holds that, else at blank lines.
    Rows count from 1 in messages.

    Raises:
        DataError: nothing is there, it is empty, or a row lacks the fields of its format.
    """
    if data == "stdlib":
        return Source(stdlib_documents(), "plain", "stdlib")
    rows = _placed_rows(data)
    first = next(rows, None)
    if first is None:
        raise DataError(f"data={data} is empty, expected at least one row or paragraph of text")
    if data_format == "auto":
        data_format = _detect(*first, text_field)
    read = _reader(data_format, text_field)
    read(*first)
    documents = (read(place, row) for place, row in chain([first], rows))
    return Source(documents, data_format, Path(data.partition(":")[0]).stem)


def _placed_rows(data: str) -> Iterator[tuple[_Place, Row]]:
    path = Path(data)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES)
        if not files:
            raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file; name a file or directory")
        return chain.from_iterable(map(_file_rows, files))
    if path.is_file():
        return _file_rows(path)
    if path.is_absolute() or path.suffix in SUFFIXES:
        raise DataError(f"data={data} is no file or directory, expected one; check the path")
    return _hub_rows(data)


def _file_rows(path: Path) -> Iterator[tuple[_Place, Row]]:
    if path.suffix == ".txt":
        return _text_rows(path)
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".json":
        return _json_list(path)
    raise DataError(f"{path} ends in {path.suffix!r}, expected {', '.join(SUFFIXES)}; convert it")


def _text_rows(path: Path) -> Iterator[tuple[_Place, Row]]:
    text = _text(path)
    separator = SEPARATOR if SEPARATOR in text else "\n\n"
    documents = (part.strip() for part in text.split(separator))
    for number, document in enumerate(filter(None, documents), start=1):
        yield _Place(str(path), number), {"text": document}


def _json_lines(path: Path) -> Iterator[tuple[_Place, Row]]:
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = _Place(str(path), number)
                    yield place, _parse(line, place)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, error) from None


def _json_list(path: Path) -> Iterator[tuple[_Place, Row]]:
    rows = _parse(_text(path), _Place(str(path), 1))
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a JSON {type(rows).__name__}, expected a list of rows")
    return ((_Place(str(path), number), row) for number, row in enumerate(rows, start=1))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None


def _not_utf8(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8")


def _parse(text: str, place: _Place) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not JSON ({error.msg}); expected one value; mend it") from None


def _hub_rows(data: str) -> Iterator[tuple[_Place, Row]]:
    """Rows of a `datasets` id, written `owner/name[:config][@split]`."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise DataError(
            f"data={data} is no file or directory, and a datasets id needs the 'datasets' package; "
            f"check the path or run: {how_to_install('datasets')}"
        ) from None
    name, _, split = data.partition("@")
    name, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
    except (datasets.exceptions.DatasetsError, FileNotFoundError, ValueError) as error:
        raise DataError(
            f"data={data} is no file, and datasets cannot load it: {error}; check the name"
        ) from None
    return ((_Place(data, number), row) for number, row in enumerate(rows, start=1))


def _detect(place: _Place, row: Row, text_field: str) -> DataFormat:
    fields = row.keys() if isinstance(row, dict) else set()
    if "messages" in fields:
        return "messages"
    if "conversations" in fields:
        return "sharegpt"
    if {"instruction", "output"} <= fields:
        return "alpaca"
    if text_field in fields:
        return "plain"
    raise DataError(
        f"{place} has the fields {sorted(fields)}, expected messages, conversations, "
        f"instruction and output, or {text_field}; set --format and --text-field"
    )


def _reader(data_format: DataFormat, text_field: str) -> Callable[[_Place, Row], Document]:
    def plain(place: _Place, row: Row) -> Document:
        return _string(place, row, text_field)

    readers = {"plain": plain, "alpaca": _alpaca, "messages": _messages, "sharegpt": _sharegpt}
    return readers[data_format]


def _alpaca(place: _Place, row: Row) -> list[Message]:
    question = _string(place, row, "instruction")
    if isinstance(row.get("input"), str) and row["input"].strip():
        question += "\n\n" + row["input"]
    return [_message("user", question), _message("assistant", _string(place, row, "output"))]


def _messages(place: _Place, row: Row) -> list[Message]:
    return [_turn(place, turn, "role", "content") for turn in _list(place, row, "messages")]


def _sharegpt(place: _Place, row: Row) -> list[Message]:
    return [_turn(place, turn, "from", "value") for turn in _list(place, row, "conversations")]


def _turn(place: _Place, turn: Row, role_field: str, text_field: str) -> Message:
    role, content = _string(place, turn, role_field), _string(place, turn, text_field)
    if role not in ROLES:
        raise DataError(f"{place} has {role_field}={role!r}, expected one of {', '.join(ROLES)}")
    message = _message(ROLES[role], content)
    if isinstance(turn.get("reasoning_content"), str):
        message["reasoning_content"] = turn["reasoning_content"]
    return message


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _string(place: _Place, row: Row, field: str) -> str:
    return _field(place, row, field, str)


def _list(place: _Place, row: Row, field: str) -> list:
    return _field(place, row, field, list)


def _field(place: _Place, row: Row, field: str, kind: type) -> Any:  # noqa: ANN401
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
