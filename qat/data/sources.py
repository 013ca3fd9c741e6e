"""Read documents from files, directories, the standard library or the `datasets` hub."""

import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from qat.data.config import DataFormat
from qat.data.documents import SEPARATOR, Document, Place, Row, detect, document_of
from qat.errors import DataError
from qat.files import KINDS, described, parse_json
from qat.hooks import extension

# Rows of text files: .txt, .md, .jsonl, .json, .csv, .tsv, .parquet, or with .gz.

STRAY = (
    *("authors", "changelog", "citation", "contributing", "copying", "dataset_dict"),
    *("dataset_info", "dataset_infos", "licence", "license", "notice", "readme", "source", "state"),
)
"""Names of files that accompany a data set and describe it; they are not training data."""
DELIMITERS = ",;\t"
LONGEST_CELL = 2**30
"""Maximum characters of a cell; the csv module's default of 131,072 is too small for a book."""
LONGEST_PIECE = 4000
"""Maximum characters of a piece of a file that is one document: about a thousand tokens."""

logger = logging.getLogger(__name__)

Rows = Iterator[tuple[Place, Row]]


def is_text_file(path: Path) -> bool:
    """Return whether the name has the suffix of a supported file."""
    return _suffix(path) in READERS


def holds_rows(path: Path) -> bool:
    """Return whether each row of the file is a document; any other file is one text."""
    return READERS.get(_suffix(path), _text_rows) is not _text_rows


def whole_text(path: Path) -> str:
    """Return the whole content of a text file.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    with _opened(path) as file:
        return file.read()


def file_rows(path: Path) -> Rows:
    """Yield the rows of a file; for a text file its documents, each as the row's `text`.

    A text is split at `<|endoftext|>` if it contains that, otherwise at blank lines; a text with
    neither is cut into pieces of at most `LONGEST_PIECE` characters. Rows count from 1.

    Raises:
        DataError: the suffix is unknown, or the content does not match it (raised when read).
    """
    reader = READERS.get(_suffix(path))
    if reader is None:
        raise DataError(f"{path} ends in {path.suffix!r}, expected {EXPECTED}; convert it")
    rows = reader(path)
    return _cut_if_alone(rows) if reader is _text_rows else rows


def directory_rows(directory: Path) -> Rows:
    """Yield the rows of all files below a directory, in sorted order.

    A single text file is cut as by `file_rows`. Hidden files are skipped, and files called README,
    LICENSE, SOURCE or the like if there are others; a log line names them.

    Raises:
        DataError: the directory holds no readable file.
    """
    found = [
        path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
        and is_text_file(path)
        and not any(part.startswith((".", "__")) for part in path.relative_to(directory).parts)
    ]
    if not found:
        raise DataError(f"{directory} holds no {EXPECTED} file; name a file or directory")
    stray = [path for path in found if path.name.partition(".")[0].lower() in STRAY]
    if len(stray) not in (0, len(found)):
        _log_skipped(directory, ", ".join(str(path.relative_to(directory)) for path in stray))
        found = [path for path in found if path not in stray]
    if len(found) == 1:
        return file_rows(found[0])
    return chain.from_iterable(READERS[_suffix(path)](path) for path in found)


@cache
def _log_skipped(directory: Path, names: str) -> None:
    """Log the skipped files once, however often a verb opens the directory."""
    logger.info("not read in %s: %s; to learn it, name the file itself", directory, names)


def _text_rows(path: Path) -> Rows:
    text = whole_text(path)
    separator = SEPARATOR if SEPARATOR in text else "\n\n"
    documents = (part.strip() for part in text.split(separator))
    for number, document in enumerate(filter(None, documents), start=1):
        yield Place(str(path), number), {"text": document}


def _cut_if_alone(rows: Rows) -> Rows:
    """Yield the rows; cut a single row into pieces, so that some of them can be held out."""
    first, second = next(rows, None), next(rows, None)
    if first is None:
        return
    if second is not None:
        yield from chain([first, second], rows)
        return
    place, row = first
    for number, piece in enumerate(_pieces(row["text"]), start=1):
        yield place._replace(row=number), {"text": piece}


def _pieces(text: str) -> Iterator[str]:
    """Cut a text at blank lines, else at line ends, else at spaces."""
    begin = 0
    while len(text) - begin > LONGEST_PIECE:
        half, limit = begin + LONGEST_PIECE // 2, begin + LONGEST_PIECE
        ends = (text.rfind(mark, half, limit) for mark in ("\n\n", "\n", " "))
        end = next((end for end in ends if end > 0), limit)
        yield text[begin:end].strip()
        begin = end
    yield text[begin:].strip()


def _json_lines(path: Path) -> Rows:
    with _opened(path) as file:
        yield from parsed_lines(path, file)


def _json_list(path: Path) -> Rows:
    """Yield the rows of a JSON list; a .json file with one row per line is accepted too."""
    text = whole_text(path)
    try:
        rows = parse_json(text)
    except ValueError as error:
        if getattr(error, "msg", None) != "Extra data":
            raise _not_json(Place(str(path), 1), error) from None
        yield from parsed_lines(path, io.StringIO(text))
        return
    if not isinstance(rows, list):
        keys = f" with the keys {sorted(rows)}" if isinstance(rows, dict) else ""
        raise DataError(
            f"{path} holds a JSON {type(rows).__name__}{keys:.80}, expected a list of rows; "
            "write the rows as a list, or one a line"
        )
    for number, row in enumerate(rows, start=1):
        yield Place(str(path), number), row


def parsed_lines(path: Path, lines: Iterable[str]) -> Rows:
    """Yield the rows of a file with one JSON value per line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = Place(str(path), number)
            try:
                yield place, parse_json(line)
            except ValueError as error:
                raise _not_json(place, error) from None


def _not_json(place: Place, error: ValueError) -> DataError:
    if not isinstance(error, json.JSONDecodeError):
        found = str(error).removeprefix("it ")
        return DataError(f"{place} {found}, expected a row of a few levels; mend or remove it")
    # some of Python's messages end in "at", to be followed by a position
    line = f"line {error.lineno}, " if error.lineno > 1 else ""
    found = f"{error.msg.removesuffix(' at')} at {line}column {error.colno}"
    return DataError(f"{place} is not JSON ({found}); expected one value; mend it")


def _table_rows(path: Path) -> Rows:
    """Yield the rows of a table with a header line; the delimiter is a comma, semicolon or tab."""
    csv.field_size_limit(LONGEST_CELL)
    with _opened(path, newline="") as file:
        header = file.readline()
        delimiter = max(DELIMITERS, key=header.count)
        try:
            names = next(csv.reader([header], delimiter=delimiter, strict=True), [])
            cells = csv.reader(file, delimiter=delimiter, strict=True)
            for number, row in enumerate(filter(None, cells), start=1):
                place = Place(str(path), number)
                if len(row) != len(names):
                    raise DataError(
                        f"{place} has {len(row)} cells, expected {len(names)} as in the first "
                        f"line ({', '.join(names)}); put cells with {delimiter!r} or line breaks "
                        "between quotes"
                    )
                yield place, dict(zip(names, row, strict=True))
        except csv.Error as error:
            raise DataError(
                f"{path} is no table ({error}), expected rows of cells; mend its quotes"
            ) from None


def _parquet_rows(path: Path) -> Rows:
    return extension("qat.rows", "datasets").parquet_rows(path)


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a UTF-8 text file, gzipped or not, and skip a byte-order mark."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with open_file(path, "rt", encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected a file to read; check it") from None


def _suffix(path: Path) -> str:
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    return "" if suffix == ".parquet" and path.suffix.lower() == ".gz" else suffix


READERS: dict[str, Callable[[Path], Rows]] = {
    ".csv": _table_rows,
    ".json": _json_list,
    ".jsonl": _json_lines,
    ".md": _text_rows,
    ".parquet": _parquet_rows,
    ".tsv": _table_rows,
    ".txt": _text_rows,
}
EXPECTED = f"{', '.join(READERS)} (all but Parquet also with .gz)"


HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Pattern of a data set's id on a hub."""

STDLIB = Path(__file__).with_name("stdlib.jsonl.gz")
"""Docstrings of one version of Python's standard library, so that the text is the same
everywhere."""


class Sourced(NamedTuple):
    """A document, the name of the source that it is from, and that source's share of the text."""

    document: Document
    source: str = ""
    share: float = 1.0
    """Below 1 where the source is one of several of a mixture."""


class DataSource(NamedTuple):
    """Documents in order, the format they were read as, and a short name for the data."""

    rows: Iterable[Sourced]
    format: DataFormat
    name: str

    @property
    def documents(self) -> Iterator[Document]:
        """The documents alone."""
        return (row.document for row in self.rows)


def open_source(
    data: str,
    data_format: DataFormat = "auto",
    text_field: str = "text",
    *,
    setting: str = "data",
) -> DataSource:
    """Open the documents of `data`; only its existence and first row are checked immediately.

    The module `qat.data.sources` lists the supported files. Rows count from 1 in error messages,
    which name `data` by its `setting`. Several sources with their shares are read in turns; rows of
    'qat sample' say their source.

    Raises:
        DataError: `data` does not exist or is empty, or a row lacks the fields of its format.
    """
    if (mixtures := mixtures_in(data)) is not None:
        return mixtures.open_mixture(data, data_format, text_field, setting=setting)
    if data == "stdlib":
        data, data_format, text_field = str(STDLIB), "plain", "text"
    rows = _placed_rows(data, setting)
    first = next(rows, None)
    if first is None:
        raise DataError(
            f"{setting}={data} is empty, expected at least one row or paragraph of text"
        )
    if data_format == "auto":
        data_format = detect(*first, text_field)
    document_of(*first, data_format, text_field)
    found = (
        Sourced(document_of(*each, data_format, text_field), _source_of(each[1]))
        for each in chain([first], rows)
    )
    # without the suffix of a file, or the configuration and split of an id
    name = Path(data.partition(":")[0].removesuffix(".gz")).stem
    return DataSource(found, data_format, name)


def mixtures_in(data: str) -> Any | None:  # noqa: ANN401
    """Return the module that reads what `data` names if that is several sources with shares."""
    is_one = os.path.exists(data)  # unlike Path.exists, without an error for a name too long
    if is_one or not ("," in data or Path(data.rpartition(":")[0]).is_file()):
        return None
    return extension("qat.mixtures", "mixtures")


def _source_of(row: Row) -> str:
    """Return the source of the prompt that a row of 'qat sample' answers; empty if unknown."""
    sampled = row.get("sampled")
    return str(sampled.get("source", "")) if isinstance(sampled, dict) else ""


def check_source(
    data: str,
    data_format: DataFormat = "auto",
    text_field: str = "text",
    *,
    setting: str = "data",
) -> DataFormat:
    """Raise the errors of `open_source`, without downloading rows of a `datasets` id.

    Returns:
        The documents' format; `data_format` where rows were not read.

    Raises:
        DataError, HubError: see their messages.
    """
    if not data.strip():  # Path("") is the working directory
        raise DataError(f"{setting} is empty, expected a text or its folder; name one")
    if (mixtures := mixtures_in(data)) is not None:
        for part in mixtures.parts_of(data, setting=setting):
            check_source(part.place, data_format, text_field, setting=setting)
        return data_format
    if (found := described(Path(data))) in (KINDS["config.json"], KINDS["manifest.json"]):
        raise DataError(f"{setting}={data} {found}, expected text to read; name its file or folder")
    if data == "stdlib" or Path(data).exists() or os.path.isdir(sampled_parts(Path(data))):
        return open_source(data, data_format, text_field, setting=setting).format
    _hub(data, setting).hub_name(data, setting)
    return data_format


def sampled_parts(out: Path) -> Path:
    """Return the directory with the shards of rows while `qat sample` writes `out`."""
    return out.with_name(f".{out.name}.shards")


def _placed_rows(data: str, setting: str) -> Rows:
    path = Path(data)
    if path.is_dir():
        return directory_rows(path)
    if path.is_file():
        return file_rows(path)
    if os.path.isdir(sampled_parts(path)):
        return extension("qat.corpora", "growing")(path)
    return _hub(data, setting).hub_rows(data, setting)


def _hub(data: str, setting: str) -> Any:  # noqa: ANN401
    """Return the module that reads data sets of a hub; refuse what cannot be the id of one."""
    name = data.partition("@")[0].partition(":")[0]
    looks_local = is_text_file(Path(data)) or ("/" in name and Path(name).parent.is_dir())
    if looks_local or not HUB_ID.fullmatch(name):
        raise DataError(f"{setting}={data} is no file or directory, expected one; check the path")
    return extension("qat.rows", "datasets")
