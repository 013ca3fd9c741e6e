"""Read the rows of a corpus that `qat sample` is still writing, in their final order."""

from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from itertools import count, islice
from pathlib import Path

from qat.config import fingerprint
from qat.data.sources import Rows, parsed_lines, sampled_parts
from qat.errors import DataError
from qat.extensions.decode.corpus import SETTINGS, rows_in
from qat.files import awaiting, parse_json


def growing_rows(out: Path) -> Rows:
    """Yield the rows of a data set in their final order, also before `qat sample` has written all.

    A row comes as soon as its shard is complete.

    Raises:
        DataError: shards are missing, and nobody samples them.
    """
    return parsed_lines(out, _lines(out))


def _lines(out: Path) -> Iterator[str]:
    seen = 0
    for number in count():
        content = _awaited(out, number)
        if content is None:
            with out.open(encoding="utf-8") as file:
                yield from islice(file, seen, None)
            return
        for line in StringIO(content.decode()):
            seen += 1
            yield line


def _awaited(out: Path, number: int) -> bytes | None:
    """Return the lines of a shard; None if the file has taken the place of all shards."""
    parts = sampled_parts(out)
    for may_come in awaiting(out):  # asked first: the last shard may come between the two
        if out.exists():
            return None
        with suppress(FileNotFoundError):  # shards are removed when the file is whole
            run = fingerprint(parse_json((parts / SETTINGS).read_bytes()))
            if (content := rows_in(parts, number, run)) is not None:
                return content
        if not may_come:
            raise DataError(
                f"{out} has {number} shards in {parts} and nobody samples more, expected 'qat "
                "sample' at work or a finished file; run the same 'qat sample' command again, and "
                "go on with this one's"
            )
    raise AssertionError("unreachable")
