"""Texts that a teacher learns from: read from many forms, cut into pieces, split without leaks.

A unit is what must stay together: a chapter of a book, or rows that quote the same passage.
"""

import gzip
import json
import lzma
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE_CHARACTERS = 1800
"""Longest piece of a unit: about 430 tokens of English."""
RUN_WORDS = 25
"""Rows that share a run of so many words quote the same passage ..."""
MOST_QUOTES = 60
"""... unless more rows than this share it: then it is the wording of a task."""
ROWS = "rows "
"""How the names of units begin that are made of rows."""
VERSE = re.compile(r"^(\d?[A-Za-z]+\d+):(\d+) (.*)$", re.MULTILINE)
HEADING = re.compile(r"^(?=(?:CHAPTER|Chapter) [IVXLC\d]+|Once upon a time)", re.MULTILINE)
ATOM = re.compile(r".*?(?:[.?!][\"')]* +|\n+|$)", re.DOTALL)
SPLITS = ("distil", "validate", "report", "report_other")


class Piece(NamedTuple):
    """One document, and where it comes from."""

    text: str
    source: str
    unit: str


def read_pieces(path: Path) -> list[Piece]:
    """The pieces of a bundle, or of a folder whose sub-folders are sources; none comes twice.

    Reads .txt, .json and .jsonl, each also as .gz or .xz; SOURCE.txt is not text.

    Raises:
        ValueError: there is no text.
    """
    if path.is_file():
        pieces = [Piece(**row) for row in _json_lines(path)]
    else:
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir())
        pieces = [piece for folder in folders for piece in _read_source(folder)]
    found = list({piece.text: piece for piece in pieces if piece.text}.values())
    if not found:
        raise ValueError(f"{path} holds no text, expected a bundle or folders of text files")
    return found


def _read_source(folder: Path) -> list[Piece]:
    pieces = []
    for path in sorted(folder.iterdir()):
        if path.name == "SOURCE.txt":
            continue
        kind = Path(path.stem).suffix if path.suffix in {".gz", ".xz"} else path.suffix
        if kind == ".txt":
            units = {f"{path.name} {i}": [c] for i, c in enumerate(chapters(_content(path)))}
        elif kind == ".json":
            units = _linked(path.name, json.loads(_content(path)))
        elif kind == ".jsonl":
            units = _linked(path.name, _json_lines(path))
        else:
            continue
        for unit, texts in units.items():
            cut = (part for text in texts for part in cut_text(text))
            pieces += [Piece(text, folder.name, unit) for text in cut]
    return pieces


def _content(path: Path) -> str:
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8") as file:
        return file.read()


def _json_lines(path: Path) -> list[dict]:
    # not splitlines, which knows characters that a row may hold
    return [json.loads(line) for line in _content(path).split("\n") if line.strip()]


# ---- units


def chapters(content: str) -> list[str]:
    """A book's chapters, in order: by verses, by long lines, or by headings; lines unwrapped."""
    verses = VERSE.findall(content)
    if len(verses) > content.count("\n") // 2:
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for chapter, number, text in verses:
            found[chapter][number] = text
        return ["\n".join(verses.values()) for verses in found.values()]
    lines = [line for line in content.splitlines() if line.strip()]
    if len(content) > 1000 * len(lines):
        return lines
    return [_unwrapped(part) for part in HEADING.split(content) if part.strip()]


def _unwrapped(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def cut_text(text: str, longest: int = PIECE_CHARACTERS) -> list[str]:
    """Consecutive pieces of about equal length, cut behind sentences and lines."""
    target = len(text) / max(1, -(-len(text) // longest))
    pieces, current = [], ""
    for atom in ATOM.findall(text):
        if current and len(current) + len(atom) / 2 > target:
            pieces.append(current.strip())
            current = ""
        current += atom
    return [piece for piece in (*pieces, current.strip()) if piece]


def row_text(row: dict) -> str:
    """One row as text: its question and its answer, under the names that data sets give them."""
    if "text" in row:
        return row["text"].strip()
    if "question" in row:
        return f"Question: {row['question']}\nAnswer: {row['answer']}"
    if "prompt" in row:
        return f"{row['prompt'].strip()}\n{row['completion'].replace('<|endoftext|>', '').strip()}"
    row = row | row.get("instances", [{}])[0]
    parts = (row["instruction"], row["input"], row["output"])
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _linked(name: str, rows: Iterable[dict]) -> dict[str, list[str]]:
    """Texts of rows, by unit."""
    texts = list(dict.fromkeys(row_text(row) for row in rows))
    units = defaultdict(list)
    for text, first in zip(texts, link(texts), strict=True):
        units[f"{ROWS}{name} {first}"].append(text)
    return units


def link(texts: Sequence[str]) -> list[int]:
    """For each text, the first of those that it is linked with by shared runs of words."""
    parents = list(range(len(texts)))

    def root(i: int) -> int:
        while parents[i] != i:
            parents[i] = parents[parents[i]]
            i = parents[i]
        return i

    for a, b in _sharing(texts):
        low, high = sorted((root(a), root(b)))
        parents[high] = low
    return [root(i) for i in range(len(texts))]


def _sharing(texts: Sequence[str]) -> list[list[int]]:
    """Pairs of texts that share a run of `RUN_WORDS` words; chains where more than two do."""
    vocabulary: dict[str, int] = {}
    words = [[vocabulary.setdefault(w, len(vocabulary)) for w in text.split()] for text in texts]
    values = np.random.default_rng(0).integers(1, 2**63, len(vocabulary), dtype=np.uint64)
    ids = np.fromiter((w for text in words for w in text), np.int64)
    owners = np.repeat(np.arange(len(texts)), [len(text) for text in words])
    count = len(ids) - RUN_WORDS + 1
    if count < 1:
        return []
    runs = np.zeros(count, dtype=np.uint64)
    for place in range(RUN_WORDS):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + values[ids[place : place + count]]
    inside = owners[:count] == owners[RUN_WORDS - 1 :]
    runs, owners = runs[inside], owners[:count][inside]
    order = np.lexsort((owners, runs))
    runs, owners = runs[order], owners[order]
    _, group, sizes = np.unique(runs, return_inverse=True, return_counts=True)
    is_pair = (group[1:] == group[:-1]) & (owners[1:] != owners[:-1])
    is_pair &= sizes[group[1:]] <= MOST_QUOTES
    pairs = np.stack([owners[:-1][is_pair], owners[1:][is_pair]], axis=1)
    return np.unique(pairs, axis=0).tolist()


# ---- splits


def without_repetition(pieces: Iterable[Piece], most: int) -> list[Piece]:
    """The pieces, of each unit made of rows only the first `most`."""
    found, counts = [], Counter()
    for piece in pieces:
        counts[piece.source, piece.unit] += 1
        if not piece.unit.startswith(ROWS) or counts[piece.source, piece.unit] <= most:
            found.append(piece)
    return found


def split(
    pieces: Iterable[Piece], *, leave_out: Iterable[str], validate: float, report: float, seed: int
) -> dict[str, list[Piece]]:
    """The pieces in four disjoint lists, each in random order; a unit is never divided.

    `validate` and `report` are shares of each source's characters; sources in `leave_out` go
    whole to `report_other`.

    Raises:
        ValueError: the texts are too few, or their units too large, for one of the shares.
    """
    sources: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in pieces:
        sources[piece.source][piece.unit].append(piece)
    found: dict[str, list[Piece]] = {name: [] for name in SPLITS}
    for source, units in sorted(sources.items()):
        if source in set(leave_out):
            found["report_other"] += [piece for unit in units.values() for piece in unit]
            continue
        shares = {"validate": validate, "report": report}
        for name, unit in _shared_out(list(units.values()), shares, f"{seed} {source}"):
            found[name] += unit
    for name, chosen in found.items():
        if not chosen and name != "report_other":
            raise ValueError(f"{name} would hold no document; give more texts or a larger share")
        random.Random(f"{seed} {name}").shuffle(chosen)
    return found


def _shared_out(
    units: list[list[Piece]], shares: dict[str, float], seed: str
) -> Iterable[tuple[str, list[Piece]]]:
    """Each unit with its split: random units until a share is full, the rest to distil."""
    random.Random(seed).shuffle(units)
    size = sum(len(piece.text) for unit in units for piece in unit)
    room = {name: share * size for name, share in shares.items()}
    for unit in units:
        characters = sum(len(piece.text) for piece in unit)
        name = next((n for n, left in room.items() if 0 < characters <= 1.5 * left), "distil")
        if name in room:
            room[name] -= characters
        yield name, unit


def write_pieces(path: Path, pieces: Iterable[Piece]) -> None:
    """Write JSON lines, compressed if the name ends in .xz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(p._asdict()) + "\n" for p in pieces).encode()
    path.write_bytes(lzma.compress(content, preset=9) if path.suffix == ".xz" else content)
