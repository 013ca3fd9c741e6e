"""Try all classes of causal language models of transformers, from teacher to written student.

    python speedrun/measure_families.py --figures figures.jsonl
    python speedrun/measure_families.py --family Qwen3MoeForCausalLM --device cuda
    python speedrun/measure_families.py --family BartForCausalLM --dtype bf16

A tiny random model of each class (tests/families.py) goes through cache, convert, train, eval,
generate and export on the CPU. All of them take about ten minutes and write docs/models.md.
"""

import io
import sys
import tempfile
import textwrap
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

Look here whether a model can be teacher and student before you download it. The class is in the
model's `config.json`, under `architectures`. These are the causal language models of transformers
{version}, and {of_images} classes for images and text: {working} of {tried} work.

"Work" means that a tiny random model of the class went through `qat cache`, `convert --to q2a4
--calibration`, `train`, `eval`, `generate` and `export --to dense`, with the same tensors to the
bit after converting and the same logits after exporting. In a clone you can try a class yourself:

    python speedrun/measure_families.py --family Qwen3MoeForCausalLM

A class that is not listed may work too ([what it needs](architecture.md#a-model-family)). In models
of text and images the text part is quantized, and the files that prepare images are copied.

"""
REASONS = {
    "other logits than its head": "the head does more than multiply by its weight",
    "features of its": "the head does more than multiply by its weight",
    "reads tokens that come later": "it reads later tokens, so it is no causal model",
    "documents are packed": "it computes something else where documents are packed",
    "for which transformers has no causal": "it is a part of a model: name the whole model",
    "decoder blocks": "its decoder blocks are not one list",
    "holds experts in one tensor": "unknown layout of experts: use a plan for the attention alone",
    "cannot be run one by one": "layers cannot run one by one: convert without `--calibration`",
}
"""The page's words for each refusal, by a part of its message; other messages stand as they are."""
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
        goal = ">= 45" if name == "working" else ""
        record(figures, f"families_{name}", count, "classes", goal, runs=1)
    PAGE.write_text(
        HEAD.format(version=__version__, of_images=len(OF_IMAGES), **counts)
        + "## These work\n\n"
        + textwrap.fill(named(works), 100)
        + "\n\n## These are refused\n\n"
        + table({name: reason(why) for name, why in refused.items()})
        + "\n## These were not tried\n\n"
        + table({name: NOT_BUILT[name] for name in NOT_BUILT if name in FAMILIES}),
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


def named(classes: list[str]) -> str:
    """Return the classes as one line of code spans."""
    return ", ".join(f"`{name}`" for name in classes)


def reason(why: str) -> str:
    """Return the page's words for a verb's message, or the message."""
    return next((words for part, words in REASONS.items() if part in why), why)


def table(reasons: dict[str, str]) -> str:
    """Return a table of classes by reason."""
    groups: dict[str, list[str]] = {}
    for name, why in reasons.items():
        groups.setdefault(why, []).append(name)
    rows = [f"| {named(classes)} | {why} |" for why, classes in groups.items()]
    return "\n".join(["| class | why |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    app()
