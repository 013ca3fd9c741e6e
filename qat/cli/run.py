"""`qat run`: from a model and a text to a trained, measured, exported student, in one command.

DIR/  recipe.toml  cache/  converted/  trained/  eval.json  student  export/TARGET/  report.html

It is a pipeline, as `qat demo` is another: verbs one after the other in one directory, each as a
user would call it, none twice. A stage is done when what it makes is there, whole: every verb gives
its directory a name, or its last file, only then. So a pipeline that was killed anywhere goes on by
asking the disk.
"""

import json
import re
import shlex
import time
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import tomli_w
from cyclopts import CycloptsError, Parameter
from cyclopts.config import Dict
from pydantic import create_model

from qat.cli.before_run import (
    Stages,
    TextFound,
    check_machine,
    check_models,
    check_teacher,
    check_text,
    check_words,
    forecast_run,
    foreseen,
)
from qat.cli.convert import Targets, show_forecast
from qat.cli.parser import app, mistake, run_verb, verb_flags
from qat.config import (
    Careful,
    DeviceSettings,
    Formats,
    Learns,
    Required,
    Settings,
    Speed,
    Steps,
    Text,
    read_toml,
)
from qat.convert.config import REPORT_NAME, ConvertConfig
from qat.data.config import CacheConfig
from qat.errors import ConfigError, ExportError, QatError, Stopped
from qat.evaluate.config import EvalConfig
from qat.export.config import ExportConfig, TargetName
from qat.files import check_free, held, parse_json, write_atomically
from qat.hooks import extension, hooks
from qat.logs import EXAM, RECIPE, SAMPLES, STUDENT, SUMMARY, Terminal
from qat.train.config import TrainConfig

if TYPE_CHECKING:
    from qat.convert.forecast import Forecast

Table = dict[str, object]
OF_ONE_CALL = DeviceSettings.model_fields.keys()
"""Settings of one call: a stage that is done may be called with another value, and no later call
inherits them."""
LAST_FILES = {"convert": REPORT_NAME, "train": SUMMARY, "export": ""}
"""The file that each verb writes last into its directory; a cache has a state in its manifest."""
PACKED: tuple[TargetName, ...] = ("packed",)


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
        self.recorded: dict[str, dict[str, object]] = {}  # the tables that an earlier call wrote
        self.has_news = False  # true once this call has made or measured anything
        recipe = out / RECIPE
        if recipe.is_file():
            settings = "the settings that this directory was begun with"
            mend = "restore it or choose another --out"
            self.recorded = read_toml(recipe, str(recipe), settings, mend)
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
        """Return whether the directory of the stage `name`, a call of `verb`, is complete."""
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
        for key in sorted({*now, *was} - OF_ONE_CALL):
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
        own = {"says_targets": False} if verb == "train" else {}  # the conversion has said them
        self.call(verb, *words, "--out", made, *resume, stage=name, **own)
        return made

    def examine(
        self,
        name: str,
        model: Path,
        *words: object,
        teacher: str,
        targets: tuple[TargetName, ...] = PACKED,
    ) -> None:
        """Judge `model`, which goes to `targets`, with `qat eval`, unless it was judged before."""
        from qat.convert.forecast import shipped_sizes
        from qat.export.targets import shipping_to
        from qat.models.directory import resolve

        exams = self.exams()
        if name in exams:
            self.say(f"eval {name}: done before, in {self.out / EXAM}")
            return
        self.has_news = True
        found = self.call("eval", model, "--teacher", teacher, *words, stage=f"eval {name}")
        directory = Path(resolve(str(model)))
        sizes = shipped_sizes(directory, teacher, shipping_to(targets)).rounded()
        if "teacher" not in exams:
            same = {"kd_nats": 0.0, "kl_nats": 0.0, "top1_frac": 1.0, "ppl": found["teacher_ppl"]}
            exams["teacher"] = {**same, "megabytes": sizes["source_megabytes"]}
        found |= {
            "megabytes": sizes["megabytes"],
            "bits_per_weight": sizes["bits_per_weight"],
            "linear_bits": sizes["linear_bits"],
            "step": best_step(model),
        }
        exams[name] = {key: value for key, value in found.items() if value is not None}
        write_atomically(self.out / EXAM, json.dumps(exams, indent=1, default=str) + "\n")

    def compare(self, models: Mapping[str, Path | str], prompt: str, *words: object) -> None:
        """Let each of `models` continue `prompt` with its likeliest words, in `samples.json`.

        The models write again for another prompt, or if something new was made.
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
        """Return the results of every model judged so far, by name, the teacher first."""
        from qat.observe.runs import read_exam

        return read_exam(self.out)

    def call(self, *words: object, stage: str, **unparsed: object) -> dict[str, object]:
        """Run one verb in this process, printed as a user would type it; what it found.

        For `unparsed` see `run_verb`.

        Raises:
            QatError: what the verb says, `stage` in front.
        """
        tokens = [str(word) for word in words]
        self.say(f"\n$ qat {shlex.join(tokens)}", style="bold")
        began = time.perf_counter()
        try:
            found = run_verb(tokens, **unparsed)
        except KeyboardInterrupt:
            raise Stopped(f"stage {stage} was stopped; the same command goes on", 130) from None
        except Stopped as error:
            message = f"stage {stage}: {error}; here the same 'qat {self.verb}' goes on"
            raise Stopped(message, error.exit_code) from None
        except QatError as error:
            error.args = (f"stage {stage}: {self.advised(str(error), tokens[0])}",)
            raise
        self.say(f"{time.perf_counter() - began:.1f} s", style="dim")
        return found

    def advised(self, message: str, stage: str) -> str:
        """`message` of a stage, and where flags go that it names and this verb has not.

        A flag that means another stage's setting here is one of them.
        """
        mine, theirs = (verb_flags().get(verb, set()) for verb in (self.verb, stage))
        named = dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", message))
        if "resume" in named and "resume" not in mine:
            message += f" (here the same 'qat {self.verb}' goes on)"
        for flag in named:
            name = flag.replace("-", "_")
            is_ours = flag in mine and stage in ROUTES.get(name, (stage,))
            if flag in theirs and not is_ours and name not in {*FOUND.get(stage, ()), "out"}:
                message += f" (--{flag} of this stage: {name} below [{stage}] in --recipe FILE)"
        return message

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


def best_step(model: Path) -> int | None:
    """The step of a finished run's student; None of anything else."""
    summary = model / SUMMARY
    if not summary.is_file():
        return None
    return parse_json(summary.read_text(encoding="utf-8")).get("best_step")


DEFAULT_PLAN = "q2a4"
STAGES = ("cache", "convert", "train", "eval", "export")
SETTINGS: dict[str, type[Settings]] = {
    "cache": CacheConfig,
    "convert": ConvertConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "export": ExportConfig,
}
PLACES = {"convert": "converted", "train": "trained"}  # not called as their stage
FOUND = {  # settings of each stage that `qat run` sets itself, as it does `out`; recipes may not
    "cache": {"teacher", "data"},
    "convert": {"source", "for"},
    "train": {"student", "cache_dir", "resume", "dry_run"},
    "eval": {"student", "teacher", "cache_dir"},
    "export": {"model", "to"},
}
FEW_DOCUMENTS, FEW_HELD_OUT, SHARE_OF_FEW = 400, 64, 0.2
"""With fewer documents, or fewer held-out sequences, `SHARE_OF_FEW` of the text is held out."""
PASSES, SHORTEST = 10, 20  # the most passes over a small text, and the fewest steps of a training
STEPS_A_PASS = 8  # the fewest steps in which a small text is read once: its batches are smaller
EVERYWHERE = {"device", "dtype", "xla_cache_dir", "trust_remote_code"}
"""Settings that mean the same in several stages: a flag sets them in all but export."""
OWNERS = {"batch_size": "train", "seed": "train"}
"""The stage that a flag sets where several stages have the setting; by default the first."""
SHOWN = {  # flags of the stages that the help lists
    *("format", "text_field", "held_out", "embedding_bits", "bits_budget", "group_size"),
    *("learn", "loss", "batch_size", "grad_accum_steps", "gradient_checkpointing"),
    *("lr", "lr_scales", "lr_codebook"),
}


def _routes() -> dict[str, tuple[str, ...]]:
    """The stages whose settings a flag of `qat run` sets, by the setting's name."""
    found: dict[str, list[str]] = {"force": ["train"]}
    for stage, kind in SETTINGS.items():
        for name in kind.model_fields:
            if name not in FOUND[stage]:
                found.setdefault(name, []).append(stage)
    del found["teacher"]  # of `qat run` it is the cache's; training beside one is in a recipe
    routes = {}
    for name, stages in found.items():
        alone = [OWNERS[name]] if name in OWNERS else stages[:1]
        everywhere = [stage for stage in stages if stage != "export"]
        routes[name] = tuple(everywhere if name in EVERYWHERE else alone)
    return routes


ROUTES = _routes()


class OwnConfig(Settings):
    """The settings of `qat run` itself, and those whose default differs from their stage's."""

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
    stream: Text[bool] = False
    """Learn from what the teacher answers to DATA, and train while it is sampled and cached."""
    mlp_only: Learns[bool] = False
    """Train the MLPs only."""
    max_steps: Steps[int | None] = None
    """Optimizer steps; 1,000, or fewer where the text is small, if not given."""
    device: Speed[str | None] = None
    """Device of all stages: auto, cpu, cuda, cuda:1, ..."""
    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"] | None] = None
    """Dtype that cache, train and eval compute in."""
    force: Careful[bool] = False
    """Train in spite of the preflight's errors, as in 'qat train'."""

    def tables(self) -> dict[str, Table]:
        """The flags that were given, as recipe keys by stage."""
        given = self.model_dump(mode="json", exclude_none=True)
        return {
            stage: {
                name: value
                for name, value in given.items()
                if stage in ROUTES.get(name, ()) and value is not False
            }
            for stage in STAGES
        }

    def own(self) -> Table:
        """Return the recipe's table of `qat run`; other settings are in the stages' tables."""
        return self.model_dump(include={*OwnConfig.model_fields}, exclude_none=True)


def _passed() -> dict[str, Any]:
    """The flags of the stages that `qat run` takes too, each declared by its stage alone."""
    found: dict[str, Any] = {}
    for name, (stage, *_) in ROUTES.items():
        if name not in OwnConfig.model_fields:
            field = SETTINGS[stage].model_fields[name]
            about = Parameter(help=f"As in 'qat {stage}'.", show=name in SHOWN)
            found[name] = (Annotated[field.annotation | None, *field.metadata, about], None)
    return found


if TYPE_CHECKING:
    RunConfig = OwnConfig
else:
    RunConfig = create_model("RunConfig", __base__=OwnConfig, **_passed())


def run(
    model: Required[str],
    *,
    config: Annotated[RunConfig, Parameter(name="*")],
    out: Required[Path],
    targets: Formats[Targets] = (),
    dry_run: Careful[Annotated[bool, Parameter(negative=())]] = False,
) -> dict[str, object]:
    """Take MODEL to a student: cache its words on a text, quantize, train, judge, export.

    What is done in OUT is not done again: after a kill the same command goes on. Every other flag
    of 'qat cache', 'convert', 'train' and 'eval' may be given too, and a recipe (--recipe) may set
    any in [cache], [convert], [train], [eval] and [export]; OUT/recipe.toml has all that were used.

    Args:
        model: Directory, GGUF file or hub id of a causal language model.
        config: Settings.
        out: Directory for everything that is made.
        targets: What the student is to be exported to: formats become what that holds without
            loss. gguf if not given and the model can go there, else packed, the checkpoint itself.
        dry_run: Check everything; say how large the student will be, where it can go, and what
            time and memory all stages take; nothing is written.
    """
    recipes = [each for each in app.config or () if isinstance(each, Dict)]
    app.config = None  # from here its tables are read by `Run`, once
    tables = recipes[0].data if recipes else {}
    if dry_run:
        pipeline = Pipeline("run", out)
        return Run(pipeline, model, config=config, targets=targets, tables=tables).predict()
    with held(out):
        pipeline = Pipeline("run", out)
        kind = cast("type[Run]", extension("qat.runs", "stream")) if config.stream else Run
        return kind(pipeline, model, config=config, targets=targets, tables=tables).go()


class Run:
    """The stages of one run, from its settings to its students."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: str,
        *,
        config: OwnConfig,
        targets: tuple[TargetName, ...],
        tables: Mapping[str, Table],
    ) -> None:
        """Every stage's settings are checked here, before the first one works; nothing is written.

        Raises:
            QatError: a setting is wrong, or another one than a stage that is done was made with; or
                a model, text, device or library is not there.
        """
        self.pipeline = pipeline
        self.model = model
        self.config = config
        self.teacher = config.teacher or model
        check_teacher(self.teacher)
        recorded = pipeline.recorded.get("run", {})
        # GGUF is the format that most programs open
        default: tuple[TargetName, ...] = ("gguf",) if "gguf" in hooks("qat.targets") else PACKED
        known = cast("tuple[TargetName, ...]", tuple(recorded.get("for", default)))
        self.is_default = not targets and known == default
        """True if no target was named: one that cannot be reached then gives way to `packed`."""
        self.targets = targets or known  # the student's formats are chosen for them
        self.exports = self.targets  # the targets that the student is exported to
        self.student = PLACES["train"]  # what is exported, once both were judged
        self.done = [stage for stage in STAGES if self._is_done(stage)]
        self.settings: dict[str, Table] = {}  # of each stage, for `recipe.toml`
        self._note()
        # what is done was made of the same model and text
        for stage in self.done:
            for key in {"cache": ("data", "teacher", "model"), "convert": ("for",)}.get(stage, ()):
                now = {key: self.settings["run"].get(key)}
                pipeline.check_same("run", now, {key: recorded.get(key)})
        self.tables = {stage: self._table(stage, tables, config.tables()) for stage in STAGES}
        """The settings of each stage that flags, the recipe or an earlier call chose."""
        if not {"to", "bits_budget", "attention"} & self.tables["convert"].keys():
            self.tables["convert"]["to"] = DEFAULT_PLAN
        self.configs: dict[str, Any] = {}  # the settings of each stage as its verb will read them
        for stage in STAGES[1:]:
            self._resolve(stage)
        self._resolve("cache")  # also refuses a setting of the wrong kind before a text is counted
        self._check()

    def _note(self) -> None:
        run = {"model": self.model, **self.config.own(), "for": list(self.targets)}
        self.settings["run"] = {k: v for k, v in run.items() if k not in OF_ONE_CALL}

    def _table(self, stage: str, tables: Mapping[str, Table], flags: dict[str, Table]) -> Table:
        """Merge the settings of a stage: of earlier calls if it has begun, the recipe, the flags.

        Raises:
            ConfigError: the recipe sets a key that `qat run` sets itself.
        """
        table = {k.replace("-", "_"): v for k, v in tables.get(stage, {}).items()}
        taken = sorted(table.keys() & {*FOUND[stage], "out"})
        if taken:
            raise ConfigError(
                f"[{stage}] {taken[0]} is for 'qat run' itself to say, expected other keys; drop it"
            )
        place = self.pipeline.out / PLACES.get(stage, stage)
        is_begun = stage in self.done or place.exists()
        recorded = self.pipeline.recorded.get(stage, {}) if is_begun else {}
        before = {k: v for k, v in recorded.items() if k not in OF_ONE_CALL}
        return before | table | flags[stage]

    def _check(self) -> None:
        """Check everything that the stages to come will need, and choose unnamed settings.

        Raises:
            QatError: the first thing that a stage would refuse.
        """
        stages, done = self._stages(), self.done
        calibration = self.tables["convert"].get("calibration")
        check_words(self.model, stages, calibration=cast("str | None", calibration), done=done)
        self._check_libraries()
        check_machine(stages, done)
        check_models(self.model, stages, done)
        self.text: TextFound | None = None  # None if the cache is there
        if "cache" not in done:
            self.tables["cache"] = self._choices() | self.tables["cache"]
            self._resolve("cache")
            self.text = check_text(self.configs["cache"])
            # so that the stage does not read the documents again to choose it
            self.tables["cache"]["sequence_length"] = self.text.sequence_length
            self._resolve("cache")
        self.forecast: Forecast | None = None if "convert" in done else self._foreseen()
        self._note()

    def _check_libraries(self) -> None:
        """Refuse a target whose library is missing; the default one then stays packed.

        Raises:
            ExportError: which one, and how it is installed.
        """
        from qat.export.targets import check_library

        for target in self.targets:
            if self.pipeline.is_done("export", f"export/{target}"):
                continue
            try:
                check_library(target)
            except ExportError as error:
                if not self.is_default:
                    raise
                self.exports = PACKED
                self.pipeline.say(f"the student is only written as packed: {error}")

    def _foreseen(self) -> "Forecast":
        """Forecast the conversion; without a named target for gguf, or `packed` if gguf refuses it.

        Raises:
            QatError: what a conversion for these targets would refuse.
        """
        for_targets = () if self.targets == PACKED else self.targets
        try:
            return foreseen(self.model, self._stages(), for_targets)
        except ExportError as error:
            if not self.is_default:
                raise
            self.pipeline.say(f"the student cannot go to {self.targets[0]}: {error}")
            self.targets = self.exports = PACKED
            self._resolve("convert")
            return foreseen(self.model, self._stages(), ())

    def _stages(self) -> Stages:
        return Stages(*(self.configs[stage] for stage in ("cache", "convert", "train", "eval")))

    def predict(self) -> dict[str, object]:
        """Show what the stages will make and take, and return it; nothing is written."""
        text, cache = self.text, self.configs["cache"]
        if text is None:
            text = TextFound(cache.num_sequences, cache.sequence_length)
        if "train" not in self.done:
            self._fit_to(text.sequences)
        forecast = self.forecast or self._foreseen()
        found = forecast_run(forecast, self._stages(), text)
        steps = self.configs["train"].max_steps
        shown = show_forecast(forecast, found.minutes, found.memory_gib, steps=steps)
        return {**shown, "for": list(self.targets)}

    def go(self) -> dict[str, object]:
        """Make what is not made yet; show the teacher beside the students, and what comes next."""
        from qat.data.reader import TeacherCache
        from qat.export.model import weight_bytes
        from qat.export.targets import ships_to
        from qat.generate.text import held_out_prompt
        from qat.models.directory import resolve
        from qat.models.load import load_tokenizer
        from qat.models.sizes import MEGABYTE

        pipeline = self.pipeline
        if self.is_default and self.targets != PACKED:
            pipeline.say(
                f"the student gets formats that {self.targets[0]} holds; --for NAME,NAME chooses "
                "for other programs, --for packed keeps the plan's own (docs/export.md)"
            )
        pipeline.record(self.settings)
        cache = pipeline.make("cache", "cache", *self._words("cache"))
        if "train" not in self.done:
            self._fit_to(TeacherCache.open(cache).num_sequences("train"))
            pipeline.record(self.settings)
        converted = pipeline.make("converted", "convert", *self._words("convert"))
        trained = pipeline.make("trained", "train", *self._words("train"))
        for name, student in (("converted", converted), ("trained", trained)):
            words = self._words("eval")
            pipeline.examine(name, student, *words, teacher=self.teacher, targets=self.exports)
        models = {"teacher": self.teacher, "converted": converted, "trained": trained}
        prompt = held_out_prompt(cache, load_tokenizer(self.teacher))
        device = {"device": self.config.device, "dtype": self.config.dtype}
        pipeline.compare(models, prompt, *chain(*((f"--{k}", v) for k, v in device.items() if v)))
        why = self._choose(trained)
        ships = [
            pipeline.make(f"export/{target}", "export", *self._words("export"), "--to", target)
            for target in self.exports
        ]
        page = pipeline.report()
        pipeline.show()
        pipeline.say(why)
        megabytes = [weight_bytes(ship) / MEGABYTE for ship in ships]
        sized = (f"{each} ({mb:.1f} MB)" for each, mb in zip(ships, megabytes, strict=True))
        pipeline.say(f"the student: {', '.join(sized)}; all about it: {page}")
        places = [to for to, lack in ships_to(Path(resolve(str(pipeline.out)))).items() if not lack]
        here = shlex.quote(str(pipeline.out))
        pipeline.say(f"it can go to {', '.join(places)}: qat export {here} --to NAME --out DIR")
        pipeline.say(f"next: qat generate {here} --prompt TEXT")
        kl = {name: found["kl_nats"] for name, found in pipeline.exams().items()}
        return {
            "out": pipeline.out,
            "student": self.student,
            "exports": ships,
            "megabytes": [round(each, 3) for each in megabytes],
            "report": page,
            "kl_nats": kl,
        }

    def _choose(self, trained: Path) -> str:
        """Point at the better of the two students, by the exam; which one that is, in a line."""
        exams = self.pipeline.exams()
        before, after = (exams[name]["kl_nats"] for name in ("converted", "trained"))
        step = best_step(trained)
        is_better = after <= before
        self.student = PLACES["train"] if is_better else PLACES["convert"]
        write_atomically(self.pipeline.out / STUDENT, f"{self.student}\n")
        if is_better and step != 0:
            which = "as trained" if step is None else f"of training step {step}"
            return f"exported: the student {which}, KL {after:.4f} (as converted: {before:.4f})"
        worse = f" (as trained: {after:.4f})" if step != 0 else ""
        return (
            f"exported: the student as converted, KL {before:.4f}{worse}: no step of training made "
            "it better; lower the rates, or train longer on more text"
        )

    def _is_done(self, stage: str) -> bool:
        """Return whether a stage is complete; of several exports, whether the first one is."""
        if stage == "eval":
            return bool(self.pipeline.exams())
        place = f"export/{self.targets[0]}" if stage == "export" else PLACES.get(stage, stage)
        return self.pipeline.is_done(stage, place)

    def _choices(self) -> Table:
        """Choose unnamed settings of the cache: no more than is read, and enough held out."""
        from qat.data.sources import open_source

        if {"num_sequences", "held_out"} <= self.tables["cache"].keys():
            return {}
        cache, train = self.configs["cache"], self.configs["train"]
        num_sequences = cache.num_sequences or train.max_steps * train.sequences_per_step
        source = open_source(cache.data, cache.format, cache.text_field)
        count = sum(1 for _ in islice(source.documents, FEW_DOCUMENTS))
        is_little = count < FEW_DOCUMENTS or num_sequences * cache.held_out < FEW_HELD_OUT
        held_out = SHARE_OF_FEW if is_little else cache.held_out
        return {"num_sequences": num_sequences, "held_out": held_out}

    def _wired(self, stage: str) -> list[object]:
        """Return the words of a stage's command line that name the results of other stages."""
        place = self.pipeline.out
        if stage == "cache":
            return ["--teacher", self.teacher, "--data", self.config.data]
        if stage == "convert":
            own_text = "calibration" in self.tables["convert"]
            ships = [] if self.targets == PACKED else ["--for", ",".join(self.targets)]
            return [self.model, *([] if own_text else ["--calibration", place / "cache"]), *ships]
        cache = ["--cache-dir", place / "cache"]
        words = {"train": [place / "converted", *cache], "eval": cache}
        return words.get(stage, [place / self.student])

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
        bound.apply_defaults()
        self.configs[stage] = bound.arguments["config"]
        found = self.tables[stage] | self.configs[stage].model_dump(mode="json", exclude_none=True)
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

    def _fit_to(self, sequences: int) -> None:
        """Fit the unset batch size and steps to the text, so that it is not read too often."""
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


def _defaults(stage: str) -> Table:
    fields = SETTINGS[stage].model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}
