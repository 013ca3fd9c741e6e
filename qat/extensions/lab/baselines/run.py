"""`qat bench baselines`: several ways to train the same layers, in turns in one run."""

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from qat.backend.device import select
from qat.extensions.bench.batches import check_batch_sizes
from qat.extensions.bench.find_max import OutOfMemory, unless_out_of_memory
from qat.extensions.bench.measure import Timing, compile_anew
from qat.extensions.bench.results import Results, environment
from qat.extensions.bench.run import Setting, prepare
from qat.extensions.bench.student import Ours, Subject
from qat.extensions.lab.baselines.methods import is_installed, torchao_step
from qat.extensions.lab.baselines.reference import TEMPERATURE, reference_step
from qat.extensions.lab.baselines.training import check_losses, plain_step
from qat.extensions.lab.config import BaselinesConfig
from qat.models.language_model import LanguageModel
from qat.train.learnable import weights_in_scope
from qat.train.start import check_dtype

logger = logging.getLogger(__name__)

Build = Callable[[bool], Subject]  # builds the subject of one case, compiled or not
OWN_SETTINGS = {
    "reference": {"loss": "candidates", "temperature": TEMPERATURE, "gradient_checkpointing": True}
}
"""Settings that override the flags in every case."""


def run_baselines(
    config: BaselinesConfig, student: str, out: Path | None
) -> tuple[Path, list[dict[str, object]]]:
    """Run every case of `config` in turn, `rounds` times, and compare them.

    Returns the directory of results and a row per case, including those that took no step.

    Only the current case is on the device. Every second round runs in reverse order, so that a
    device that warms up or slows down favours no case.
    """
    if set(config.cases) - {"ours", "reference"}:
        check_losses(config.losses)
    config, backend = check_dtype(config), select(config.device)
    with Results(out, environment(backend, config)) as results:
        setting, model = prepare(config, student)
        check_batch_sizes(setting.data, (config.batch_size,), config.grad_accum_steps)
        cases = Cases(setting, model)
        with setting.memory_limit():
            found = _take_turns(cases, config, results)
        rows = [cases.row("baseline", name, found.get(name)) for name in config.cases]
        for row in rows:
            row["status"] = cases.unavailable.get(row["case"], "OK")
            if "ours" in found and row["case"] in found:
                speed = found[row["case"]].tokens_per_s
                row["ours_over_this"] = found["ours"].tokens_per_s / speed
            results.add(**row)
        results.finish()
    return results.path, rows


def _take_turns(cases: "Cases", config: BaselinesConfig, results: Results) -> dict[str, Timing]:
    """Return all rounds of each case as one timing; add a row after every turn."""
    found: dict[str, list[Timing]] = defaultdict(list)
    for number in range(config.rounds):
        for name in config.cases[:: -1 if number % 2 else 1]:
            timing = cases.time(name)
            if timing is not None:
                found[name].append(timing)
                row = cases.row("baseline-round", name, timing)
                results.add(**row, round=number, status="OK")
    return {name: merged(timings) for name, timings in found.items()}


class Cases:
    """Builds one case at a time from one student, which is kept on the host meanwhile."""

    def __init__(self, setting: Setting, student: LanguageModel) -> None:
        self.setting = setting
        self.student = student
        self._names = weights_in_scope(student.model, setting.config.scope)
        config = setting.config
        plain = partial(plain_step, student, self._names, config)
        torchao = partial(torchao_step, student, self._names, config)
        self._builds: dict[str, Build] = {
            "ours": lambda _: Ours(student, config).subject(),
            "plain-eager": lambda _: plain(is_compiled=False),
            "plain-compiled": lambda compiled: plain(is_compiled=compiled),
            "torchao-int2": lambda compiled: torchao(
                is_compiled=compiled and setting.backend.compiles
            ),
            "reference": lambda _: reference_step(student, self._names, config),
        }
        self.unavailable: dict[str, str] = {}  # the reason why a case is not run any more
        if not is_installed():
            self.unavailable["torchao-int2"] = "torchao is not installed"

    def time(self, name: str) -> Timing | None:
        """Run one turn of a case; None if it is unavailable or does not fit into memory."""
        if name in self.unavailable:
            return None
        compile_anew()
        try:
            timing = unless_out_of_memory(lambda: self._turn(name, True), self.setting.backend)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().splitlines()[0]
            logger.warning("%s cannot be compiled (%s): it runs eagerly", name, reason)
            timing = unless_out_of_memory(lambda: self._turn(name, False), self.setting.backend)
            if isinstance(timing, Timing):
                timing = replace(timing, compiler={**timing.compiler, "fallback": reason})
        if isinstance(timing, OutOfMemory):
            self.unavailable[name] = "OOM"
            return None
        logger.info("%s: %.0f tokens/s", name, timing.tokens_per_s)
        return timing

    def _turn(self, name: str, compiled: bool) -> Timing:
        model, setting = self.student.model, self.setting
        model.to(setting.backend.device)
        try:
            numbered = setting.numbered_batches(setting.config.batch_size)
            subject = self._builds[name](compiled)
            if name != "ours":
                model.to("cpu")
                setting.backend.free_memory()
            return setting.time(subject, numbered)
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            model.to("cpu")

    def row(self, kind: str, name: str, timing: Timing | None) -> dict[str, object]:
        """Return a row of results, without numbers if the case took no step."""
        setting = self.setting
        row = setting.row(kind, name, setting.config.batch_size) | OWN_SETTINGS.get(name, {})
        return row if timing is None else row | setting.numbers(timing)


def merged(timings: list[Timing]) -> Timing:
    """Merge all rounds of a case: every timed step, the largest peak."""
    peaks = [timing.peak_gib for timing in timings if timing.peak_gib is not None]
    reserved = [t.reserved_gib for t in timings if t.reserved_gib is not None]
    return replace(
        timings[-1],
        steps_s=tuple(step for timing in timings for step in timing.steps_s),
        warmup_s=statistics.fmean(timing.warmup_s for timing in timings),
        peak_gib=max(peaks, default=None),
        reserved_gib=max(reserved, default=None),
    )
