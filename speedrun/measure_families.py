"""Which classes of causal language models of transformers work, from teacher to written student.

    python speedrun/measure_families.py --figures figures.jsonl
    python speedrun/measure_families.py --family Qwen3MoeForCausalLM --device cuda
    python speedrun/measure_families.py --family BartForCausalLM --dtype bf16

A tiny random model of each class (tests/families.py) goes through cache, convert, train, eval,
generate and export on the CPU. All of them take about ten minutes and write docs/models.md.
"""

import io
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from cyclopts import App
from figures import ROOT, record
from transformers import __version__

from qat import cli

sys.path.insert(0, str(ROOT / "tests"))
from families import FAMILIES, NOT_BUILT, OF_IMAGES, walk

PAGE = ROOT / "docs" / "models.md"
HEAD = """\
# Which models work

For who wants to know whether a model's class can be a teacher and a student before downloading it.
A tiny random model of each class of causal language models in transformers {version}, and of
{of_images} of images and text, went through `qat cache`, `convert --to q2a4 --calibration`,
`train`, `eval`, `generate` and `export --to dense`. Converting opens what it wrote again and
compares tensors to the bit; exporting compares logits.
`python speedrun/measure_families.py` wrote this page. {working} of {tried} classes work.

A class that is not listed may work: what is needed is said in
[architecture.md](architecture.md#a-model-family). Of a model of text and images the text is meant;
what prepares its images is copied beside the student.

"""
app = App(help=__doc__)


@app.default
def measure(
    *,
    family: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    figures: Path | None = None,
) -> None:
    """Try one class on a device and print what its verbs said, or all of them on the CPU."""
    if family is not None:
        print(f"{family}: {tried(family, device, dtype) or 'works'}")
        return
    said = {}
    for name in FAMILIES:
        said[name] = NOT_BUILT.get(name) or tried(name)
        print(f"{name}: {said[name] or 'works'}", flush=True)
    works = [name for name, why in said.items() if not why]
    refused = {name: why for name, why in said.items() if why and name not in NOT_BUILT}
    counts = {"working": len(works), "tried": len(works) + len(refused)}
    for name, count in counts.items():
        print(f"families_{name}: {count}")
        if figures is not None:
            goal = ">= 45" if name == "working" else ""
            record(figures, f"families_{name}", count, "classes", goal, runs=1)
    PAGE.write_text(
        HEAD.format(version=__version__, of_images=len(OF_IMAGES), **counts)
        + "## Work\n\n"
        + "\n".join(f"- `{name}`" for name in works)
        + "\n\n## Are refused\n\n"
        + table("class", "what is said", refused)
        + "\n## Were not tried\n\n"
        + table("class", "why", {name: NOT_BUILT[name] for name in NOT_BUILT if name in FAMILIES}),
        encoding="utf-8",
    )


def tried(family: str, device: str = "cpu", dtype: str = "auto") -> str:
    """The last line of the verb that refused that class, or an empty one."""
    said = io.StringIO()

    def call(*tokens: object) -> int:
        cli.app.config = None
        argv = ["qat", *map(str, tokens)]
        with patch.object(sys, "argv", argv), redirect_stderr(said), redirect_stdout(io.StringIO()):
            try:
                cli.main()
            except SystemExit as stop:
                return int(stop.code or 0)
            except Exception as error:  # noqa: BLE001 - of any class, to be told
                print(f"a bug of ours: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
        return 0

    with tempfile.TemporaryDirectory() as folder:
        verb = walk(family, Path(folder), call, device, dtype)
    if not verb:
        return ""
    last = said.getvalue().strip().splitlines()[-1].removeprefix("qat: ")
    for name, word in {
        "float": "MODEL",
        "cache": "CACHE",
        "student": "STUDENT",
        "run": "RUN",
    }.items():
        last = last.replace(f"{folder}/{name}", word)
    return f"`qat {verb}`: {last}"


def table(first: str, second: str, rows: dict[str, str]) -> str:
    """A table of two columns."""
    lines = [f"| {first} | {second} |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {why} |" for name, why in rows.items())]) + "\n"


if __name__ == "__main__":
    app()
