"""Questions that a teacher answers for its students: code, word problems, instructions.

    python speedrun/make_prompts.py --out prompts
    python speedrun/make_prompts.py --out prompts --gsm8k train.jsonl --instructions a.json b.jsonl
    python speedrun/make_prompts.py --out prompts --code DIR DIR

writes one file of chats per source: `functions.jsonl` (functions to write by signature and
docstring, from the standard library or the files below DIR), `sums.jsonl` (GSM8K without the rows
that a suite asks) and `instructions.jsonl`. `qat sample --prompts functions.jsonl:2,sums.jsonl:1`
answers them in shares. The same sources make the same bytes.
"""

import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import indent
from typing import Annotated, NamedTuple

from cyclopts import App, Parameter

from qat.extensions.suite.rows import HELD_OUT, read_rows
from qat.files import write_atomically

app = App(help=__doc__)
STDLIB = Path(sysconfig.get_path("stdlib"))
Paths = Annotated[tuple[Path, ...], Parameter(consume_multiple=True)]
SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "lib2to3"}
"""Folders whose functions nobody would ask for, or that are not the standard library."""
DOC_CHARACTERS = (40, 900)
"""Shortest and longest docstring: a shorter one says too little, a longer one fills a row."""
UNQUOTABLE = ("\\", '"""', "```")
QUESTION_CHARACTERS = 1500
"""Longest instruction: a row needs room for the answer."""
SEED = 0
CODE_WORDS = (
    "Complete the following Python function. Answer with the whole function in one ```python "
    "block.\n\n```python\n{code}\n```",
    "Complete this Python function.\n\n```python\n{code}\n```",
    "Write a Python function `{signature}`.\n\n{doc}",
    "Write `{signature}` in Python, with a short example of its use.\n\n{doc}",
)
"""Ways to ask for a function; the first has the words of the suite's `humaneval`."""
SUM_WORDS = (
    "{question}\nThink step by step. End with the answer alone, a number, behind ####.",
    "{question}",
)
"""Ways to ask a word problem; the first has the words of the suite's `gsm8k`."""


class Function(NamedTuple):
    """A documented function of some source file."""

    signature: str
    """Its name and arguments, without a method's own object."""
    doc: str
    """Its docstring, without indentation."""


@app.default
def main(
    *, out: Path, gsm8k: Path | None = None, instructions: Paths = (), code: Paths = (STDLIB,)
) -> None:
    """Write a file of chats for each source to OUT.

    Args:
        out: Directory of the files.
        gsm8k: GSM8K's training file; its last rows are kept as questions of a suite.
        instructions: Files of rows with `instruction` (and `input`), or with `prompt`.
        code: Directories of Python files; by default the standard library.
    """
    sources = {"functions": functions_asked(code)} if code else {}
    if gsm8k is not None:
        sources["sums"] = sums_asked(gsm8k)
    if instructions:
        sources["instructions"] = instructions_asked(instructions)
    out.mkdir(parents=True, exist_ok=True)
    for name, questions in sources.items():
        asked = sorted(set(questions))
        random.Random(SEED).shuffle(asked)
        chats = [{"messages": [{"role": "user", "content": each}]} for each in asked]
        write_atomically(out / f"{name}.jsonl", "".join(json.dumps(each) + "\n" for each in chats))
        print(f"{out / name}.jsonl: {len(chats):,} prompts")


def functions_asked(roots: Iterable[Path]) -> Iterator[str]:
    """Yield all questions for each documented function below `roots`."""
    for signature, doc in {each for root in roots for each in functions_of(root)}:
        code = f"def {signature}:\n" + indent(f'"""{doc}"""', "    ")
        yield from (way.format(code=code, signature=signature, doc=doc) for way in CODE_WORDS)


def functions_of(root: Path) -> Iterator[Function]:
    """Yield the documented public functions and methods of the Python files below `root`."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & {*path.relative_to(root).parts}:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes of old files
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # a template, or a file in another encoding
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                doc = ast.get_docstring(node)
                if doc and is_quotable(doc):
                    yield Function(signature(node), doc)


def is_quotable(doc: str) -> bool:
    """Return whether a docstring has a useful length, and can stand in code as it is."""
    least, most = DOC_CHARACTERS
    return least <= len(doc) <= most and not any(each in doc for each in UNQUOTABLE)


def signature(node: ast.FunctionDef) -> str:
    """Return name and arguments; a method becomes a function of its other arguments."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in {"self", "cls"}:
        del arguments.args[0]  # defaults are those of the last arguments
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({ast.unparse(arguments)}){returns}"


def sums_asked(path: Path) -> Iterator[str]:
    """Yield GSM8K's questions but for those that a suite asks."""
    for row in read_rows(path)[:-HELD_OUT]:
        yield from (way.format(question=row["question"]) for way in SUM_WORDS)


def instructions_asked(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the instructions of all files that leave room for an answer.

    Raises:
        SystemExit: a row has none.
    """
    for path in paths:
        for row in read_rows(path):
            asked = row.get("prompt") or row.get("instruction")
            if asked is None:
                raise SystemExit(
                    f"{path} has a row of {', '.join(row)}, expected instruction or prompt; give "
                    "another file to --instructions"
                )
            first, *_ = row.get("instances") or [{}]  # Self-Instruct's rows have several
            given = row.get("input", first.get("input"))
            question = f"{asked}\n\n{given}" if given else str(asked)
            if len(question) <= QUESTION_CHARACTERS:
                yield question


if __name__ == "__main__":
    app()
