"""How long a run will take, what it will hold, and what it will write: from two measured steps.

All of it happens in objects that are thrown away: a run that follows is the same, bit for bit.
"""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from qat.backend import device as backends
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.models.load import load_model, load_tokenizer
from qat.models.source import resolve
from qat.models.stored_state import packed_state_dict
from qat.nn.step import form_weights
from qat.ranks import ALONE, Ranks, Rehearsal
from qat.train.config import TrainConfig
from qat.train.judge import CodeWatch, Judge
from qat.train.start import make_trainable, open_teacher
from qat.train.step import EAGER_STEPS, TrainingStep

WARM_STEPS, MEASURED_STEPS = EAGER_STEPS + 1, 2
"""The step that records comes after those that run as written."""


class Prediction(NamedTuple):
    """What two steps and two evaluations tell of a run, on one device."""

    step_s: float
    """One optimizer step, evaluations and saving left out."""
    tokens_per_s: float
    """Positions, padding included."""
    eval_s: float
    """One evaluation with all its sequences."""
    peak_gib: float | None
    """Most memory held in steps, evaluations and a checkpoint's tensors; None if nobody counts."""
    checkpoint_bytes: int
    """One checkpoint with the trainer's state."""
    final_bytes: int
    """The packed model alone."""
    attention: str
    """`tile`, our kernel for packed documents, or `sdpa`; nothing where graphs hold it."""
    fallback: str | None
    """Why layers run uncompiled although they should be compiled."""

    def hours(self, config: TrainConfig) -> float:
        """The whole run, evaluations included; checkpoints are written behind the steps."""
        return config.max_steps * self.step_s / 3600 + self.evaluation_h(config)

    def evaluation_h(self, config: TrainConfig) -> float:
        """Hours of evaluations: the untrained student's, the periodic ones, and the last."""
        return (1 + -(-config.max_steps // config.eval_every)) * self.eval_s / 3600

    def disk_bytes(self, config: TrainConfig) -> int:
        """The most that a run's checkpoints take at any time.

        Those kept, milestones, the best one, the one being written, and the final model.
        """
        saves = -(-config.max_steps // config.save_every) if config.save_every else 1
        milestones = config.max_steps // config.milestone_every if config.milestone_every else 0
        held = min(saves, config.keep) + milestones + 2
        return held * self.checkpoint_bytes + self.final_bytes


def predict(
    config: TrainConfig, student: str, cache: TeacherCache, *, world: int = 1
) -> Prediction:
    """Take a few steps as the run will, on one device, and put everything back.

    Args:
        config: with its dtype resolved, and as one rank of several would have it.
        world: how many ranks will train; this one rehearses its share, exchanges left out.

    Raises:
        RuntimeError: device memory ran out (see `Backend.is_out_of_memory`).
        ConfigError, CacheError, CheckpointError: see `train_student`.
    """
    backend = backends.select(config.device)
    try:
        with backends.seeded(config.seed):
            shares = config.shard_latents and world > 1
            ranks = Rehearsal(0, world, backend.device) if shares else ALONE
            return _measure(config, student, cache, ranks)
    finally:
        backend.free_memory()
        backend.reset_peak_memory()


def _measure(
    config: TrainConfig,
    student: str,
    cache: TeacherCache,
    ranks: Ranks,
) -> Prediction:
    backend = backends.select(config.device)
    model = load_model(student, device=config.device, dtype="fp32")
    optimizer = make_trainable(model.model, config, ranks=ranks)
    take_step = TrainingStep(model, optimizer, config, open_teacher(config, cache))
    try:
        backend.reset_peak_memory()
        for step in range(WARM_STEPS):
            result = take_step(_batches(config, cache, step), step)
        begun = backend.mark(result.grad_norm)
        for step in range(WARM_STEPS, WARM_STEPS + MEASURED_STEPS):
            result = take_step(_batches(config, cache, step), step)
        ended = backend.mark(result.grad_norm)
        step_s = backend.seconds_between(begun, ended) / MEASURED_STEPS
        eval_s = _evaluation_s(config, Judge(model, load_tokenizer(student), cache, config))
        packed, around = packed_state_dict(model.model), _bytes_beside(student)
        peak_gib = backend.peak_memory_gib()
    finally:
        take_step.close()
    state_bytes = optimizer.state_bytes() + _bytes(CodeWatch(model.model).state())
    dtype = backend.dtype(config.dtype)
    return Prediction(
        step_s=step_s,
        tokens_per_s=result.positions / ranks.size / step_s,
        eval_s=eval_s,
        peak_gib=peak_gib,
        checkpoint_bytes=_bytes(packed) + state_bytes + around,
        final_bytes=_bytes(packed) + around,
        attention="" if backend.fixed_shapes() else model.attention(cache.sequence_length, dtype),
        fallback=take_step.fallback,
    )


def _batches(config: TrainConfig, cache: TeacherCache, step: int) -> list[Batch]:
    total, size = cache.num_sequences("train"), config.sequences_per_step
    parts = sequence_indices(config.seed, step, size, total)
    return [cache.batch(part) for part in parts.reshape(-1, config.batch_size)]


def _evaluation_s(config: TrainConfig, judge: Judge) -> float:
    """Seconds of a whole verdict, from those of its first one and two batches."""
    backend = judge.backend
    held_out = judge.cache.num_sequences("held_out")
    total = min(config.eval_sequences, held_out)
    size = min(config.batch_size, total)
    seconds = []
    for batches in (1, 1, 2):  # the first one compiles
        judge.config = config.model_copy(update={"eval_sequences": min(total, batches * size)})
        begun = backend.mark()
        form_weights(judge.student.model, backend.dtype(config.dtype))
        judge.verdict(backend.dtype(config.dtype))
        seconds.append(backend.seconds_between(begun, backend.mark()))
    _, one, two = seconds
    return one + max(0.0, two - one) * (-(-total // size) - 1)


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _bytes_beside(student: str) -> int:
    """Tokenizer and configuration beside a local student's weights."""
    directory = Path(resolve(student))
    if not directory.is_dir():
        return 0
    files = (path for path in directory.iterdir() if path.is_file())
    return sum(path.stat().st_size for path in files if path.suffix != ".safetensors")
