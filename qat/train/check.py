"""Gathers what the preflight looks at, and stops a run that it finds an error in."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM

from qat.backend import device as backends
from qat.data.reader import TeacherCache
from qat.data.remote import open_cache
from qat.data.text import tokenizer_hash
from qat.errors import ConfigError, QatError
from qat.kernels.nsa.router import choose
from qat.models.cost import device_called, token_flops
from qat.models.language_model import LanguageModel
from qat.models.load import load_config, load_tokenizer
from qat.nn.swap import linear_names
from qat.nsa.swap import nsa_config
from qat.train.config import TrainConfig
from qat.train.predict import Prediction, predict
from qat.train.preflight import Finding, Plan, SparsePlan, is_long, preflight
from qat.train.prepare import check_batch, check_losses
from qat.train.step import check_dtype, divide

USUAL_SHARE = 1 / 3
"""Of a device's peak, for a first guess at how long a run takes."""
REFUSED = {"cache", "eval_split"}
"""Codes of errors that no run can go on in spite of."""


class Checked(NamedTuple):
    """What the preflight found, and what it measured."""

    findings: list[Finding]
    prediction: Prediction | None
    is_long: bool

    def errors(self) -> list[Finding]:
        """The findings that stop a run."""
        return [finding for finding in self.findings if finding.severity == "error"]


def examine(
    config: TrainConfig, student: str, out: Path, *, world: int = 1, measures: bool = False
) -> Checked:
    """Look at a run before it begins; nothing is written.

    Args:
        config: the run's.
        student: see `train_student`.
        out: where the run will lie.
        world: how many devices will train.
        measures: take steps to predict time and memory also before a run that is not long, by its
            steps or by a guess from their FLOPs.

    Raises:
        ConfigError, CacheError, CheckpointError: cache, student or device are not there.
    """
    resolved = check_dtype(divide(config, world))
    cache = open_cache(config.cache_dir)
    backend = backends.select(config.device)
    plan = Plan(
        device=backend.name(),
        has_bf16=backend.has_bf16(),
        memory_gib=backend.memory_gib(),
        free_bytes=shutil.disk_usage(_existing(out)).free,
        train_sequences=cache.num_sequences("train"),
        held_out_sequences=cache.num_sequences("held_out"),
        sequence_length=cache.sequence_length,
        width=load_config(student).get_text_config().hidden_size,
        world=world,
        problems=tuple(_problems(resolved, student, cache)),
        sparse=_sparse_plan(student, cache.sequence_length, backend),
    )
    guess = None if plan.problems else guessed_hours(resolved, student, cache)
    measures = measures or is_long(resolved, guess)
    if measures and not plan.problems and plan.train_sequences and plan.held_out_sequences:
        plan = _measured(plan, resolved, student, cache)
    hours = plan.prediction.hours(resolved) if plan.prediction else guess
    return Checked(preflight(resolved, plan), plan.prediction, is_long(resolved, hours))


def codes_forced(findings: Sequence[Finding], *, force: bool) -> list[str]:
    """The codes of errors that the user wishes to go on in spite of.

    Those that `train_student` refuses in its own words are left to it.

    Raises:
        ConfigError: there are errors, and `force` is false.
    """
    errors = [each for each in findings if each.severity == "error" and each.code not in REFUSED]
    if not force:
        refuse(errors)
    return sorted({finding.code for finding in errors})


def refuse(findings: Sequence[Finding]) -> None:
    """Stop where there are errors.

    Raises:
        ConfigError: the first error, and how many more there are.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f" ({len(errors) - 1} more in the table)" if len(errors) > 1 else ""
        raise ConfigError(f"preflight: {errors[0].line()}, or add --force{more}")


def guessed_hours(config: TrainConfig, student: str, cache: TeacherCache) -> float | None:
    """Hours of all steps at a third of the device's peak; None for a device nobody knows."""
    device = device_called(backends.select(config.device).name())
    peak = None if device is None else device.peak_flops(config.dtype)
    if peak is None:
        return None
    with torch.device("meta"):
        model = LanguageModel(AutoModelForCausalLM.from_config(load_config(student)))
    S, K = cache.sequence_length, cache.manifest.settings.top_k
    flops = token_flops(model, linear_names(model.model), config, S=S, K=K).total
    return config.max_steps * config.sequences_per_step * S * flops / (peak * USUAL_SHARE) / 3600


def _measured(plan: Plan, config: TrainConfig, student: str, cache: TeacherCache) -> Plan:
    backend = backends.select(config.device)
    try:
        return plan._replace(prediction=predict(config, student, cache, world=plan.world))
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
    backend.free_memory()  # the error held what had been loaded
    return plan._replace(has_run_out=True)


def _problems(config: TrainConfig, student: str, cache: TeacherCache) -> Iterator[str]:
    """What `train_student` would refuse: targets, tokenizer, vocabulary, length."""
    tokenizer, model = load_tokenizer(student), load_config(student).get_text_config()
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_losses(config, cache),
        lambda: check_batch(config, cache),
        lambda: cache.check_student(
            tokenizer_hash(tokenizer),
            model.vocab_size,
            getattr(model, "max_position_embeddings", None),
        ),
    )
    for check in checks:
        try:
            check()
        except QatError as error:
            yield str(error)


def _sparse_plan(student: str, length: int, backend: backends.Backend) -> SparsePlan | None:
    """What is known of sparse attention at this length; None for a dense student.

    Raises:
        ConfigError: the backend that it names cannot compute it.
    """
    model = load_config(student)
    config = nsa_config(model)
    if config is None:
        return None
    settings = model.get_text_config()
    heads = settings.num_attention_heads
    route = choose(
        config,
        length=length,
        group=heads // settings.num_key_value_heads,
        head_dim=getattr(settings, "head_dim", None) or settings.hidden_size // heads,
        device=backend.device,
    )
    return SparsePlan(config.reach, config.mode != "merged", route.backend, route.reason)


def _existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that is there."""
    path = path.resolve()
    return next(each for each in (path, *path.parents) if each.is_dir())
