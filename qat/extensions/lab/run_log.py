"""Write entries about runs into a log such as `speedrun/LOG.md`, in that log's template."""

import shlex
import textwrap
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qat.config import fingerprint
from qat.errors import CheckpointError, ConfigError
from qat.files import parse_json, parse_toml, write_atomically
from qat.logs import METRICS, RECIPE
from qat.observe.page import number
from qat.observe.runs import (
    SCORES,
    TrainingRun,
    read_directory,
    score_name,
    token_count,
    wall_seconds,
)
from qat.train.config import TrainConfig
from qat.train.run import RunDirectory

ENTRIES = "## Entries\n"
SCORED = ("case", "KD (nats)", "KL (nats)", "ppl")
COLUMNS = (*SCORED, "hours", "tokens", "tokens/s", "MFU", "peak GiB")
WIDTH = 100


def append_entry(log: Path, path: Path) -> str:
    """Insert an entry about the run in `path` at the top of `log`, and return its title.

    Raises:
        CheckpointError: `path` is not a run, or one that was never evaluated.
        ConfigError: `log` has no heading of the entries, or already holds this run.
    """
    run = read_directory(path)
    if not isinstance(run, TrainingRun) or not run.evals or not run.recipe:
        raise CheckpointError(
            f"{path} holds no run that was judged, expected metrics of one and its recipe; name a "
            "directory made by 'qat train'"
        )
    text = log.read_text(encoding="utf-8")
    if ENTRIES not in text:
        raise ConfigError(
            f"log_file={log} has no line {ENTRIES.strip()!r}, expected it above the entries; add it"
        )
    # identifies the run by its name and its metrics
    mark = fingerprint([path.resolve().name, (path / METRICS).read_text(encoding="utf-8")])
    if mark in text:
        raise ConfigError(
            f"{log} has an entry of {path} already (see {mark}); change or remove that one"
        )
    before, best = run.evals[0], run.best()
    key = score_name(best)
    change = f"{number(before.get(key))} to {number(best.get(key))} nats"
    title = f"{run.label}: {SCORES[key]} {change} in {best['step']} steps"
    head, entries = text.split(ENTRIES, 1)
    new = entry(run, path, train_command(path), title=title, mark=mark)
    write_atomically(log, f"{head}{ENTRIES}\n{new}{entries}")
    return title


def entry(run: TrainingRun, path: Path, command: str, *, title: str, mark: str) -> str:
    """Return the entry in Markdown, each part of the template filled from the files of the run."""
    ended = datetime.fromtimestamp((path / METRICS).stat().st_mtime, tz=UTC)
    settings = parse_toml(run.recipe).get("train", {})
    info = run.info
    versions = ", ".join(f"{k} {info[k]}" for k in ("python", "torch", "transformers") if k in info)
    instance = (
        f"{info.get('device', '?')}, peak {number(run.peak_gib())} GiB, {versions}, commit "
        f"{str(info.get('commit', '?'))[:12]}."
    )
    return "\n".join(
        [
            f"### {ended:%Y-%m-%d}: {title}\n",
            _paragraph("Goal", _goal(run, settings)),
            _paragraph("Instance", instance),
            _paragraph("Config", _config(run, settings)),
            f"**Command.**\n\n    {command}\n",
            f"**Result.**\n\n{_table(run)}",
            _paragraph("Files", _files(path, mark)),
            _paragraph("Notes", " ".join(f"{note}." for note in notes(run, settings))),
            "",
        ]
    )


def train_command(run: Path) -> str:
    """The `qat train` that made a run, with the settings that are not the defaults; "" for none."""
    if not (run / RECIPE).is_file():
        return ""
    RunDirectory(run).begun_with()  # or a line that says what is wrong with it
    settings = parse_toml((run / RECIPE).read_text(encoding="utf-8"))["train"]
    defaults = {name: field.default for name, field in TrainConfig.model_fields.items()}
    words = ["qat", "train", str(settings.pop("student"))]
    for name, value in settings.items():
        if value != defaults.get(name):
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
    return shlex.join([*words, "--out", str(run)])


def notes(run: TrainingRun, settings: Mapping[str, Any]) -> list[str]:
    """Return remarks about the run besides its result, one sentence each."""
    best, last = run.best(), run.steps[-1]["step"] if run.steps else 0
    found = [f"Best at step {best['step']} of {last}"]
    asked = settings.get("max_steps")
    if asked is not None and last < asked:
        found.append(f"Stopped at step {last} of {asked} that were asked for")
    skipped = [row["step"] for row in run.steps if row.get("grad_norm") == 0]
    if skipped:
        found.append(f"{len(skipped)} logged steps moved nothing (gradients overflowed)")
    if "codes_flipped_frac" in run.evals[-1]:
        share = run.evals[-1]["codes_flipped_frac"]
        found.append(f"{100 * share:.2g} % of the codes moved since the evaluation before the last")
    beat = run.heartbeats[-1] if run.heartbeats else {}
    if beat.get("fallback"):
        found.append(f"Layers ran as written: {' '.join(str(beat['fallback']).split())}")
    if beat.get("recompiles"):
        found.append(f"{beat['recompiles']} graphs were compiled again")
    return found


def _goal(run: TrainingRun, settings: Mapping[str, Any]) -> str:
    steps = number(settings.get("max_steps"))
    student, teacher = Path(str(settings.get("student", "?"))).name, run.info.get("teacher", "?")
    key = score_name(run.best())
    return (
        f"How close {steps} steps bring `{student}` to its teacher `{teacher}`: `{key}` on the "
        "cache's held-out split."
    )


def _config(run: TrainingRun, settings: Mapping[str, Any]) -> str:
    get = settings.get
    scope = next((s for s in ("mlp_only", "attention_only") if get(s)), "e2e").replace("_only", "")
    kinds = str(get("learn", "")).split(",")
    keys = ["lr" if kind == "weights" else f"lr_{kind}" for kind in kinds]
    rates = ", ".join(f"{key} {get(key)}" for key in keys)
    sequences = get("batch_size", 0) * get("grad_accum_steps", 1)
    return (
        f"Teacher `{run.info.get('teacher', '?')}`, student `{get('student')}`, cache "
        f"`{get('cache_dir')}` ({run.info.get('cache_fingerprint', '?')}); {get('learn')} learn "
        f"({scope}), {number(run.info.get('learnable'))} values; loss {get('loss')} at T = "
        f"{get('temperature')}; {sequences} sequences a step; {rates}, {get('schedule')}; "
        f"{run.info.get('dtype', '?')}, seed {get('seed')}."
    )


def _table(run: TrainingRun) -> str:
    beats = run.heartbeats
    cost = [wall_seconds(beats) / 3600, token_count(beats)] if beats else [None, None]
    cost += [run.tokens_per_s(), run.median("mfu_frac"), run.peak_gib()]
    first = f"step {step}" if (step := run.evals[0]["step"]) else "before"
    rows = [(first, run.evals[0], [None] * 5), ("after, best step", run.best(), cost)]
    lines = [COLUMNS]
    for case, verdict, measured in rows:
        values = [*map(verdict.get, ("kd_nats", "kl_tail_nats", "ppl")), *measured]
        lines.append((case, *map(number, values)))
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{head}|{'---|' * len(COLUMNS)}\n{''.join(body)}"


def _paragraph(name: str, text: str) -> str:
    return textwrap.fill(
        f"**{name}.** {text}", WIDTH, break_long_words=False, break_on_hyphens=False
    )


def _files(path: Path, mark: str) -> str:
    finals = sorted(p.parent for p in path.glob("[!.]*/config.json"))
    names = [f"`{path}` (run {mark})", *(f"`{final}`" for final in finals)]
    for state in sorted(path.glob("tracking/*.json")):
        told = parse_json(state.read_text(encoding="utf-8"))
        names.append(f"{state.stem} {told.get('url') or told['id']}")
    return ", ".join(names) + "; no record."
