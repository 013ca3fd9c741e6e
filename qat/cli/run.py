"""`qat run`: from a model and a text to a trained, measured, exported student, in one command.

DIR/  recipe.toml  cache/  converted/  trained/  eval.json  export/TARGET/  report.html
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Parameter
from pydantic import BaseModel

from qat.cli.convert import Targets
from qat.cli.pipeline import Pipeline
from qat.config import Formats, Learns, Required, Settings, Speed, Steps, Text
from qat.errors import ConfigError, QatError
from qat.files import parse_toml
from qat.lock import held

if TYPE_CHECKING:
    from collections.abc import Mapping

    Table = dict[str, object]

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
CHOSEN = ("num_sequences", "held_out")
"""Settings of a cache that `choices` may make."""
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

    def tables(self) -> "dict[str, Table]":
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
        return {name: _given(table) for name, table in found.items()}


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
        model: directory or hub id of a causal language model.
        config: settings.
        out: directory for everything that is made.
        targets: what the student is to be exported to: formats become what that holds without
            loss. `packed`, the checkpoint itself, if not given.
    """
    from qat.cli import app
    from qat.logs import Terminal

    recipes, app.config = app.config, None  # from here its tables are read by `Road`, once
    tables = parse_toml(recipes[0].path.read_text(encoding="utf-8")) if recipes else {}
    with held(out):
        pipeline = Pipeline("run", out, Terminal())
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
        tables: "Mapping[str, Table]",
    ) -> None:
        """Every stage's settings are checked here, before the first one works.

        Raises:
            ConfigError: a setting is wrong, or another one than a stage that is done was made with.
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
        self._check_what_it_is_of()
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

    def go(self) -> dict[str, object]:
        """Make what is not made yet; show the teacher beside the students, and what comes next."""
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

    def _check_what_it_is_of(self) -> None:
        """Refuse another model or text than what is done was made of."""
        keys = {"cache": ("data", "teacher", "model"), "convert": ("for",)}
        for stage in self.done:
            now, was = self.settings["run"], self.pipeline.recorded["run"]
            for key in keys.get(stage, ()):
                self.pipeline.check_same("run", {key: now.get(key)}, {key: was.get(key)})

    def _choices(self) -> "Table":
        """What was chosen for a cache that is not done yet, or is to be chosen for it."""
        recorded = self.pipeline.recorded.get("cache", {})
        known = {key: recorded[key] for key in CHOSEN if key in recorded}
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
        from qat.cli import app
        from qat.cli.parser import mistake

        needed = {"convert": ["--out", "x"], "train": ["--out", "x"]}.get(stage, [])
        needed += {"eval": ["x"], "export": ["--to", self.targets[0], "--out", "x"]}.get(stage, [])
        tokens = [str(word) for word in (stage, *self._words(stage), *needed)]
        try:
            _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            raise ConfigError(f"[{stage}] {mistake(app, tokens, error)}") from error
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


def choices(data: str, num_sequences: int) -> "Table":
    """Settings of a cache of `data`: no more than is read, and enough held out to judge by."""
    from itertools import islice

    from qat.data.sources import open_source

    held_out = _defaults("cache")["held_out"]
    count = sum(1 for _ in islice(open_source(data).documents, FEW_DOCUMENTS))
    if count < FEW_DOCUMENTS or num_sequences * held_out < FEW_HELD_OUT:
        held_out = SHARE_OF_FEW
    return {"num_sequences": num_sequences, "held_out": held_out}


def _defaults(stage: str) -> "Table":
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


def _given(table: "Mapping[str, object | None]") -> "Table":
    return {name: value for name, value in table.items() if value is not None}
