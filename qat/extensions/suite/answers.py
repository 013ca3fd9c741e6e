"""A file of answers, written as they come, so that an interrupted suite goes on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from qat.config import explain
from qat.errors import CheckpointError
from qat.logs import JsonLines, read_json_lines

FORMAT = 1
"""Version of the file."""


class Answer(BaseModel):
    """The answer of a model to one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request: str
    """Hash of the request."""
    text: str | None = None
    """A generated answer, without what ends it."""
    ids: list[int] | None = None
    """Its tokens, with the one that ends it."""
    logprob: float | None = None
    """Sum of the log-probabilities of a given answer, in nats."""
    is_greedy: bool | None = None
    """Whether each of its tokens was the most likely one."""

    def response(self) -> str | tuple[float, bool]:
        """Return the answer as lm-eval wants it."""
        return (self.logprob, self.is_greedy) if self.text is None else self.text

    def is_whole(self) -> bool:
        """Return whether it is a generated answer or a judged one."""
        generated = (self.text is None, self.ids is None)
        judged = (self.logprob is None, self.is_greedy is None)
        return (generated, judged) in [
            ((False, False), (True, True)),
            ((True, True), (False, False)),
        ]


class AnswerFile:
    """The answers of one model to one task: a line that says whose they are, then one for each."""

    def __init__(self, path: Path, answers: dict[str, Answer]) -> None:
        self.answers = answers
        """Answers by the hash of their request."""
        self._lines = JsonLines(path)

    @classmethod
    def open(cls, path: Path, facts: Mapping[str, object]) -> Self:
        """Open the file, or begin it with `facts`, which decide the answers.

        Raises:
            CheckpointError: it is damaged, or holds answers of another model or dtype.
        """
        facts = {"format": FORMAT, **facts}
        rows = read_json_lines(path) if path.is_file() else []
        if rows:
            _check_facts(path, rows[0], facts)
        answers = [_parsed(path, number, row) for number, row in enumerate(rows[1:], 2)]
        file = cls(path, {answer.request: answer for answer in answers})
        if not rows:
            file._lines.write(**facts)
        return file

    def add(self, answers: list[Answer]) -> None:
        """Append answers in one write."""
        self._lines.append("\n".join(each.model_dump_json(exclude_none=True) for each in answers))
        self.answers |= {answer.request: answer for answer in answers}

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def _check_facts(path: Path, found: dict[str, Any], facts: Mapping[str, object]) -> None:
    wrong = [name for name in facts if found.get(name) != facts[name]]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{path} holds answers with {name}={found.get(name)!s:.60}, expected "
            f"{facts[name]!s:.60}; choose another --out, or remove that file"
        )


def _parsed(path: Path, number: int, row: dict[str, Any]) -> Answer:
    try:
        answer = Answer.model_validate(row)
        if not answer.is_whole():
            raise ValueError("it is neither a text nor a log-probability")
    except ValueError as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{path}: line {number} is no answer ({why}), expected those of a suite; restore the "
            "file or remove it"
        ) from None
    return answer
