"""The numbers of a run, a line of JSON for machines and a row of a table for spreadsheets.

The tables hold no fact of their own: they are made anew from `metrics.jsonl` whenever a run begins
or goes on, then grow with it.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from qat.files import write_atomically
from qat.logs import METRICS, TRAINING_CSV, VAL_CSV, JsonLines, Lines, read_json_lines

FILES = {"train": TRAINING_CSV, "eval": VAL_CSV}
LATER = {"train": (), "eval": ("codes_flipped_frac",)}
"""Columns that the first line does not have yet."""
NO_COLUMN = ("kind", "sample", "nsa_layers")


class Metrics:
    """`metrics.jsonl`, `training.csv` and `val.csv` of one run, for its first rank to write."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path / METRICS)
        self._tables = Tables(path)

    def write(self, *, kind: str, **values: object) -> None:
        """Append one line, and the same values as one row.

        Raises:
            OSError: one of the files could not be written.
        """
        self._lines.write(kind=kind, **values)
        self._tables.row(kind, values)

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._tables.close()


class Tables:
    """`training.csv` and `val.csv`: the columns are those of the first line, text left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: dict[str, list[str]] = {}
        self._files: dict[str, Lines] = {}
        self._rebuild()

    def row(self, kind: str, values: dict[str, object]) -> None:
        """Append `values` to the table of their `kind`; the first row brings the header."""
        if kind not in self._files:
            self._columns[kind] = columns(kind, values)
            self._files[kind] = Lines(self._path / FILES[kind])
            self._files[kind].append(_text(self._columns[kind]))
        self._files[kind].append(_row(values, self._columns[kind]))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _rebuild(self) -> None:
        """Write the tables of all lines that there are; without any there is no file."""
        metrics = self._path / METRICS
        found = read_json_lines(metrics) if metrics.exists() else []
        for kind, name in FILES.items():
            path, rows = self._path / name, [row for row in found if row.get("kind") == kind]
            if not rows:
                path.unlink(missing_ok=True)
                continue
            header = self._columns[kind] = columns(kind, rows[0])
            texts = [_text(header), *(_row(row, header) for row in rows)]
            write_atomically(path, "".join(f"{text}\n" for text in texts))
            self._files[kind] = Lines(path)


def columns(kind: str, first: dict[str, object]) -> list[str]:
    """Names of the columns of a table whose first line is `first`."""
    return [*(name for name in first if name not in NO_COLUMN), *LATER[kind]]


def _row(values: dict[str, object], header: Sequence[str]) -> str:
    return _text([values.get(name) for name in header])


def _text(cells: Sequence[object]) -> str:
    """One line of CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()
