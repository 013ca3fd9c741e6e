"""Verbs one after the other in one directory: each as a user would call it, none twice.

A stage is done when what it makes is there, whole: every verb gives its directory a name, or its
last file, only then. So a pipeline that was killed anywhere goes on by asking the disk.
"""

import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from qat.config import refuse_code
from qat.errors import ConfigError, QatError, Stopped
from qat.files import check_free, parse_toml, write_atomically
from qat.logs import EXAM, RECIPE, SUMMARY

if TYPE_CHECKING:
    from qat.logs import Terminal

Tables = Mapping[str, Mapping[str, object]]
LAST_FILES = {"convert": "convert_report.json", "train": SUMMARY, "export": ""}
"""What is there once a verb is done, in the directory that it makes; a cache says so itself."""
FREE_TO_CHANGE = {"device", "xla_cache_dir"}
"""Settings of a stage that is done which it may be called with in another value."""


class Pipeline:
    """The stages of one directory, `DIR/recipe.toml` with their settings, `DIR/eval.json`."""

    def __init__(self, verb: str, out: Path, console: "Terminal") -> None:
        """`verb` is whose directory it is: the recipe has a table of that name.

        Raises:
            ConfigError: `out` holds something else, or its recipe is damaged.
        """
        self.verb = verb
        self.out = out
        self.console = console
        self.recorded: dict[str, dict[str, object]] = {}
        """The tables that an earlier call wrote."""
        self.has_news = False
        """Whether this call has made or measured anything."""
        recipe = out / RECIPE
        if recipe.is_file():
            self.recorded = _read(recipe)
        if verb not in self.recorded:
            check_free(
                out,
                in_place=True,
                mend=f"choose another --out ('qat {verb}' made nothing in this one)",
            )

    def record(self, tables: Tables) -> None:
        """Write the settings of all stages, for the next call and for the reader."""
        self.out.mkdir(parents=True, exist_ok=True)
        kept = {name: dict(values) for name, values in tables.items()}
        write_atomically(self.out / RECIPE, tomli_w.dumps(kept))

    def is_done(self, verb: str, name: str) -> bool:
        """Whether the stage `name`, a call of `verb`, has made its directory whole."""
        path = self.out / name
        if verb == "cache":
            from qat.data.cache import MANIFEST, read_manifest

            return (path / MANIFEST).is_file() and read_manifest(path).state == "complete"
        last = path / LAST_FILES[verb]
        return last.is_file() if LAST_FILES[verb] else path.is_dir() and any(path.iterdir())

    def check_same(self, table: str, now: Mapping[str, object], was: Mapping[str, object]) -> None:
        """Refuse other settings for a stage that is done.

        Raises:
            ConfigError: the first one that differs.
        """
        for key in sorted({*now, *was} - FREE_TO_CHANGE):
            if now.get(key) != was.get(key):
                raise ConfigError(
                    f"[{table}] {key}={now.get(key)!r}, but that stage is done in {self.out} with "
                    f"{was.get(key)!r}; drop the change or choose another --out"
                )

    def make(self, name: str, verb: str, *words: object) -> Path:
        """Have the directory `name` made by `verb` with `words`, unless it is there; where it is.

        Raises:
            QatError: what the verb says, the stage's name in front.
        """
        made = self.out / name
        if self.is_done(verb, name):
            self.say(f"{verb}: done before, in {made}")
            return made
        self.has_news = True
        resume = ["--resume", "auto"] if verb == "train" and made.exists() else []
        self.call(verb, *words, "--out", made, *resume, stage=name)
        return made

    def examine(
        self, name: str, model: Path, *words: object, teacher: str, converted: Path
    ) -> None:
        """Judge `model` with `qat eval` and `words`, unless `eval.json` has it.

        `converted` is the checkpoint whose report knows its bits per weight.
        """
        exams = self.exams()
        if name in exams:
            self.say(f"eval {name}: done before, in {self.out / EXAM}")
            return
        self.has_news = True
        found = self.call("eval", model, "--teacher", teacher, *words, stage=f"eval {name}")
        report = json.loads((converted / LAST_FILES["convert"]).read_text(encoding="utf-8"))
        if "teacher" not in exams:
            same = {"kd_nats": 0.0, "kl_nats": 0.0, "top1_frac": 1.0, "ppl": found["teacher_ppl"]}
            exams["teacher"] = {**same, "megabytes": _megabytes(Path(teacher))}
        bits = {key: report[key] for key in ("bits_per_weight", "whole_bits_per_weight")}
        found |= {**bits, "megabytes": _megabytes(model)}
        exams[name] = {key: value for key, value in found.items() if value is not None}
        write_atomically(self.out / EXAM, json.dumps(exams, indent=1, default=str) + "\n")

    def exams(self) -> dict[str, dict[str, object]]:
        """What every model judged so far came to, the teacher first."""
        path = self.out / EXAM
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def call(self, *words: object, stage: str) -> dict[str, object]:
        """Run one verb in this process, printed as a user would type it; what it found.

        Raises:
            QatError: what the verb says, `stage` in front.
        """
        from qat.cli import run_verb

        tokens = [str(word) for word in words]
        self.say(f"\n$ qat {shlex.join(tokens)}", style="bold")
        began = time.perf_counter()
        try:
            found = run_verb(tokens)
        except KeyboardInterrupt:
            raise Stopped(f"stage {stage} was stopped; the same command goes on", 130) from None
        except Stopped as error:
            message = f"stage {stage}: {error}; here the same 'qat {self.verb}' goes on"
            raise Stopped(message, error.exit_code) from None
        except QatError as error:
            error.args = (f"stage {stage}: {error}",)
            raise
        self.say(f"{time.perf_counter() - began:.1f} s", style="dim")
        return found

    def say(self, line: str, style: str | None = None) -> None:
        """Print a line that may be copied: it is never broken to fit the terminal."""
        self.console.print(line, style=style, highlight=False, soft_wrap=True)

    def report(self) -> Path:
        """Have a page about all stages, written anew where there is something new; where it is."""
        page = self.out / "report.html"
        if self.has_news or not page.exists():
            self.call("report", self.out, "--out", page, stage="report")
        return page

    def show(self) -> None:
        """Print the teacher beside the models that were examined: numbers and sizes."""
        from rich.table import Table

        from qat.observe.exam import CAPTION, COLUMNS, exam_rows

        table = Table(*COLUMNS, caption=CAPTION, caption_justify="left")
        for row in exam_rows(self.exams()):
            table.add_row(*row)
        self.console.print(table)


def _megabytes(model: Path) -> float | None:
    """Of the weights of a model directory or a run's best one, in 10**6 bytes; None of a hub id."""
    from qat.models.cost import model_bytes
    from qat.models.load import resolve

    path = Path(resolve(str(model)))
    return model_bytes(path) / 1e6 if path.is_dir() else None


def _read(recipe: Path) -> dict[str, dict[str, object]]:
    try:
        tables = parse_toml(recipe.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{recipe} is not TOML ({error}), expected the settings that this directory was begun "
            "with; restore it or choose another --out"
        ) from None
    refuse_code(tables, str(recipe))
    return tables
