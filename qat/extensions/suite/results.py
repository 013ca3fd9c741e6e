"""The numbers of a suite: as JSON, as a table in the terminal, and as rows of a report."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qat.config import explain
from qat.errors import CheckpointError
from qat.extensions.suite.compare import (
    Judged,
    Mean,
    compare,
    first_divergence,
    mean,
    mean_retention,
)
from qat.files import parse_json
from qat.logs import duration

FORMAT = 1
"""Version of the file."""
COLUMNS = (
    "task",
    "questions",
    "teacher, %",
    "student, %",
    "retention, %",
    "flips",
    "same, %",
    "shared tokens",
)
CAPTION = (
    "Right answers +- the standard error. Retention: student over teacher. Flips: questions from "
    "right to wrong (-) and from wrong to right (+). Same: equal answers. Shared tokens: those of "
    "a greedy answer before it leaves the teacher's, median (mean)."
)
WIDTH = 110
"""Columns of the table where output goes to a file."""

Found = Mapping[str, Mapping[str, Mapping[int, Judged]]]
"""Judged answers by side (`student`, `teacher`), task and number of the question."""


class TaskResult(BaseModel):
    """The numbers of one task; without a teacher what compares is None."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: int = Field(ge=1)
    student: Mean
    teacher: Mean | None = None
    retention: Mean | None = None
    right_to_wrong: int | None = None
    wrong_to_right: int | None = None
    agreement: Mean | None = None
    first_divergence_median_tokens: float | None = None
    first_divergence_mean_tokens: float | None = None
    same_text_frac: float | None = None

    @classmethod
    def of(cls, student: Mapping[int, Judged], teacher: Mapping[int, Judged] | None) -> Self:
        """Judge the answers to the same questions."""
        mine = [*student.values()]
        score = mean([each.score for each in mine])
        if teacher is None:
            return cls(questions=len(mine), student=score)
        others = [teacher[number] for number in student]
        found = compare(mine, others)
        return cls(
            questions=len(mine),
            student=score,
            teacher=mean([each.score for each in others]),
            retention=found.retention,
            right_to_wrong=found.right_to_wrong,
            wrong_to_right=found.wrong_to_right,
            agreement=found.agreement,
            first_divergence_median_tokens=found.first_divergence_median,
            first_divergence_mean_tokens=found.first_divergence_mean,
            same_text_frac=found.same_text_frac,
        )

    def row(self, label: str) -> list[str]:
        """Return the cells of `COLUMNS`."""
        median, average = self.first_divergence_median_tokens, self.first_divergence_mean_tokens
        return [
            label,
            f"{self.questions:,}",
            _with_error(self.teacher),
            _with_error(self.student),
            _with_error(self.retention),
            "" if self.teacher is None else f"-{self.right_to_wrong} +{self.wrong_to_right}",
            "" if self.agreement is None else f"{100 * self.agreement.value:.1f}",
            "" if median is None else f"{median:g} ({average:.1f})",
        ]


class Results(BaseModel):
    """The numbers of a suite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    suite: str
    student: str
    teacher: str | None = None
    seconds: dict[str, float]
    """Seconds of this call by side, with loading; answers that were there cost none."""
    tasks: dict[str, TaskResult]
    retention: Mean | None
    """Mean of the tasks' retentions."""

    @classmethod
    def of(
        cls, found: Found, sides: Mapping[str, str], seconds: dict[str, float], suite: str
    ) -> Self:
        """Compare the sides of a suite."""
        teacher = found.get("teacher", {})
        tasks = {k: TaskResult.of(v, teacher.get(k)) for k, v in found["student"].items()}
        return cls(
            suite=suite,
            student=sides["student"],
            teacher=sides.get("teacher"),
            seconds=seconds,
            tasks=tasks,
            retention=mean_retention([task.retention for task in tasks.values()]),
        )

    def rows(self) -> list[list[str]]:
        """Return the cells of `COLUMNS` for each task, and for their mean if there are several."""
        rows = [task.row(label) for label, task in self.tasks.items()]
        if len(rows) > 1 and self.retention is not None:
            rows.append(["mean", *[""] * 3, _with_error(self.retention), *[""] * 3])
        return rows


def question_rows(found: Found) -> Iterator[dict[str, object]]:
    """Yield what each question scored, to see which skills are lost."""
    for label, student in found["student"].items():
        for number, mine in student.items():
            row: dict[str, object] = {"task": label, "question": number, "student": mine.score}
            if "teacher" in found:
                other = found["teacher"][label][number]
                row |= {"teacher": other.score, "same_answer": mine.answer == other.answer}
                if mine.ids is not None and other.ids is not None:
                    row["first_divergence_tokens"] = first_divergence(mine.ids, other.ids)
            yield row


def read_results(path: Path) -> Results:
    """Return the numbers in the file of a suite.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    try:
        return Results.model_validate(parse_json(path.read_bytes()))
    except ValueError as error:
        why = explain(error) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{path} is damaged ({why}), expected the numbers of a suite; run the same 'qat eval "
            "--suite' again, which goes on with its answers"
        ) from None


def show(results: Results) -> None:
    """Print the table, and how long it took."""
    from qat.cli.tables import numbers_table, wide_console

    took = duration(sum(results.seconds.values()))
    title = f"{Path(results.student).name}, suite {results.suite}, {took}"
    table = numbers_table(COLUMNS, results.rows(), title)
    table.title_justify, table.caption, table.caption_justify = "left", CAPTION, "left"
    wide_console(WIDTH).print(table)


def _with_error(found: Mean | None) -> str:
    if found is None:
        return ""
    error = "" if found.stderr is None else f" +- {100 * found.stderr:.1f}"
    return f"{100 * found.value:.1f}{error}"
