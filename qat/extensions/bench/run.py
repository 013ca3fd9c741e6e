"""`qat bench`: measures one student at one or several batch sizes, or finds the largest batch."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from qat.backend.base import DTYPES, GIB, Backend
from qat.backend.device import select
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.extensions.bench.batches import BatchSource, check_batch_sizes, open_source
from qat.extensions.bench.config import BenchConfig, MeasureConfig
from qat.extensions.bench.effective import StepProfiler, check_strictly, what_ran
from qat.extensions.bench.find_max import (
    MemoryModel,
    OutOfMemory,
    Search,
    Trials,
    find_max_batch,
    unless_out_of_memory,
)
from qat.extensions.bench.measure import (
    LEAST_ROUNDS,
    CostFit,
    NumberedBatches,
    Roofline,
    Timing,
    compile_anew,
    fit_cost,
    measure_roofline,
    time_steps,
)
from qat.extensions.bench.results import Results, environment
from qat.extensions.bench.student import Ours, Subject, is_shape, open_student, quantized_model
from qat.extensions.bench.work import StepWork, step_work
from qat.hooks import extension
from qat.models.cost import parameter_count
from qat.models.devices import Device, device_called, devices_named
from qat.models.flops import TokenFlops, token_flops
from qat.models.language_model import LanguageModel
from qat.models.step_memory import step_bytes
from qat.train.learnable import weights_in_scope
from qat.train.start import check_dtype
from qat.train.step import EAGER_STEPS, GRAPH_TOKENS
from qat.train.step_config import StepConfig

logger = logging.getLogger(__name__)

# Predictions for other devices from one measured run; they are never measured.
#
# Memory: `largest = (memory - RESERVED_GIB - fixed) / per_sequence` of the fitted memory model.
# Time: the work of a step at the rates that we reached on one H200, as fractions of the data
# sheet's peaks. If the measured device is in the table, its measured speed is scaled by the ratio
# of the two predicted times; otherwise the predicted time is used as it is.

RESERVED_GIB = 0.8  # memory that the driver's context and libraries take


# rates fitted to the H200's rows of speedrun/records (record 2026-11-25_predictor)
MATMUL_FRAC, ATTENTION_FRAC = 0.740, 0.456
"""Fractions of the peak FLOP/s in linears, and in attention by the counted FLOPs of a step."""
BYTES_PER_ELEMENT, BYTES_PER_WEIGHT = 11.9, 25.7
"""Bytes moved per element that enters or leaves a linear, and per weight once per step."""
LAYER_S = 4.85e-4  # least seconds of a layer per step, however small: its launch overhead
SPREADS = {"A100-40": (0.84, 1.08), "A100-80": (0.81, 1.17), "H100": (0.61, 1.20)}
"""Measured over predicted speed, least and most, on cards with ten published speeds or more."""
SPREAD = (0.45, 1.20)  # the same over all cards, for the rest (record 2026-11-25_predictor)


@dataclass(frozen=True)
class DevicePrediction:
    """The PREDICTED numbers of one device."""

    device: str
    dtype: str
    max_batch: int | None
    """The largest batch; None without a memory model, 0 if not even an empty batch fits."""
    peak_gib: float | None
    """Peak at that batch, or of the fixed part if nothing ran; the driver's memory included."""
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    """Expected range from published throughputs; a single value on the measured card."""
    recomputes: bool  # True if layers are recomputed, as in the measured run


@dataclass(frozen=True)
class Measured:
    """The measured run that predictions are based on."""

    device: Device | None
    dtype: str
    work: StepWork
    positions: int  # positions per step
    tokens_per_s: float | None
    """The measured speed; None if nothing ran, and then `device` is None too."""
    memory: MemoryModel | None
    recomputes: bool  # True if the run recomputed layers, from counters of what ran
    held_gib: Callable[[str], float] | None = None
    """The memory of a step in a dtype without its batch, in GiB; only set if nothing ran."""

    def seconds(self, device: Device) -> float:
        """Return seconds per position of this run on `device`, in its best dtype."""
        predicted = seconds_by_rates(self.work, device, device.dtype, self.positions)
        if self.device is None or self.device.peak_flops(self.dtype) is None:
            return predicted
        own = seconds_by_rates(self.work, self.device, self.dtype, self.positions)
        return predicted / own / self.tokens_per_s


def seconds_by_rates(work: StepWork, device: Device, dtype: str, positions: int) -> float:
    """Return seconds per position in steps of `positions`, in a dtype that the device supports."""
    moved = BYTES_PER_ELEMENT * work.elements + BYTES_PER_WEIGHT * work.weights / positions
    flops = work.matmul_flops / MATMUL_FRAC + work.attention_flops / ATTENTION_FRAC
    busy_s = flops / device.peak_flops(dtype) + moved / device.bandwidth
    return max(busy_s, LAYER_S * work.layers / positions)


def predict(measured: Measured, device: Device) -> DevicePrediction:
    """Predict the speed and memory of `device` at the same settings in its best dtype."""
    largest = peak_gib = None
    if measured.memory is not None:
        largest = measured.memory.largest(device.memory_gib - RESERVED_GIB)
        peak_gib = RESERVED_GIB + measured.memory.peak_gib(largest)
    elif measured.held_gib is not None:
        peak_gib = RESERVED_GIB + measured.held_gib(device.dtype)
        largest = None if peak_gib < device.memory_gib else 0
    speed = 1 / measured.seconds(device)
    low, high = (1, 1) if device == measured.device else SPREADS.get(device.name, SPREAD)
    expected = (low * speed, high * speed)
    return DevicePrediction(
        device.name, device.dtype, largest, peak_gib, speed, expected, measured.recomputes
    )


FACTS = (
    *(name for name in StepConfig.model_fields if name != "xla_cache_dir"),
    "to",
    "layers",
    "attention",
)
"""Settings that every row repeats."""
TRIAL_STEPS = 2
"""Timed steps of a trial: enough to rank sizes, and the second step needs as much memory as all
later ones."""
CONFIRM_S = 2.0
"""Seconds of timed steps that confirm a batch found by a search, but at least `LEAST_ROUNDS`."""
SAFE_SHARE = 0.9  # fraction of memory that a search or a plan may use on a machine that overcommits


@dataclass(frozen=True)
class Setting:
    """The common part of all measurements of one benchmark."""

    name: str  # the student's name as the user gave it
    parameters: int  # number of weights of the student, embeddings included
    config: MeasureConfig
    backend: Backend
    data: BatchSource
    roofline: Roofline
    flops: TokenFlops
    looks: bool = True  # True to profile one step, which on a CPU doubles the memory of that step

    def numbered_batches(self, batch_size: int) -> NumberedBatches:
        """Return steps with the same micro-batches, in pinned host memory as from a loader."""
        count = self.config.grad_accum_steps
        made = [self.data.batch(batch_size, step, self.backend) for step in range(count)]
        return enumerate(repeat([Batch(*map(self.backend.pinned, batch)) for batch in made]))

    def time(
        self, subject: Subject, numbered: NumberedBatches, clock: tuple[int, int] | None = None
    ) -> Timing:
        """Time a subject, then close it; all its graphs are compiled before the clock starts.

        `clock` is the number of warm-up steps and of timed steps, by default from the settings.
        """
        warmup, steps = clock or (self.config.warmup, self.config.steps)
        is_compiled = self.backend.is_traced
        warmup = max(warmup, EAGER_STEPS if is_compiled else 1)
        try:
            return time_steps(
                StepProfiler(subject, warmup, looks=self.looks and not is_compiled),
                numbered,
                self.backend,
                warmup=warmup,
                steps=steps,
            )
        finally:
            subject.close()

    def row(self, kind: str, case: str, batch_size: int) -> dict[str, object]:
        """Return the columns that identify a row."""
        facts = {name: getattr(self.config, name) for name in FACTS}
        return {
            "kind": kind,
            "case": case,
            "student": self.name,
            "parameters": self.parameters,
            "data": self.data.kind,
            "seq_len": self.data.seq_len,
            "top_k": self.data.top_k,
            **facts,
            "scope": self.config.scope,
            "batch_size": batch_size,
        }

    def numbers(self, timing: Timing, devices: int = 1) -> dict[str, object]:
        """Return the columns of a timing, with the fractions of the peaks of all its `devices`."""
        speed, flops = timing.tokens_per_s / devices, self.flops
        linears = self.roofline.mfu(flops.linears * speed)
        return {
            **timing.numbers(),
            **self.roofline.mfu(flops.total * speed),
            **{f"linears_{name}": share for name, share in linears.items()},
            **{f"flops_per_token_{part}": value for part, value in asdict(flops).items()},
            "sheet_tflops": self.roofline.sheet_flops and self.roofline.sheet_flops / 1e12,
            "matmul_tflops": self.roofline.matmul_flops / 1e12,
        }

    def memory_limit(self, *, may_outgrow: bool = False) -> AbstractContextManager:
        """Limit memory to an emulated device, or where a large step would be killed."""
        gib = self.config.memory_limit_gib
        if gib is None and may_outgrow and self.backend.overcommits():
            gib = SAFE_SHARE * self.backend.memory_gib()
        return nullcontext(gib) if gib is None else self.backend.limit_memory(gib)


class Planned(Protocol):
    """A TPU that an extension compiled the step for."""

    def cells(self) -> tuple[str, ...]:
        """Return its line in the table of predictions."""

    def summary(self) -> dict[str, object]:
        """Return the largest batch, for the last line of the verb."""


@dataclass(frozen=True)
class BenchReport:
    """The results of a benchmark, for printing."""

    path: Path
    rows: list[dict[str, object]]
    load_s: float
    fit: CostFit | None = None
    search: Search | None = None
    predictions: tuple[DevicePrediction, ...] = ()
    planned: tuple[Planned, ...] = ()  # TPUs that the step was compiled for


def run_bench(config: BenchConfig, student: str, out: Path | None) -> BenchReport:
    """Measure the training step of `student`; rows go to `out` or a directory named by the time."""
    devices = () if config.planned is None else devices_named(config.planned)
    planner = extension("qat.plans", "tpu") if config.tpus else None
    if planner:
        planner.check_plan(config)
    as_given = config  # `check_dtype` resolves the dtype for this device, not for a TPU
    config, backend = check_dtype(config), select(config.device)
    sizes = config.sizes or (config.batch_size,)
    with Results(out, environment(backend, config)) as results:
        began = time.perf_counter()
        lacking = _lacking(config, student, backend)
        if lacking and (config.find_max_batch or not devices):
            raise ConfigError(
                f"{lacking}; learn less, as --learn scales,codebook does, or take fewer --layers, "
                "a smaller shape or a larger machine"
            )
        setting, model = prepare(config, student, "meta" if lacking else None)
        if not config.find_max_batch:
            check_batch_sizes(setting.data, sizes, config.grad_accum_steps)
        search, timings = None, []
        if lacking:
            logger.warning(
                "%s: other devices are predicted without a run, largest batches are not", lacking
            )
            predictions = _predict_all(
                setting, model, devices, results,
                device=None,
                positions=max(sizes) * setting.data.seq_len * config.grad_accum_steps,
                tokens_per_s=None,
                memory=None,
                recomputes=config.gradient_checkpointing,
                held_gib=partial(held_gib, model.model, config),
            )  # fmt: skip
            load_s = time.perf_counter() - began
        else:
            bench = _Bench(setting, Ours(model, config), results)
            load_s = time.perf_counter() - began
            # plans are often made where the student does not fit
            may_outgrow = config.find_max_batch or bool(devices)
            with setting.memory_limit(may_outgrow=may_outgrow) as limit:
                if config.find_max_batch:
                    search = bench.find_max(config.sizes or backend.tracing.sizes_tried(), limit)
                else:
                    bench.measure_all(sizes)
                predictions = bench.plan(devices, search) if devices else ()
            timings = bench.timings
        planned = planner.plan_tpus(as_given, student, results) if planner else ()
        fit = fit_cost([t.positions for t in timings], [t.step_s for t in timings])
        found = {"load_s": load_s, "fit": fit and asdict(fit), "search": search and asdict(search)}
        results.finish(**found, roofline=asdict(setting.roofline))
    return BenchReport(results.path, results.rows, load_s, fit, search, predictions, planned)


def _lacking(config: BenchConfig, student: str, backend: Backend) -> str | None:
    """Return why a step of a shape cannot fit here at any batch size; None if it can.

    On a machine that overcommits memory, trying it would take minutes to fail.
    """
    free = config.memory_limit_gib or backend.memory_gib()
    if free is None or not backend.overcommits() or not is_shape(student):
        return None
    held = held_gib(quantized_model(student, config, "meta"), config, config.dtype)
    if held <= free:
        return None
    return (
        f"a step of {student} that learns {config.learn} holds {held:.3g} GiB beside its batch, "
        f"but {free:.3g} GiB can be had here"
    )


def held_gib(model: PreTrainedModel, config: MeasureConfig, dtype: str) -> float:
    """Return the memory of a step without its batch in GiB, with weights formed layer by layer."""
    learning = weights_in_scope(model, config.scope, config.kinds)
    return step_bytes(model, learning, config, DTYPES[dtype]).total(by_layer=True) / GIB


def prepare(
    config: MeasureConfig, student: str, place: str | None = None
) -> tuple[Setting, LanguageModel]:
    """Open the student (a shape on `place`) and the data, and measure the device."""
    backend = select(config.device)
    model = open_student(student, config, place)
    data = open_source(config, model)
    names = weights_in_scope(model.model, config.scope)
    roofline = measure_roofline(backend, config.dtype)
    flops = token_flops(model, names, config, S=data.seq_len, K=data.top_k)
    count = parameter_count(model.model)
    return Setting(student, count, config, backend, data, roofline, flops), model


def _predict_all(
    setting: Setting,
    student: LanguageModel,
    devices: Sequence[Device],
    results: Results,
    **ran: object,
) -> tuple[DevicePrediction, ...]:
    """Predict each device from `ran`, the other fields of `Measured`, and add a row for each."""
    recompute = float(setting.config.gradient_checkpointing)
    work = step_work(student, setting.flops, recompute=recompute)
    measured = Measured(dtype=setting.config.dtype, work=work, **ran)
    found = tuple(predict(measured, device) for device in devices)
    for each in found:
        low, high = each.tokens_per_s_range
        predicted = {
            "dtype": each.dtype,
            "on": each.device,
            "tokens_per_s": each.tokens_per_s,
            "tokens_per_s_low": low,
            "tokens_per_s_high": high,
            "gradient_checkpointing": each.recomputes,
            "status": "PREDICTED",
        }
        results.add(**setting.row("predicted", "ours", each.max_batch) | predicted)
    return found


class _Bench:
    def __init__(self, setting: Setting, ours: Ours, results: Results) -> None:
        self.setting = setting
        self.ours = ours
        self.results = results
        self.timings: list[Timing] = []
        self._trials = Trials(self._try, setting.backend)

    def measure_all(self, sizes: tuple[int, ...]) -> None:
        """Add one row per batch size, with status OOM if it does not fit.

        Raises:
            ConfigError: none of them fits.
        """
        for size in sizes:
            self._add("step", size, self._time(size))
        if not self.timings:
            raise ConfigError(
                f"batch_size={min(sizes)} does not fit into memory; lower --batch-size, add "
                "--gradient-checkpointing or ask for --find-max-batch"
            )

    def find_max(self, sizes: tuple[int, ...], limit: float | None) -> Search:
        """Add a row per trial, then one for the fastest batch and finally one for the largest."""
        # the profiler's memory would count against the limit and lower the largest batch
        if self.setting.backend.overcommits():
            self.setting = replace(self.setting, looks=False)
        setting, timings = self.setting, {}
        limit = limit or setting.backend.memory_gib()

        def confirm(size: int) -> float | None:
            step_s = max(trial.step_s for trial in self._trials.done.values() if trial.fits)
            steps = min(setting.config.steps, max(LEAST_ROUNDS, int(CONFIRM_S / step_s)))
            timings[size] = timing = self._time(size, (setting.config.warmup, steps))
            return None if isinstance(timing, OutOfMemory) else timing.tokens_per_s

        search = find_max_batch(self._trials, confirm, limit, setting.data.seq_len, sizes=sizes)
        for trial in search.trials:
            row = setting.row("trial", "ours", trial.batch_size) | asdict(trial)
            self.results.add(**row, status="OK" if trial.fits else "OOM")
        # the largest comes last, and there is one row if it is also the fastest
        for size, kind in {search.fastest: "fastest", search.largest: "max"}.items():
            more = {"predicted_max_batch": search.predicted, "status": kind.upper()}
            self._add(kind, size, timings[size], **more)
        return search

    def plan(self, devices: tuple, search: Search | None) -> tuple[DevicePrediction, ...]:
        """Predict other devices from the fastest row of this run."""
        setting = self.setting
        model = search.model if search else self._trials.memory_model(setting.data.seq_len)
        fastest = max(self.timings, key=lambda timing: timing.tokens_per_s)
        return _predict_all(
            setting, self.ours.student, devices, self.results,
            device=device_called(setting.backend.name()),
            positions=fastest.positions,
            tokens_per_s=fastest.tokens_per_s,
            memory=model,
            recomputes=bool(fastest.compiler["effective"]["recomputed_layers"]),
        )  # fmt: skip

    def _time(self, batch_size: int, clock: tuple[int, int] | None = None) -> Timing | OutOfMemory:
        """Time a step, freshly compiled for this size."""
        compile_anew()
        return unless_out_of_memory(
            lambda: self._steps(self.setting, batch_size, clock), self.setting.backend
        )

    def _try(self, batch_size: int) -> Timing:
        """Time a few steps as a trial of `batch_size`, reusing compiled code."""
        setting = replace(self.setting, looks=False)
        # if steps of this size are captured as a graph, the clock starts after the capture
        is_recorded = setting.backend.records and batch_size * setting.data.seq_len <= GRAPH_TOKENS
        return self._steps(
            setting, batch_size, (EAGER_STEPS + 1 if is_recorded else 1, TRIAL_STEPS)
        )

    def _steps(
        self, setting: Setting, batch_size: int, clock: tuple[int, int] | None = None
    ) -> Timing:
        with (
            self.ours.restored_on_failure(),
            setting.backend.tracing.compiling(f"a step of batch {batch_size}"),
        ):
            numbered = setting.numbered_batches(batch_size)
            return setting.time(self.ours.subject(), numbered, clock)

    def _add(self, kind: str, size: int, timing: Timing | OutOfMemory, **more: object) -> None:
        setting, row = self.setting, self.setting.row(kind, f"step, batch {size}", size)
        if isinstance(timing, OutOfMemory):
            self.results.add(**row, error=timing.error, status="OOM")
            return
        self.timings.append(timing)
        effective = timing.compiler["effective"]
        own, length = self.ours.student, setting.data.seq_len
        ran = what_ran(setting.config, own, effective, setting.backend, length=length)
        logger.info(
            "batch %d: %.4g s a step, %.0f tokens/s", size, timing.step_s, timing.tokens_per_s
        )
        self.results.add(**row, **setting.numbers(timing), **ran, **{"status": "OK", **more})
        if setting.config.strict:
            check_strictly(ran["fallbacks"])
