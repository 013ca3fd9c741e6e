"""`qat train`: teach a quantized student from a teacher cache."""

import json
import logging
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.table import Table
from rich.text import Text

from qat.cli.export import show_targets
from qat.cli.parser import print_result
from qat.config import Required
from qat.errors import ConfigError, QatError, Stopped, TrainingError
from qat.hooks import extension
from qat.logs import RECIPE, Terminal
from qat.losses.config import parse_losses
from qat.observe.config import TrackConfig
from qat.train.config import TrainConfig, refuse_begun
from qat.train.launch import LEAST_LOSSES, LaunchConfig

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from qat.observe.health import Check
    from qat.train.loop import Trainer
    from qat.train.preflight import Checked
    from qat.train.start import TrainReport

logger = logging.getLogger(__name__)

UNTRACKED, LAUNCH = TrackConfig(), LaunchConfig()
STATE_COLOURS = {"ok": "green", "look": "yellow", "bad": "bold red"}
MEASURES = (
    ("kl_tail_nats", "KL, nats (top-K and tail)", "{:.4f}"),
    ("kd_nats", "KD, nats (top-K alone, T = 2)", "{:.4f}"),
    ("sampled_ce_nats", "cross-entropy with draws, nats", "{:.4f}"),
    ("top1_frac", "top-1 agreement", "{:.1%}"),
    ("ppl", "perplexity", "{:,.2f}"),
)
SEVERITIES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def train(
    student: Required[str],
    *,
    config: Annotated[TrainConfig, Parameter(name="*")],
    out: Required[Path],
    tracking: Annotated[TrackConfig, Parameter(name="*")] = UNTRACKED,
    launch: Annotated[LaunchConfig, Parameter(name="*")] = LAUNCH,
    says_targets: Annotated[bool, Parameter(parse=False)] = True,
) -> dict[str, object]:
    """Train STUDENT, a packed checkpoint, against a teacher cache.

    Args:
        student: Checkpoint directory that 'qat convert' wrote (or a run, for its best one).
        config: Settings.
        out: Run directory to make.
        tracking: Who follows the run.
        launch: Settings of this start of the run.
        says_targets: Print where the student can be exported to, as `qat convert` did before.
    """
    from qat.cli.inputs import check_inputs, with_fitting_loss

    followers: Any = None if tracking == UNTRACKED else extension("qat.followers", "trackers")
    soak = _soak(launch.soak, max_steps=config.max_steps, log_every=config.log_every)
    parse_losses(config.loss)
    _warn_of_idle(config.idle())
    check_inputs(models=[student, config.teacher], caches=[config.cache_dir], out=out)
    resume, dry_run = launch.resume, launch.dry_run
    if resume is None and not dry_run:
        refuse_begun(out)
    if config.reads_cache:
        config = with_fitting_loss(config, config.cache_dir)
    from qat.backend.device import select
    from qat.ranks import joined
    from qat.train.preflight import examine
    from qat.train.start import opened

    session = select(config.device).session(config.xla_cache_dir)
    with session, joined(config.device, is_safe=config.ranks == "safe") as ranks:

        def examined() -> "Checked | None":  # the first rank looks for all
            if not ranks.is_first:
                return None
            return examine(config, student, out, world=ranks.size, measures=dry_run)

        if dry_run:
            return ranks.sync_errors(lambda: _dry_run(examined(), out))
        if resume is not None and tracking.gdrive_dir is not None:
            folder = tracking.gdrive_dir
            ranks.sync_errors(lambda: followers.restore(out, folder) if ranks.is_first else None)
        forced, checked = [], None
        if not (out / RECIPE).exists():  # what goes on has been looked at, or is refused
            said = student if says_targets else None
            adapters = "lora" in config.kinds
            checked = ranks.sync_errors(examined)
            forced = ranks.sync_errors(
                lambda: _preflight(checked, said, adapters=adapters, force=launch.force)
            )
        is_followed = ranks.is_first and followers is not None
        with followers.follow(out, tracking) if is_followed else nullcontext():
            run = opened(
                config,
                student,
                out,
                resume=resume is not None,
                begins_anew=resume == "auto",
                forced=forced,
                ranks=ranks,
                loaded=checked and checked.loaded,
            )
            report = _trained(run, launch.soak)
            if tracking.gdrive_dir is not None and ranks.is_first:
                _write_page(out)
        if not ranks.is_first:
            return {}
    found = _ended(out, report, cache_dir=config.cache_dir, prompt=config.sample_prompt)
    _judge(out, launch, found, soak)
    return found


def _soak(steps: int, *, max_steps: int, log_every: int) -> Any:  # noqa: ANN401
    """Return what judges a soak of `steps`; None for 0.

    Raises:
        ConfigError: the soak is longer than the run, or logs too few losses to judge.
    """
    if not steps:
        return None
    if steps > max_steps:
        raise ConfigError(
            f"soak={steps} is more than max_steps={max_steps}, expected a soak within "
            "the run; lower --soak or raise --max-steps"
        )
    if (losses := steps // log_every) < LEAST_LOSSES:
        raise ConfigError(
            f"soak={steps} logs {losses} losses with log_every={log_every}, expected "
            f"{LEAST_LOSSES} or more to see them fall; raise --soak or lower --log-every"
        )
    return extension("qat.soaks", "lab")


def _trained(run: "AbstractContextManager[Trainer]", soak: int) -> "TrainReport | None":
    """Train to the end; None where a soak ended before."""
    from qat.train.start import finished

    with run as trainer:
        trainer.stops.last_step = soak or None
        if 0 < soak <= trainer.step:
            logger.info("step %d was taken before: the run is judged as it stands", soak)
            return None
        try:
            trainer.train()
        except Stopped as stop:
            if stop.exit_code:
                raise
            logger.info("%s", stop)
            return None
        return finished(trainer)


def _ended(out: Path, report: "TrainReport | None", **shown: Any) -> dict[str, object]:  # noqa: ANN401
    """Print what a run came to, and return it; without a report it was stopped by a soak."""
    show_health(out)
    if report is None:
        return {"run": out}
    show_end(out, report, **shown)
    return dict(
        run=out,
        final=report.final,
        steps=report.steps,
        best_nats=report.best,
        best_step=report.best_step,
    )


def _judge(out: Path, launch: LaunchConfig, found: dict[str, object], soak: Any) -> None:  # noqa: ANN401
    """Compare a run with the bounds of its soak, and its health with --strict-health.

    Raises:
        TrainingError: something is not ok.
    """
    if soak is not None:
        checks = soak(out, launch)
        Terminal().print(checks_table(checks, f"Soak of {launch.soak} steps"))
        refuse_health(checks, found, "mend it and soak again; its checkpoint is kept for --resume")
    if launch.strict_health:
        refuse_health(not_ok(out), found, f"see 'qat report {out}'; what was trained is kept")


def refuse_health(checks: "Sequence[Check]", found: dict[str, object], advice: str) -> None:
    """Raise TrainingError for checks that are not ok, after printing the result `found`."""
    failed = [check for check in checks if check.state != "ok"]
    if failed:
        print_result(found)
        words = (f"{check.name}: {check.found}, expected {check.limit}" for check in failed)
        raise TrainingError(f"{'; '.join(words)}: {advice}")


def _warn_of_idle(settings: dict[str, object]) -> None:
    for name, value in settings.items():
        logger.warning("%s=%s does nothing without --on-policy SHARE", name, value)


def _preflight(
    checked: "Checked | None", student: str | None, *, adapters: bool, force: bool
) -> list[str]:
    """Return the codes of the errors that `force` overrides; none where nothing was examined.

    With a `student`, its targets are shown.
    """
    from qat.models.directory import resolve
    from qat.train.preflight import codes_forced

    if checked is None:
        return []
    if student is not None:
        show_targets(Path(resolve(student)), adapters=adapters)
    if checked.is_long or len(checked.errors()) > 1:  # a single error is said in its line
        show_findings(checked)
    return codes_forced(checked.findings, force=force)


def _dry_run(checked: "Checked | None", out: Path) -> dict[str, object]:
    from qat.train.preflight import refuse

    if checked is None:
        return {}
    show_findings(checked)
    found = predicted(checked, out)
    if checked.errors():
        print_result(found)
        refuse(checked.findings)
    return found


def _write_page(run: Path) -> None:
    """The report that an upload takes along; a run that has its student does not fail for it."""
    from qat.observe.page import write_report

    try:
        write_report([run], run / "report.html")
    except (OSError, QatError) as error:
        logger.warning("no report of %s: %s", run, error)


def show_findings(checked: "Checked") -> None:
    """Print the findings on stdout, the worst first; lines break between words, never in a flag."""
    words = [word for finding in checked.findings for word in finding.mend.split()]
    table = Table("", expand=True)
    table.add_column("Finding", no_wrap=True)
    table.add_column("Found", ratio=1, overflow="fold")
    table.add_column("Why it matters", ratio=1, overflow="fold")
    table.add_column("What to do", ratio=1, width=max(map(len, words), default=None))
    for finding in checked.findings:
        code, severity, *words = finding
        table.add_row(severity, code, *words, style=SEVERITIES[severity])
    Terminal().print(table)


def predicted(checked: "Checked", out: Path) -> dict[str, object]:
    """Return what a dry run prints: the counts of findings, and hours, memory and disk."""
    counts = {f"{each}s": 0 for each in SEVERITIES}
    for finding in checked.findings:
        counts[f"{finding.severity}s"] += 1
    found: dict[str, object] = {"run": out, **counts}
    if (prediction := checked.prediction) is not None:
        found |= {
            "hours": checked.hours,
            "step_s": prediction.step_s,
            "eval_s": prediction.eval_s,
            "tokens_per_s": prediction.tokens_per_s,
            "peak_gib": prediction.peak_gib,
            "pinned_gib": prediction.pinned_gib,
            "disk_bytes": checked.disk_bytes,
            "checkpoint_bytes": prediction.checkpoint_bytes,
        }
    return found


def show_end(run: Path, report: "TrainReport", *, cache_dir: str, prompt: str) -> None:
    """Print on stdout what training changed, where the student lies, and what may come next.

    A run that has its student does not fail for it.
    """
    from qat.models.sizes import model_bytes
    from qat.observe.runs import read_directory, score

    try:
        found = read_directory(run)
    except (OSError, QatError) as error:
        logger.warning("no numbers of %s: %s", run, error)
        return
    console = Terminal()
    trained = [row for row in found.evals if row["step"] > 0]
    if trained and (best := min(trained, key=score)) is not found.evals[0]:
        console.print(_before_and_after(found.evals[0], best))
    which = f"of step {report.best_step}, the best of {report.steps}"
    if report.best_step == 0:
        which = "untrained"
        console.print(
            f"no step made the student better, so {run} hands on the one of step 0, as it was "
            "converted: lower the rates, or train longer"
        )
    size = model_bytes(report.final) / 1e6
    lines = [f"the student, {which}, a checkpoint of {size:.2f} MB: {report.final}", "next:"]
    following = _next(report.final, cache_dir, prompt, found.info)
    lines += [f"  {shlex.join(words)}" for words in following]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def show_health(run: Path) -> None:
    """Print the answers of `qat.observe.health` about `run` that are not ok.

    A run that has its student does not fail for files that cannot be read.
    """
    try:
        findings = not_ok(run)
    except (OSError, QatError) as error:
        logger.warning("no table of the run's health: %s", error)
        return
    if findings:
        Terminal().print(checks_table(findings, "Health"))


def not_ok(run: Path) -> "list[Check]":
    """Return the answers of `qat.observe.health` about `run` that are not ok."""
    from qat.observe.health import health
    from qat.observe.runs import read_directory

    return [check for check in health(read_directory(run)) if check.state != "ok"]


def checks_table(checks: "Sequence[Check]", title: str) -> Table:
    """Return a table with a line for each check."""
    table = Table(title, "Found", "Limit", "")
    for check in checks:
        state = Text(check.state, STATE_COLOURS[check.state])
        table.add_row(check.name, check.found, check.limit, state)
    return table


def _before_and_after(first: dict, best: dict) -> Table:
    """Build a table that compares the untrained with the best student on the held-out split."""
    titles = ("before" if first["step"] == 0 else f"step {first['step']}", f"step {best['step']}")
    table = Table("on the held-out split", title_justify="left")
    for title in titles:
        table.add_column(title, justify="right")
    measures = [
        (key, f"{label}{key.removeprefix(name).replace('/', ': ')}", form)
        for name, label, form in MEASURES
        for key in (name, *(each for each in first if each.startswith(f"{name}/")))
    ]
    for key, label, form in measures:
        if first.get(key) is not None and best.get(key) is not None:
            table.add_row(label, form.format(first[key]), form.format(best[key]))
    return table


def _next(final: Path, cache_dir: str, prompt: str, facts: dict) -> list[list[str]]:
    """List commands for the finished student: evaluate, generate, serve and export it.

    Evaluation compares it with its teacher. A command that would refuse this student is left out.
    """
    from qat.export.targets import ships_to

    teacher = facts.get("teacher")
    beside = ["--teacher", teacher] if teacher else []
    lacks = ships_to(final)
    to = next((name for name in ("gguf", "dense") if lacks.get(name, name) is None), "packed")
    return [
        ["qat", "eval", str(final), "--cache-dir", cache_dir, *beside],
        ["qat", "generate", str(final), "--prompt", prompt],
        *([["vllm", "serve", str(final)]] if _is_served(final) else []),
        ["qat", "export", str(final), "--to", to, "--out", f"{final}-{to}"],
    ]


def _is_served(final: Path) -> bool:
    from qat.models.attention import SPARSE
    from qat.models.hf_quantizer import QatConfig

    values = json.loads((final / "config.json").read_text(encoding="utf-8"))
    return SPARSE not in QatConfig(**values["quantization_config"]).features
