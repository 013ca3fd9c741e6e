"""The bench of a run's own step on its own batches, compared with the speed that the run logged."""

import time
from pathlib import Path

from qat.backend.device import select
from qat.config import DeviceSettings, refuse_code
from qat.errors import ConfigError
from qat.extensions.bench.batches import BatchSource
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.effective import check_strictly, what_ran
from qat.extensions.bench.measure import Timing, measure_roofline
from qat.extensions.bench.results import Results, environment
from qat.extensions.bench.run import BenchReport, Setting
from qat.files import described
from qat.logs import RECIPE
from qat.models.cost import parameter_count
from qat.observe.runs import TrainingRun, read_directory, step_seconds, wall_seconds
from qat.train.config import TrainConfig
from qat.train.run import RunDirectory
from qat.train.start import check_dtype, reopened
from qat.train.step import EAGER_STEPS
from qat.train.step_config import StepConfig

PLACES = {"cache_dir", *DeviceSettings.model_fields}
"""Settings whose paths or indices may differ from the run's: the cache is compared by its content,
the device by its name."""
OWN = {"like", "steps", "warmup", "strict"}
"""Settings that only a measurement has."""
MEDIANS = ("mfu_frac", "step_s", "step_s_p50", "data_wait_s", "rollout_s")
"""Keys of a heartbeat whose medians over the run become columns."""


def time_like(config: BenchConfig, run: Path, out: Path | None) -> BenchReport:
    """Time the first steps of a training run again and compare them with the speed that it logged.

    The steps are built by the code of `qat train` and learn at the run's rates, but nothing is
    written. Their batches are read before the clock starts.

    Raises:
        ConfigError, CacheError, CheckpointError: there is no such run, it was trained on another
            device or on several, `config` contradicts it, or what it learned from is gone.
    """
    logged = read_directory(run)
    if not isinstance(logged, TrainingRun) or not logged.heartbeats:
        raise ConfigError(
            f"like={run} {described(run)} that has logged no speed, expected a run of 'qat train' "
            "that has; name one"
        )
    settings, student = RunDirectory(run).begun_with()
    values, recipe = settings.model_dump(mode="json"), str(run / RECIPE)
    refuse_code(values, recipe)
    moved = config.model_dump(mode="json", include=config.model_fields_set & PLACES)
    settings = TrainConfig.parse(values | moved, recipe).divided(1)
    backend = select(settings.device)
    devices = f"{logged.info.get('world_size')} x {logged.info.get('device')}"
    if devices != f"1 x {backend.name()}":
        raise ConfigError(
            f"like={run} was trained on {devices}, expected 1 x {backend.name()}, which is here; "
            "name a run of this device, or time this one where it was trained"
        )
    settings = check_dtype(settings)
    _check_named(config, settings, run)
    shared = {name: getattr(settings, name) for name in StepConfig.model_fields}
    # `Setting.time` may take as many steps before the clock, and each has batches of its own
    shared["warmup"] = max(config.warmup, EAGER_STEPS)
    config, session = config.model_copy(update=shared), backend.session(settings.xla_cache_dir)
    with session, Results(out, environment(backend, config)) as results:
        began = time.perf_counter()
        trainer = reopened(RunDirectory(run), settings, student)
        model, made = trainer.student, trainer.cache.manifest.settings
        sizes = (made.sequence_length, made.top_k, made.draws, model.config.vocab_size)
        data = BatchSource(trainer.cache, *sizes, config.seed)
        roofline, count = measure_roofline(backend, config.dtype), parameter_count(model.model)
        setting = Setting(student, count, config, backend, data, roofline, trainer.flops())
        steps = range(trainer.step, trainer.step + config.warmup + config.steps)
        numbered = [(step, trainer.step_batches(step)) for step in steps]
        load_s = time.perf_counter() - began
        timing = setting.time(trainer.take_step, numbered)
        effective = timing.compiler["effective"]
        ran = what_ran(config, model, effective, backend, length=made.sequence_length)
        row = setting.row("like", f"step of {logged.label}", config.batch_size)
        results.add(**row, **setting.numbers(timing), **ran, **_beside(logged, timing), status="OK")
        results.finish(load_s=load_s)
        if config.strict:
            check_strictly(ran["fallbacks"])
    return BenchReport(results.path, results.rows, load_s)


def _check_named(config: BenchConfig, settings: TrainConfig, run: Path) -> None:
    for name in sorted(config.model_fields_set - PLACES - OWN):
        value, own = getattr(config, name), getattr(settings, name, "no such setting")
        if value != own:
            raise ConfigError(
                f"{name}={value} beside like={run}, which has {own}, expected the settings of the "
                f"run; leave out --{name.replace('_', '-')}"
            )


def _beside(logged: TrainingRun, timing: Timing) -> dict[str, object]:
    """Return the medians of a run's heartbeats as columns; the first heartbeat is left out."""
    speed, wall_s = logged.tokens_per_s() or 0.0, wall_seconds(logged.heartbeats)
    return {
        "like": logged.label,
        "run_commit": logged.info.get("commit"),
        "run_tokens_per_s": speed,
        "real_run_over_bench": speed / timing.tokens_per_s,
        "run_peak_gib": logged.peak_gib(),
        **{f"run_{name}": logged.median(name) for name in MEDIANS},
        # evaluations, saves and what else is no step
        "run_outside_frac": 1 - step_seconds(logged.heartbeats) / wall_s,
    }
