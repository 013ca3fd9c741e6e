"""`qat bench`: one student, one or several batch sizes, or the search for the largest."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from qat.backend.base import DTYPES, GIB, Backend
from qat.backend.device import select
from qat.bench.batches import BatchSource, check_batch_sizes, open_source
from qat.bench.config import BenchConfig, MeasureConfig
from qat.bench.effective import Watched, check_strictly, what_ran
from qat.bench.find_max import MemoryModel, Search, Trials, find_max_batch, unless_out_of_memory
from qat.bench.measure import (
    CostFit,
    Roofline,
    Timing,
    compile_anew,
    fit_cost,
    measure_roofline,
    time_steps,
)
from qat.bench.results import Results, environment
from qat.bench.student import Ours, Subject, is_shape, open_student, quantized_model
from qat.bench.tpu_plan.run import Planned, plan_tpus
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.models.cost import (
    Device,
    StepWork,
    TokenFlops,
    device_called,
    devices_named,
    parameter_count,
    step_bytes,
    step_work,
    token_flops,
)
from qat.models.language_model import LanguageModel
from qat.train.config import StepConfig
from qat.train.optim import linears_in_scope
from qat.train.step import EAGER_STEPS, GRAPH_TOKENS, check_dtype

logger = logging.getLogger(__name__)

# What other devices would do, predicted from one measured run; never measured.
#
# Memory: `largest = (memory - RESERVED_GIB - fixed) / per_sequence` of the fitted memory model.
# Time: the work of a step at the rates that we reached on one H200, as shares of the data sheet's
# peaks. From a device of the table the measured speed is scaled by what this says of both; from any
# other what it says of the predicted one is the prediction.

RESERVED_GIB = 0.8
"""Memory that a driver's context and libraries take."""


@dataclass(frozen=True)
class Rates:
    """What a training step reaches of a device's peaks."""

    matmul: float
    """Share of the peak FLOP/s, in linears."""
    attention: float
    """The same in attention, as FLOPs of a step are counted."""
    traffic: float
    """Bytes moved for each of the numbers that enter and leave linears."""
    weight: float
    """Bytes moved for each weight, once a step."""
    layer_s: float
    """Least seconds that a layer takes in a step, however small: those of its launches."""

    def seconds(self, work: StepWork, device: Device, dtype: str, positions: int) -> float:
        """Time of one position, in steps of so many, in a dtype that the device multiplies in."""
        moved = self.traffic * work.elements + self.weight * work.weights / positions
        flops = work.matmul_flops / self.matmul + work.attention_flops / self.attention
        busy_s = flops / device.peak_flops(dtype) + moved / device.bandwidth
        return max(busy_s, self.layer_s * work.layers / positions)


RATES = Rates(matmul=0.740, attention=0.456, traffic=11.9, weight=25.7, layer_s=4.85e-4)
"""Fitted by `speedrun/measure_predictor.py` on the H200's rows of speedrun/records."""
SPREADS = {"A100-40": (0.84, 1.08), "A100-80": (0.81, 1.17), "H100": (0.61, 1.20)}
"""Measured over predicted, least and most, on cards with ten published throughputs or more."""
SPREAD = (0.45, 1.20)
"""The same over all cards, for the others. Both are what `speedrun/measure_predictor.py` finds."""


@dataclass(frozen=True)
class DevicePrediction:
    """PREDICTED numbers of one device."""

    device: str
    dtype: str
    max_batch: int | None
    """None where no memory model was measured, 0 where not even an empty batch has room."""
    peak_gib: float | None
    """At that batch, or beside any where nothing ran; what the driver takes included."""
    tokens_per_s: float
    tokens_per_s_range: tuple[float, float]
    """Where published throughputs lead to expect it; no range on the card that was measured."""
    recomputes: bool
    """Whether layers were recomputed in the run that this rests on: so they are here."""


@dataclass(frozen=True)
class Measured:
    """The run that predictions rest on."""

    device: Device | None
    dtype: str
    work: StepWork
    positions: int
    """Of a step."""
    tokens_per_s: float | None
    """None where nothing ran, on no device of the table."""
    memory: MemoryModel | None
    recomputes: bool
    """Whether it recomputed layers, told by what ran."""
    held_gib: Callable[[str], float] | None = None
    """What a step in a dtype holds beside its batch, where nothing ran."""

    def seconds(self, device: Device) -> float:
        """Time of a position of this run on `device`, in its own best dtype."""
        predicted = RATES.seconds(self.work, device, device.dtype, self.positions)
        if self.device is None or self.device.peak_flops(self.dtype) is None:
            return predicted
        own = RATES.seconds(self.work, self.device, self.dtype, self.positions)
        return predicted / own / self.tokens_per_s


def predict(measured: Measured, device: Device) -> DevicePrediction:
    """What `device` would do at the same settings in its own best dtype."""
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
"""Timed steps of a trial: enough to rank sizes by, and the second needs what all others do."""
SAFE_SHARE = 0.9
"""Of the memory of a machine that overcommits: a search or a plan stays within it."""


@dataclass(frozen=True)
class Setting:
    """What all measurements of one benchmark share."""

    name: str
    """The student, as the user called it."""
    parameters: int
    """Its weights, embeddings among them."""
    config: MeasureConfig
    backend: Backend
    data: BatchSource
    roofline: Roofline
    flops: TokenFlops
    looks: bool = True
    """Whether a step is looked into by a profiler, which on a CPU doubles what the step holds."""

    def batches(self, batch_size: int) -> list[Batch]:
        """The micro-batches of a step, on the host where a loader would have put them."""
        count = self.config.grad_accum_steps
        made = [self.data.batch(batch_size, step, self.backend) for step in range(count)]
        return [Batch(*map(self.backend.pinned, batch)) for batch in made]

    def time(
        self, subject: Subject, batch_size: int, clock: tuple[int, int] | None = None
    ) -> Timing:
        """Time a subject, then close it; all its graphs are compiled before the clock.

        `clock` are steps before the clock and on it, by default those of the settings.
        """
        warmup, steps = clock or (self.config.warmup, self.config.steps)
        is_compiled = self.backend.fixed_shapes()
        warmup = max(warmup, EAGER_STEPS if is_compiled else 1)
        try:
            return time_steps(
                Watched(subject, warmup, looks=self.looks and not is_compiled),
                self.batches(batch_size),
                self.backend,
                warmup=warmup,
                steps=steps,
            )
        finally:
            subject.close()

    def row(self, kind: str, case: str, batch_size: int) -> dict[str, object]:
        """What identifies a row."""
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
        """A timing as a row holds it, with its shares of the peaks of the `devices` it is of."""
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
        """The emulated device, if one was asked for, or if too large a step would end in a kill."""
        gib = self.config.memory_limit_gib
        if gib is None and may_outgrow and self.backend.overcommits():
            gib = SAFE_SHARE * self.backend.memory_gib()
        return nullcontext(gib) if gib is None else self.backend.limit_memory(gib)


@dataclass(frozen=True)
class BenchReport:
    """What a benchmark found, for whoever shows it."""

    path: Path
    rows: list[dict[str, object]]
    load_s: float
    fit: CostFit | None
    search: Search | None
    predictions: tuple[DevicePrediction, ...]
    planned: tuple[Planned, ...]
    """TPUs that the step was compiled for."""


def run_bench(config: BenchConfig, student: str, out: Path | None) -> BenchReport:
    """Measure the training step of `student`; rows go to `out` or a directory of the hour."""
    devices = () if config.planned is None else devices_named(config.planned)
    asked = config  # a TPU's own dtype is not this device's
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
            # a plan is often asked for where the student has no room
            may_outgrow = config.find_max_batch or bool(devices)
            with setting.memory_limit(may_outgrow=may_outgrow) as limit:
                if config.find_max_batch:
                    search = bench.find_max(config.sizes or backend.sizes_tried(), limit)
                else:
                    bench.measure_all(sizes)
                predictions = bench.plan(devices, search) if devices else ()
            timings = bench.timings
        planned = plan_tpus(asked, student, results)
        fit = fit_cost([t.positions for t in timings], [t.step_s for t in timings])
        found = {"load_s": load_s, "fit": fit and asdict(fit), "search": search and asdict(search)}
        results.finish(**found, roofline=asdict(setting.roofline))
    return BenchReport(results.path, results.rows, load_s, fit, search, predictions, planned)


def _lacking(config: BenchConfig, student: str, backend: Backend) -> str | None:
    """That a step of a shape has no room here, whatever its batch; None if it has.

    Where memory is promised that is not there it would take minutes to run out.
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
    """What a step of `model` holds beside its batch, where weights are formed a layer at a time."""
    learning = linears_in_scope(model, config.scope, config.kinds)
    return step_bytes(model, learning, config, DTYPES[dtype]).total(by_layer=True) / GIB


def prepare(
    config: MeasureConfig, student: str, place: str | None = None
) -> tuple[Setting, LanguageModel]:
    """Open the student, a shape's where `place` says, and the data, and measure the device."""
    backend = select(config.device)
    model = open_student(student, config, place)
    data = open_source(config, model)
    names = linears_in_scope(model.model, config.scope)
    roofline = measure_roofline(backend, config.dtype)
    flops = token_flops(model, names, config, S=data.seq_len, K=data.top_k)
    count = parameter_count(model.model)
    return Setting(student, count, config, backend, data, roofline, flops), model


def time_ours(setting: Setting, ours: Ours, batch_size: int) -> Timing | None:
    """Our step, compiled anew for this size; None if it does not fit into memory."""

    def steps() -> Timing:
        with ours.mended(), setting.backend.waiting_for(f"a step of batch {batch_size}"):
            return setting.time(ours.subject(), batch_size)

    compile_anew()
    return unless_out_of_memory(steps, setting.backend)


def try_steps(setting: Setting, ours: Ours, batch_size: int) -> Timing:
    """A few steps of ours, as a trial of `batch_size`; what was compiled before is used again.

    Where steps of the size are recorded as a graph the clock starts behind the recording.
    """
    is_recorded = setting.backend.records() and batch_size * setting.data.seq_len <= GRAPH_TOKENS
    clock = (EAGER_STEPS + 1 if is_recorded else 1), TRIAL_STEPS
    with ours.mended(), setting.backend.waiting_for(f"a step of batch {batch_size}"):
        return replace(setting, looks=False).time(ours.subject(), batch_size, clock)


def _predict_all(
    setting: Setting,
    student: LanguageModel,
    devices: Sequence[Device],
    results: Results,
    **ran: object,
) -> tuple[DevicePrediction, ...]:
    """What each device would do, from what `ran` here, as `Measured` has it; a row each."""
    recompute = float(setting.config.gradient_checkpointing)
    work = step_work(student, setting.flops, recompute=recompute)
    measured = Measured(dtype=setting.config.dtype, work=work, **ran)
    found = tuple(predict(measured, device) for device in devices)
    for each in found:
        row = {**setting.row("predicted", "ours", each.max_batch), "dtype": each.dtype}
        low, high = each.tokens_per_s_range
        told = {"on": each.device, "tokens_per_s": each.tokens_per_s}
        told |= {"tokens_per_s_low": low, "tokens_per_s_high": high}
        told |= {"gradient_checkpointing": each.recomputes}
        results.add(**{**row, **told}, status="PREDICTED")
    return found


class _Bench:
    """Measures one student and writes the rows."""

    def __init__(self, setting: Setting, ours: Ours, results: Results) -> None:
        self.setting = setting
        self.ours = ours
        self.results = results
        self.timings: list[Timing] = []
        self._trials = Trials(partial(try_steps, setting, ours), setting.backend)

    def measure_all(self, sizes: tuple[int, ...]) -> None:
        """One row per batch size; one that does not fit says so.

        Raises:
            ConfigError: none of them fits.
        """
        for size in sizes:
            timing = time_ours(self.setting, self.ours, size)
            self._add("step", size, timing, status="OOM" if timing is None else "OK")
        if not self.timings:
            raise ConfigError(
                f"batch_size={min(sizes)} does not fit into memory; lower --batch-size, add "
                "--gradient-checkpointing or ask for --find-max-batch"
            )

    def find_max(self, sizes: tuple[int, ...], limit: float | None) -> Search:
        """A row per trial, then one for the fastest batch and, last, one for the largest."""
        # a limited CPU would run out of what the profiler holds: the batch would be the tool's
        if self.setting.backend.overcommits():
            self.setting = replace(self.setting, looks=False)
        setting, timings = self.setting, {}
        limit = limit or setting.backend.memory_gib()

        def confirm(size: int) -> float | None:
            timings[size] = timing = time_ours(setting, self.ours, size)
            return None if timing is None else timing.tokens_per_s

        search = find_max_batch(self._trials, confirm, limit, setting.data.seq_len, sizes=sizes)
        for trial in search.trials:
            row = setting.row("trial", "ours", trial.batch_size) | asdict(trial)
            self.results.add(**row, status="TRIED" if trial.fits else "OOM")
        # the largest comes last, and alone where it is the fastest
        for size, kind in {search.fastest: "fastest", search.largest: "max"}.items():
            predicted = search.predicted
            self._add(kind, size, timings[size], predicted_max_batch=predicted, status=kind.upper())
        return search

    def plan(self, devices: tuple, search: Search | None) -> tuple[DevicePrediction, ...]:
        """Other devices, predicted from the fastest row of this run."""
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

    def _add(self, kind: str, size: int, timing: Timing | None, **more: object) -> None:
        numbers, setting = {}, self.setting
        if timing is not None:
            self.timings.append(timing)
            effective, backend = timing.compiler["effective"], setting.backend
            ran = what_ran(setting.config, self.ours.student, effective, backend)
            numbers = {**setting.numbers(timing), **ran}
            logger.info(
                "batch %d: %.4g s a step, %.0f tokens/s", size, timing.step_s, timing.tokens_per_s
            )
        row = setting.row(kind, f"step, batch {size}", size)
        self.results.add(**row, **numbers, **more)
        if setting.config.strict and timing is not None:
            check_strictly(ran["fallbacks"])
