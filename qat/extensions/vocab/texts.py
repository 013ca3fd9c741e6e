"""The text of a teacher's tokens, and where in its bytes the tokens of two tokenizers lie."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from qat.data.text import Rendering, encode
from qat.extensions.vocab.tokens import Vocabulary

# A token that begins or ends a document by its role (`begin_token`, `end_token`) is no part of the
# text: it has no bytes, and the student's tokenizer puts its own. Special tokens that a chat
# template wrote are text: both tokenizers must know them by the same name.


class Places(NamedTuple):
    """The places of a document's tokens in its bytes, `(T,)` each."""

    begins: np.ndarray
    ends: np.ndarray
    is_whole: np.ndarray
    """False for tokens with bytes that are no characters, which the text lacks."""

    def moved(self, distance: int) -> "Places":
        """Return the places behind `distance` more bytes."""
        return self._replace(begins=self.begins + distance, ends=self.ends + distance)


class Pair(NamedTuple):
    """One text in the tokens of teacher and student."""

    octets: bytes
    """The text, behind a space if either tokenizer has put one there."""
    teacher: Places
    student_ids: np.ndarray
    student: Places


class _Reading(NamedTuple):
    text: str
    """The text that the teacher read, without the space that its tokenizer puts before it."""
    places: Places
    dummy: int
    """1 if that space is there, and counted in the places; else 0."""
    is_plain: bool
    """True if no chat template wrote special tokens into it."""
    is_ended: bool
    """True if a token without bytes ends it."""


def foreign(ids: Iterable[int], teacher: Vocabulary, student: Vocabulary) -> str | None:
    """Return the first special token in the text that the student has no counterpart of."""
    ids = [*ids]
    first, last = _roles(ids, teacher, student)
    names = (teacher.words[i] for i in ids[first:last] if i in teacher.special)
    return next((name for name in names if name not in student.by_special), None)


def pairs(
    documents: list[list[int]], teacher: Vocabulary, student: Vocabulary
) -> Iterator[Pair | None]:
    """Yield each document for both; None if the student's tokenizer changes its text."""
    readings = [_read(ids, teacher, student) for ids in documents]
    renderings = [Rendering(each.text, is_templated=not each.is_plain) for each in readings]
    for reading, tokens in zip(readings, encode(renderings, student.tokenizer), strict=True):
        yield _paired(reading, tokens.ids, student)


def _is_plain(ids: list[int], teacher: Vocabulary) -> bool:
    inner = ids[ids[:1] == [teacher.begin] : len(ids) - (ids[-1:] == [teacher.end])]
    return teacher.special.isdisjoint(inner)


def _roles(ids: list[int], teacher: Vocabulary, student: Vocabulary) -> tuple[int, int]:
    """Return where the text begins and ends among the tokens."""

    def is_role(i: int, role: int | None) -> bool:
        return i == role and (is_plain or teacher.words[i] not in student.by_special)

    is_plain = _is_plain(ids, teacher)
    return int(is_role(ids[0], teacher.begin)), len(ids) - is_role(ids[-1], teacher.end)


def _read(ids: list[int], teacher: Vocabulary, student: Vocabulary) -> _Reading:
    first, last = _roles(ids, teacher, student)
    words = [teacher.octets[i] if first <= n < last else b"" for n, i in enumerate(ids)]
    raw, sizes = b"".join(words), np.array([*map(len, words)])
    is_kept = np.ones(len(raw), bool)
    while True:
        try:
            text = bytes(np.frombuffer(raw, np.uint8)[is_kept]).decode()
            break
        except UnicodeDecodeError as error:  # a document may be cut within a character
            is_kept[np.flatnonzero(is_kept)[error.start : error.end]] = False
    shift = np.concatenate([[0], is_kept.cumsum()])
    ends = sizes.cumsum()
    begins, ends = shift[ends - sizes], shift[ends]
    is_plain = _is_plain(ids, teacher)
    dummy = int(is_plain and teacher.has_dummy and text.startswith(" "))
    places = Places(begins, ends, ends - begins == sizes)
    return _Reading(text[dummy:], places, dummy, is_plain, last < len(ids))


def _paired(reading: _Reading, ids: list[int], student: Vocabulary) -> Pair | None:
    first = int(reading.is_plain and ids[0] == student.begin)
    last = len(ids) - (ids[-1] == student.end)
    words = [student.octets[i] if first <= n < last else b"" for n, i in enumerate(ids)]
    text, joined = reading.text.encode(), b"".join(words)
    dummy = int(not text.startswith(joined) and joined.startswith(b" "))
    left = text[len(joined) - dummy :].decode(errors="replace").strip()
    # a template's last token may be what ends documents of the student
    if not text.startswith(joined[dummy:]) or left not in ("", student.words[student.end]):
        return None
    if not left and not reading.is_ended:
        ids, words = ids[:last], words[:last]
    ends = np.array([*map(len, words)]).cumsum()
    begins = np.concatenate([[0], ends[:-1]])
    lead = max(dummy, reading.dummy)
    return Pair(
        b" " * lead + text,
        reading.places.moved(lead - reading.dummy),
        np.array(ids),
        Places(begins, ends, np.ones(len(ids), bool)).moved(lead - dummy),
    )
