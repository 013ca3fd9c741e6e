"""`qat run`: from a model and a text to a trained, measured, exported student, in one command.

DIR/  recipe.toml  cache/  converted/  trained/  eval.json  export/TARGET/  report.html

It is a pipeline, as `qat demo` is another: verbs one after the other in one directory, each as a
user would call it, none twice. A stage is done when what it makes is there, whole: every verb gives
its directory a name, or its last file, only then. So a pipeline that was killed anywhere goes on by
asking the disk.
"""

import json
import shlex
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from cyclopts import CycloptsError, Parameter
from cyclopts.config import Toml
from pydantic import BaseModel

from qat.cli.convert import Targets
from qat.cli.parser import app, mistake, run_verb
from qat.config import Formats, Learns, Required, Settings, Speed, Steps, Text, refuse_code
from qat.convert.config import REPORT_NAME
from qat.errors import ConfigError, QatError, Stopped
from qat.files import check_free, held, parse_json, parse_toml, write_atomically
from qat.logs import EXAM, RECIPE, SAMPLES, SUMMARY, Terminal

Table = dict[str, object]
LAST_FILES = {"convert": REPORT_NAME, "train": SUMMARY, "export": ""}
"""What is there once a verb is done, in the directory that it makes; a cache says so itself."""
FREE_TO_CHANGE = {"device", "xla_cache_dir"}
"""Settings of a stage that is done which it may be called with in another value."""


class Pipeline:
    """The stages of one directory, `DIR/recipe.toml` with their settings, `DIR/eval.json`."""

    def __init__(self, verb: str, out: Path) -> None:
        """`verb` is whose directory it is: the recipe has a table of that name.

        Raises:
            ConfigError: `out` holds something else, or its recipe is damaged.
        """
        self.verb = verb
        self.out = out
        self.console = Terminal()
        self.recorded: dict[str, dict[str, object]] = {}
        """The tables that an earlier call wrote."""
        self.has_news = False
        """Whether this call has made or measured anything."""
        recipe = out / RECIPE
        if recipe.is_file():
            try:
                self.recorded = parse_toml(recipe.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(
                    f"{recipe} is not TOML ({error}), expected the settings that this directory "
                    "was begun with; restore it or choose another --out"
                ) from None
            refuse_code(self.recorded, str(recipe))
        if verb not in self.recorded:
            check_free(
                out,
                in_place=True,
                mend=f"choose another --out ('qat {verb}' made nothing in this one)",
            )

    def record(self, tables: Mapping[str, Table]) -> None:
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
        report = parse_json((converted / LAST_FILES["convert"]).read_text(encoding="utf-8"))
        if "teacher" not in exams:
            same = {"kd_nats": 0.0, "kl_nats": 0.0, "top1_frac": 1.0, "ppl": found["teacher_ppl"]}
            exams["teacher"] = {**same, "megabytes": _megabytes(Path(teacher))}
        bits = {key: report[key] for key in ("bits_per_weight", "whole_bits_per_weight")}
        found |= {**bits, "megabytes": _megabytes(model)}
        exams[name] = {key: value for key, value in found.items() if value is not None}
        write_atomically(self.out / EXAM, json.dumps(exams, indent=1, default=str) + "\n")

    def compare(self, models: Mapping[str, Path | str], prompt: str, *words: object) -> None:
        """Let each of `models` continue `prompt` with its likeliest words, in `samples.json`.

        It is done anew for another prompt, or where something new was made.
        """
        path = self.out / SAMPLES
        if path.is_file() and not self.has_news:
            self.say(f"generate: done before, in {path}")
            return
        self.has_news = True
        flags = ["--prompt", prompt, "--raw", "--temperature", 0, "--max-new-tokens", 48, *words]
        texts = {
            name: self.call("generate", model, *flags, stage=f"generate {name}")["text"]
            for name, model in models.items()
        }
        found = {"prompt": prompt, "texts": texts}
        write_atomically(path, json.dumps(found, indent=1, ensure_ascii=False) + "\n")

    def exams(self) -> dict[str, dict[str, object]]:
        """What every model judged so far came to, the teacher first."""
        path = self.out / EXAM
        return parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def call(self, *words: object, stage: str) -> dict[str, object]:
        """Run one verb in this process, printed as a user would type it; what it found.

        Raises:
            QatError: what the verb says, `stage` in front.
        """
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

        from qat.observe.runs import EXAM_CAPTION, EXAM_COLUMNS, exam_rows

        table = Table(*EXAM_COLUMNS, caption=EXAM_CAPTION, caption_justify="left")
        for row in exam_rows(self.exams()):
            table.add_row(*row)
        self.console.print(table)


def _megabytes(model: Path) -> float | None:
    """Of the weights of a model directory or a run's best one, in 10**6 bytes; None of a hub id."""
    from qat.models.cost import model_bytes
    from qat.models.load import resolve

    path = Path(resolve(str(model)))
    return model_bytes(path) / 1e6 if path.is_dir() else None


DEFAULT_PLAN, PACKED = "q2a4", ("packed",)
STAGES = ("cache", "convert", "train", "eval", "export")
PLACES = {"convert": "converted", "train": "trained"}
"""Directories that are not called as their stage."""
FOUND = {
    "cache": {"teacher", "data"},
    "convert": {"source", "for"},
    "train": {"student", "cache_dir", "resume", "dry_run"},
    "eval": {"student", "teacher", "cache_dir"},
    "export": {"model", "to"},
}
"""What `qat run` itself tells a stage, beside `out`: no recipe may."""
FEW_DOCUMENTS, FEW_HELD_OUT, SHARE_OF_FEW = 400, 64, 0.2
"""Of fewer documents, or if fewer sequences came of it, more than the default share is held out."""
PASSES, SHORTEST = 10, 20
"""How often a small text is read at most, and the fewest steps that train anything."""
STEPS_A_PASS = 8
"""The fewest steps in which a small text is read once: its batches are smaller for it."""


class RunConfig(Settings):
    """What is set most often; the rest of a stage's flags is in its table of the recipe."""

    data: Required[str]
    """Text to learn from, as in 'qat cache --data': a file, a directory, a datasets id."""
    to: Formats[str | None] = None
    """Preset or file with a plan, as in 'qat convert --to'; q2a4 if not given."""
    teacher: str | None = None
    """Model to learn from, MODEL itself if not given."""
    sequence_length: Text[int | None] = None
    """Tokens in a sequence; as 'qat cache' has it if not given."""
    num_sequences: Text[int | None] = None
    """Training sequences; as many as training reads, or all that the text has, if not given."""
    mlp_only: Learns[bool] = False
    """Train the MLPs only."""
    max_steps: Steps[int | None] = None
    """Optimizer steps; 1,000, or fewer where the text is small, if not given."""
    device: Speed[str | None] = None
    """auto, cpu, cuda, cuda:1, ...; of all stages."""
    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"] | None] = None
    """What cache, train and eval compute in."""

    def tables(self) -> dict[str, Table]:
        """The flags that were given, as recipe keys by stage."""
        everywhere = {"device": self.device}
        computed = {**everywhere, "dtype": self.dtype}
        text = {"sequence_length": self.sequence_length, "num_sequences": self.num_sequences}
        learning = {"max_steps": self.max_steps, "mlp_only": self.mlp_only or None}
        found = {
            "cache": {**text, **computed},
            "convert": {"to": self.to, **everywhere},
            "train": {**learning, **computed},
            "eval": computed,
            "export": {},
        }
        return {
            stage: {name: value for name, value in table.items() if value is not None}
            for stage, table in found.items()
        }


def run(
    model: Required[str],
    *,
    config: Annotated[RunConfig, Parameter(name="*")],
    out: Required[Path],
    targets: Formats[Targets] = (),
) -> dict[str, object]:
    """Take MODEL to a student: cache its words on a text, quantize, train, judge, export.

    What is done in OUT is not done again: after a kill the same command goes on. A recipe
    (--recipe) may set any flag of a stage in [cache], [convert], [train], [eval] and [export];
    OUT/recipe.toml has all that were used.

    Args:
        model: directory, GGUF file or hub id of a causal language model.
        config: settings.
        out: directory for everything that is made.
        targets: what the student is to be exported to: formats become what that holds without
            loss. `packed`, the checkpoint itself, if not given.
    """
    recipes = [each for each in app.config or () if isinstance(each, Toml)]
    app.config = None  # from here its tables are read by `Road`, once
    tables = parse_toml(recipes[0].path.read_text(encoding="utf-8")) if recipes else {}
    with held(out):
        pipeline = Pipeline("run", out)
        road = Road(pipeline, model, config=config, targets=targets or PACKED, tables=tables)
        return road.go()


class Road:
    """The stages of one run, from its settings to its students."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: str,
        *,
        config: RunConfig,
        targets: tuple[str, ...],
        tables: Mapping[str, Table],
    ) -> None:
        """Every stage's settings are checked here, before the first one works.

        Raises:
            ConfigError: a setting is wrong, or another one than a stage that is done was made with.
            ExportError: the library of a target is missing.
        """
        self.pipeline = pipeline
        self.model = model
        self.config = config
        self.teacher = config.teacher or model
        self.targets = targets
        self.done = [stage for stage in STAGES if self._is_done(stage)]
        run = {"model": model, **config.model_dump(exclude_none=True), "for": list(targets)}
        self.settings: dict[str, Table] = {"run": run}
        """Of each stage all that was or is to be set, for `recipe.toml`."""
        # what is done was made of the same model and text
        for stage in self.done:
            was = pipeline.recorded["run"]
            for key in {"cache": ("data", "teacher", "model"), "convert": ("for",)}.get(stage, ()):
                pipeline.check_same("run", {key: run.get(key)}, {key: was.get(key)})
        flags = config.tables()
        self.tables: dict[str, Table] = {}
        """Of each stage what somebody has set, or was set before."""
        for stage in STAGES:
            table = {k.replace("-", "_"): v for k, v in tables.get(stage, {}).items()}
            taken = sorted(table.keys() & {*FOUND[stage], "out"})
            if taken:
                raise ConfigError(
                    f"[{stage}] {taken[0]} is for 'qat run' itself to say, expected other keys; "
                    "drop it"
                )
            is_begun = stage in self.done or (pipeline.out / PLACES.get(stage, stage)).exists()
            before = pipeline.recorded.get(stage, {}) if is_begun else {}
            self.tables[stage] = before | table | flags[stage]
        if not {"to", "bits_budget", "attention"} & self.tables["convert"].keys():
            self.tables["convert"]["to"] = DEFAULT_PLAN
        if "cache" not in self.done:
            self.tables["cache"] = self._choices() | self.tables["cache"]
        for stage in STAGES:
            self._resolve(stage)
        self._check_libraries()

    def go(self) -> dict[str, object]:
        """Make what is not made yet; show the teacher beside the students, and what comes next."""
        from qat.generate.text import held_out_prompt
        from qat.models.load import load_tokenizer

        pipeline = self.pipeline
        pipeline.record(self.settings)
        cache = pipeline.make("cache", "cache", *self._words("cache"))
        if "train" not in self.done:
            self._fit_to_cache(cache)
            pipeline.record(self.settings)
        converted = pipeline.make("converted", "convert", *self._words("convert"))
        trained = pipeline.make("trained", "train", *self._words("train"))
        for name, student in (("converted", converted), ("trained", trained)):
            words = self._words("eval")
            pipeline.examine(name, student, *words, teacher=self.teacher, converted=converted)
        models = {"teacher": self.teacher, "converted": converted, "trained": trained}
        prompt = held_out_prompt(cache, load_tokenizer(self.teacher))
        device = self.config.tables()["eval"]
        pipeline.compare(models, prompt, *chain(*((f"--{k}", v) for k, v in device.items())))
        ships = [
            pipeline.make(f"export/{target}", "export", *self._words("export"), "--to", target)
            for target in self.targets
        ]
        page = pipeline.report()
        pipeline.show()
        pipeline.say(f"the student: {', '.join(map(str, ships))}; all about it: {page}")
        pipeline.say(f"next: qat generate {trained} --prompt TEXT")
        kl = {name: found["kl_nats"] for name, found in pipeline.exams().items()}
        return {"out": pipeline.out, "exports": ships, "report": page, "kl_nats": kl}

    def _is_done(self, stage: str) -> bool:
        """Whether a stage has made all, or of several things the first."""
        if stage == "eval":
            return bool(self.pipeline.exams())
        place = f"export/{self.targets[0]}" if stage == "export" else PLACES.get(stage, stage)
        return self.pipeline.is_done(stage, place)

    def _check_libraries(self) -> None:
        """Refuse a target whose library is missing now, not behind all of the work.

        Raises:
            ExportError: which one, and how it is installed.
        """
        from qat.export.targets import check_library

        for target in self.targets:
            if not self.pipeline.is_done("export", f"export/{target}"):
                check_library(target)

    def _choices(self) -> Table:
        """What was chosen for a cache that is not done yet, or is to be chosen for it."""
        recorded = self.pipeline.recorded.get("cache", {})
        known = {k: recorded[k] for k in ("num_sequences", "held_out") if k in recorded}
        wished = {**_defaults("train"), **self.tables.get("train", {})}
        read = wished["max_steps"] * wished["batch_size"] * wished["grad_accum_steps"]
        wanted = self.tables["cache"].get("num_sequences") or read
        return known or choices(self.config.data, wanted)

    def _wired(self, stage: str) -> list[object]:
        """What a stage is told of the others."""
        place = self.pipeline.out
        if stage == "cache":
            return ["--teacher", self.teacher, "--data", self.config.data]
        if stage == "convert":
            own_text = "calibration" in self.tables["convert"]
            ships = [] if self.targets == PACKED else ["--for", ",".join(self.targets)]
            return [self.model, *([] if own_text else ["--calibration", place / "cache"]), *ships]
        cache = ["--cache-dir", place / "cache"]
        words = {"train": [place / "converted", *cache], "eval": cache}
        return words.get(stage, [place / "trained"])

    def _resolve(self, stage: str) -> None:
        """Parse a stage's command line as it will run, and note all of its settings.

        Raises:
            ConfigError: a setting is wrong, or differs from what the stage was done with.
        """

        needed = {"convert": ["--out", "x"], "train": ["--out", "x"]}.get(stage, [])
        needed += {"eval": ["x"], "export": ["--to", self.targets[0], "--out", "x"]}.get(stage, [])
        tokens = [str(word) for word in (stage, *self._words(stage), *needed)]
        try:
            _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            raise ConfigError(f"[{stage}] {mistake(tokens, error)}") from error
        except QatError as error:
            error.args = (f"[{stage}] {error}",)
            raise
        found = dict(self.tables[stage])
        if "config" in bound.arguments:
            found |= bound.arguments["config"].model_dump(mode="json", exclude_none=True)
        left_out = {*FOUND[stage], "out"}
        if stage == "convert" and "--calibration" in map(str, self._wired(stage)):
            left_out.add("calibration")
        self.settings[stage] = {k: v for k, v in found.items() if k not in left_out}
        if stage in self.done:
            self.pipeline.check_same(
                stage, self.settings[stage], self.pipeline.recorded.get(stage, {})
            )

    def _words(self, stage: str) -> list[object]:
        """A stage's words behind its verb: what it is told, and the settings in its table."""
        defaults = _defaults(stage)
        words = self._wired(stage)
        for name, value in self.tables[stage].items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                words.append(flag)
            elif value is not False and value != defaults.get(name):
                words += [flag, ",".join(value) if isinstance(value, list) else value]
        return words

    def _fit_to_cache(self, cache: Path) -> None:
        """Where nobody says how long to train: not much longer than the text has something new."""
        from qat.data.reader import TeacherCache

        sequences = TeacherCache.open(cache).num_sequences("train")
        table, defaults = self.tables["train"], _defaults("train")
        batch = table.get("batch_size") or min(
            defaults["batch_size"], max(1, sequences // STEPS_A_PASS)
        )
        enough = max(SHORTEST, PASSES * sequences // batch)
        steps = table.get("max_steps") or min(defaults["max_steps"], enough)
        often = max(1, min(100, steps // 5))
        chosen = {"batch_size": batch, "max_steps": steps, "eval_every": often, "save_every": often}
        self.tables["train"] = chosen | table
        self._resolve("train")


def choices(data: str, num_sequences: int) -> Table:
    """Settings of a cache of `data`: no more than is read, and enough held out to judge by."""
    from itertools import islice

    from qat.data.sources import open_source

    held_out = _defaults("cache")["held_out"]
    count = sum(1 for _ in islice(open_source(data).documents, FEW_DOCUMENTS))
    if count < FEW_DOCUMENTS or num_sequences * held_out < FEW_HELD_OUT:
        held_out = SHARE_OF_FEW
    return {"num_sequences": num_sequences, "held_out": held_out}


def _defaults(stage: str) -> Table:
    """The default of every setting of a verb."""
    from qat.convert.config import ConvertConfig
    from qat.data.config import CacheConfig
    from qat.evaluate.config import EvalConfig
    from qat.export.config import ExportConfig
    from qat.train.config import TrainConfig

    kinds: dict[str, type[BaseModel]] = {
        "cache": CacheConfig,
        "convert": ConvertConfig,
        "train": TrainConfig,
        "eval": EvalConfig,
        "export": ExportConfig,
    }
    fields = kinds[stage].model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}
