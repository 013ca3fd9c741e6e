"""The top of a report in plain words: what became smaller, by how much, and the loss in quality."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from qat.errors import CheckpointError
from qat.files import parse_toml
from qat.logs import EXAM, METRICS, RECIPE, SAMPLES
from qat.models.attention import SPARSE
from qat.models.sizes import source_megabytes
from qat.observe.runs import Conversion, Exams, TrainingRun

DEMO_TEXT = "stdlib"
USES = {  # the command that uses an exported directory, for targets that have a short one
    "packed": 'qat generate {path} --prompt "..."',
    "dense": 'qat generate {path} --prompt "..."',
    "gguf": 'llama-cli -m {file} -p "..."',
    "mlx": 'mlx_lm.generate --model {path} --prompt "..."',
    "compressed-tensors": "vllm serve {path}",
    "nvfp4": "vllm serve {path}",
    "mxfp4": "vllm serve {path}",
}


@dataclass(frozen=True)
class Result:
    """The size of a model and its numbers on held-out text."""

    name: str
    megabytes: float | None = None
    kl_nats: float | None = None  # distance from the teacher; 0 for the teacher itself
    top1_frac: float | None = None  # fraction of tokens where its first choice equals the teacher's
    ppl: float | None = None


@dataclass(frozen=True)
class Sample:
    """The texts that several models generated from the same prompt."""

    prompt: str
    texts: Mapping[str, str]  # the generated text by model name


@dataclass(frozen=True)
class Summary:
    """The summary at the top of a report."""

    model: str
    text: str
    date: str
    results: list[Result] = field(default_factory=list)  # the teacher first, the student last
    sample: Sample | None = None
    commands: list[str] = field(default_factory=list)  # to use the student, ready to copy

    @property
    def title(self) -> str:
        """The title of the page, from model and text."""
        return f"{self.model}, trained on {self.text}" if self.text else self.model


def summary_of_pipeline(path: Path, exams: Exams, run: TrainingRun | None) -> Summary:
    """Return the summary of a directory of `qat run` or `qat demo`; `run` is its last training run.

    Raises:
        CheckpointError: the recipe or the samples are damaged.
    """
    recipe = path / RECIPE
    try:
        tables = parse_toml(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
        settings = {**tables.get("demo", {}), **tables.get("run", {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{recipe} is damaged ({error}), expected the settings of this directory; restore it"
        ) from None
    results = [
        Result(name, *(found.get(key) for key in ("megabytes", "kl_nats", "top1_frac", "ppl")))
        for name, found in exams.items()
    ]
    exports = [each for each in sorted((path / "export").glob("*")) if each.is_dir()]
    commands = list(_uses(exports))
    if run is not None and run.checkpoint is not None:
        commands = [*commands, *uses_of(run.checkpoint, has_export=bool(exports))]
    return Summary(
        model=short_name(str(settings.get("model") or settings.get("teacher") or path.name)),
        text=short_name(str(settings.get("data", DEMO_TEXT if "demo" in tables else ""))),
        date=date_of(path / EXAM),
        results=results,
        sample=read_sample(path),
        commands=list(dict.fromkeys(commands)),
    )


def summary_of_run(path: Path, run: TrainingRun) -> Summary:
    """Return the summary of a run of `qat train`: the student before and after."""
    rows = {}
    if run.evals:
        first, best = run.evals[0], run.best()
        name = f"step {first['step']}" if first["step"] else "before training"
        rows = {name: first, f"step {best['step']}": best}
    megabytes = None if run.checkpoint is None else source_megabytes(str(run.checkpoint))
    results = [
        Result(name, megabytes, row.get("kl_tail_nats"), row.get("top1_frac"), row.get("ppl"))
        for name, row in rows.items()
    ]
    texts = {name: str(row["sample"]) for name, row in rows.items() if row.get("sample")}
    prompt = parse_toml(run.recipe).get("train", {}).get("sample_prompt", "")
    return Summary(
        model=short_name(str(run.info.get("teacher") or run.label)),
        text=short_name(str(run.info.get("cache_settings", {}).get("data", ""))),
        date=date_of(path / METRICS),
        results=results,
        sample=Sample(str(prompt), texts) if texts else None,
        commands=uses_of(run.checkpoint, has_export=False) if run.checkpoint else [],
    )


def summary_of_conversion(path: Path, file: str, conversion: Conversion) -> Summary:
    """Return the summary of a converted checkpoint: its name, its date and a command."""
    return Summary(
        model=f"{short_name(conversion.source)}, converted to {conversion.plan}",
        text="",
        date=date_of(path / file),
        commands=[f'qat generate {shlex.quote(str(path))} --prompt "..."'],
    )


def uses_of(checkpoint: Path, *, has_export: bool) -> list[str]:
    """Return commands that use a packed checkpoint: generate, serve, and export if not done."""
    place = shlex.quote(str(checkpoint))
    commands = [f'qat generate {place} --prompt "..."']
    if not _is_sparse(checkpoint):  # no serving engine supports the sparse attention
        commands.append(f"vllm serve {place}")
    if not has_export:
        commands.append(f"qat export {place} --to TARGET --out DIR")
    return commands


def _uses(exports: list[Path]) -> Iterator[str]:
    for path in exports:
        if path.name in USES:
            file = next(iter(sorted(path.glob("*.gguf"))), path)
            yield USES[path.name].format(path=shlex.quote(str(path)), file=shlex.quote(str(file)))


def _is_sparse(checkpoint: Path) -> bool:
    config = checkpoint / "config.json"
    try:
        return bool(json.loads(config.read_bytes()).get(SPARSE))
    except (OSError, ValueError, AttributeError):
        return False


def read_sample(path: Path) -> Sample | None:
    """Return the samples of a pipeline's models; None if no samples were kept.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / SAMPLES
    if not file.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
        texts = {str(name): str(text) for name, text in found["texts"].items()}
        return Sample(str(found["prompt"]), texts)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error!r}), expected a prompt and texts; delete it and run the "
            "same command again"
        ) from None


def short_name(source: str) -> str:
    """Return the last part of a path or a hub id."""
    return source.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or source


def date_of(file: Path) -> str:
    """Return the day a file was written, such as `28 November 2026`; "" if it is missing."""
    if not file.is_file():
        return ""
    day = datetime.fromtimestamp(file.stat().st_mtime).astimezone()
    return f"{day.day} {day:%B %Y}"
