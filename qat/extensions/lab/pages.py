"""The files of a comparison: rows, also as CSV, all results as JSON, a page, and pictures."""

import json
from collections.abc import Sequence
from pathlib import Path

from qat.extensions.bench.results import ROWS, TABLE, WHOLE, as_csv
from qat.files import write_atomically


def write_comparison(
    out: Path,
    rows: Sequence[dict[str, object]],
    *,
    page: tuple[str, str],
    whole: dict[str, object],
    pictures: dict[str, bytes],
) -> None:
    """Write the current results of a comparison into `out`, each file atomically.

    Args:
        out: directory of results.
        rows: rows of all finished jobs.
        page: name and text of the page in Markdown.
        whole: content of the JSON file besides the rows.
        pictures: SVG images by file name.
    """
    files = {ROWS: "".join(json.dumps(row) + "\n" for row in rows), page[0]: page[1]}
    files[TABLE] = as_csv([flat(row) for row in rows])
    files[WHOLE] = json.dumps({**whole, "rows": rows}, indent=1, default=str) + "\n"
    for name, text in (files | {name: svg.decode() for name, svg in pictures.items()}).items():
        write_atomically(out / name, text)


def flat(row: dict[str, object]) -> dict[str, object]:
    """Return a row whose tables are columns of their own: `settings.steps`."""
    found = {}
    for name, value in row.items():
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}.{part}".rstrip("."): each for part, each in parts.items()}
    return found


def markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; all columns but the first are right-aligned numbers."""
    rule = ["---", *("---:" for _ in headings[1:])]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, rule, *body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)
