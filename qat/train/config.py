"""Settings of `qat train`."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from qat.config import (
    Careful,
    Free,
    Loss,
    OnResume,
    Required,
    Saving,
    Settings,
    Speed,
    Steps,
)
from qat.data.config import Location
from qat.errors import ConfigError
from qat.logs import RECIPE
from qat.losses.config import WITH_TEACHER, parse_losses
from qat.train.step_config import Comparable, OneOrder, OptimConfig, StepConfig

T = TypeVar("T")
Part = TypeVar("Part", bound=Settings)
# More reasons why a resumed run must keep a setting (see `qat.train.step_config`).
OneJudge = Annotated[
    T, OnResume("the best student is told by the same sequences from the first to the last")
]
OneTeacher = Annotated[T, OnResume("it belongs to the teacher, which stays the same")]

ON_OWN_WORDS = tuple(name for name in WITH_TEACHER if name != "hard_ce")
"""Losses on the student's own text: all with a teacher except cross-entropy, which would take that
text as correct."""
ALMOST_WHOLE = 1e-6
"""Largest distance of a share of the rows from a whole number of rows, such as 0.1 of 30."""


def refuse_begun(out: Path) -> None:
    """Refuse a run directory that holds a run already.

    Raises:
        ConfigError: it does.
    """
    if (out / RECIPE).exists():
        raise ConfigError(
            f"out={out} holds a run already; go on with --resume or choose another --out"
        )


class DataConfig(Settings):
    """Settings of what the student learns from: a cache, and a teacher that may run as well."""

    cache_dir: Required[Free[Location]]
    """Teacher cache to learn from (see qat cache): a directory, or s3://... and the like."""
    order: Steps[OneOrder[Literal["shuffled", "arrival"]]] = "shuffled"
    """Order of the sequences; arrival is for a cache that 'qat cache' may still be writing: the
    first pass goes through its shards as they come."""
    bucket_lengths: Steps[OneOrder[str]] = ""
    """Lengths such as 128,256,512, up to that of the cache's sequences: a step has sequences that
    end in one of them and is cut to it. auto: an eighth, a quarter, a half and all."""
    teacher: Loss[Comparable[str | None]] = None
    """The cache's teacher, directory or hub id, to run during training: losses then compare all
    words, at the cost of its forward; the cache gives the text and the evaluation."""


class RolloutConfig(Settings):
    """Settings of the student's own text: how much of it, how it is generated, and its loss."""

    on_policy: Loss[Comparable[float]] = Field(0.0, ge=0, le=1)
    """Share of each step's rows in which the student continues a prompt of the cache itself and
    learns from the --teacher's distribution over its text; the other rows come from the cache."""
    on_policy_loss: Loss[Comparable[str]] = "reverse_kl"
    """Loss on the student's own text: reverse_kl, kl, jsd, cakld, or a sum."""
    rollout_every: Loss[Comparable[int]] = Field(1, gt=0)
    """Steps per rollout. Each rollout is used for that many steps, so its text is by then up to
    that number minus 1 steps old."""
    rollout_tokens: Loss[Comparable[int]] = Field(0, ge=0)
    """Most tokens that the student generates per row; 0 is three quarters of the cache's sequence
    length."""
    rollout_temperature: Loss[Comparable[float]] = Field(1.0, ge=0)
    """Sampling temperature of rollouts; 0 takes the most likely token."""

    @property
    def own_losses(self) -> dict[str, float]:
        """Weight by name of each loss on the student's own text."""
        return parse_losses(self.on_policy_loss, "on_policy_loss")

    def idle(self) -> dict[str, object]:
        """Return settings that were changed but have no effect, because there is no such text."""
        if self.on_policy:
            return {}
        usual = {name: field.default for name, field in RolloutConfig.model_fields.items()}
        return {name: now for name in usual if (now := getattr(self, name)) != usual[name]}


class EvalConfig(Settings):
    """Settings of the evaluations during training."""

    eval_every: Saving[Free[int]] = Field(100, gt=0)
    """Steps between evaluations on the held-out split."""
    skip_first_eval: Saving[Free[bool]] = False
    """Take the first step without an evaluation of the untrained student, which then does not
    compete for the best."""
    eval_sequences: Saving[OneJudge[int]] = Field(256, gt=0)
    """Held-out sequences per evaluation."""
    sample_prompt: Saving[Free[str]] = "The"
    """Text that the generated sample of each evaluation continues."""


class SaveConfig(Settings):
    """Settings of what a run writes, and how often."""

    save_every: Saving[Free[int]] = Field(100, ge=0)
    """Steps between checkpoints; 0 saves only a new best at an evaluation, and at the end."""
    milestone_every: Saving[Free[int]] = Field(0, ge=0)
    """Keep checkpoints at multiples of this many steps for ever; 0 for none."""
    keep: Saving[Free[int]] = Field(2, gt=0)
    """Number of periodic checkpoints to keep, besides the best one."""
    log_every: Saving[Free[int]] = Field(10, gt=0)
    """Steps between lines of metrics."""
    beat_s: Saving[Free[float]] = Field(60.0, ge=0)
    """Seconds after which a step leaves a heartbeat although it is not logged; 0 for never."""


class TrainConfig(SaveConfig, EvalConfig, OptimConfig, RolloutConfig, DataConfig, StepConfig):
    """Settings for training a student on a teacher cache.

    They are one table for a user, of the fields of all parts, the last part's first. Each component
    of a run is handed a part (`part`), or the values that it needs.
    """

    global_batch_size: Steps[Free[int]] = Field(0, ge=0)
    """Sequences in one optimizer step over all ranks, from which grad_accum_steps follows; 0 is
    batch_size x grad_accum_steps x ranks."""
    shard_latents: Speed[Free[bool]] = False
    """Divide latent weights, their gradients and moments over the ranks, or over the XLA devices of
    one process; each holds its rows."""
    ranks: Speed[Free[Literal["fast", "safe"]]] = "fast"
    """Exchanges between processes: fast overlaps them with other work and replays recorded steps;
    safe does neither, to tell a bad network from a fault of that."""
    batches_ahead: Speed[Free[int]] = Field(-1, ge=-1)
    """Steps whose batches are read ahead, each on a thread of its own; -1 for the device's number,
    4 on a GPU and 0 on a CPU."""
    price_per_hour: Careful[Free[float]] = Field(0.0, ge=0)
    """Price of one device per hour, for the prediction of costs."""
    stall_s: Careful[Free[float]] = Field(600.0, gt=0)
    """Seconds without a finished step after which stack traces are written."""
    trust_remote_code: Loss[OneTeacher[bool]] = False
    """Run the code that comes with the model named by --teacher (recorded in run.json)."""

    def part(self, kind: type[Part]) -> Part:
        """Return the settings of one part alone."""
        values = {name: getattr(self, name) for name in kind.model_fields}
        return kind.model_construct(self.model_fields_set & kind.model_fields.keys(), **values)

    @model_validator(mode="after")
    def _check_on_policy(self) -> Self:
        if self.bucket_lengths and (self.on_policy or self.order == "arrival"):
            raise ValueError(
                f"bucket_lengths={self.bucket_lengths} with on_policy={self.on_policy}, "
                f"order={self.order}: they need rows of one length, in their own order; drop one"
            )
        if not self.on_policy:
            return self
        if self.teacher is None:
            raise ValueError(
                f"on_policy={self.on_policy}: nobody judges the student's own words, which no "
                "cache holds; add --teacher DIR"
            )
        rows, nearest = self.on_policy * self.batch_size, max(1, self.own_rows)
        if abs(rows - nearest) > ALMOST_WHOLE:
            raise ValueError(
                f"on_policy={self.on_policy} of batch_size={self.batch_size} is {rows:g} rows, "
                f"expected a whole number; use --on-policy {nearest / self.batch_size:g} or "
                "another --batch-size"
            )
        wrong = [name for name in self.own_losses if name not in ON_OWN_WORDS]
        if wrong:
            raise ValueError(
                f"on_policy_loss={self.on_policy_loss!r} names {wrong[0]}, expected what compares "
                f"the student with a teacher beside; choose among {', '.join(ON_OWN_WORDS)}"
            )
        return self

    @model_validator(mode="after")
    def _check_shard(self) -> Self:
        if self.shard_latents and "weights" not in self.kinds:
            raise ValueError(
                f"shard_latents={self.shard_latents}: it divides latent weights, but "
                f"learn={self.learn} has none, and what is left is small; drop it or add weights"
            )
        if self.shard_latents and self.form == "layer" and self.on_policy:
            raise ValueError(
                f"form=layer, shard_latents={self.shard_latents}, on_policy={self.on_policy}: what "
                "each rank says on its own would wait for layers of the others; drop one of them"
            )
        if self.shard_latents and self.offload == "latents":
            raise ValueError(
                f"shard_latents={self.shard_latents}, offload={self.offload}: rows of latent "
                "weights stay on their devices; use --offload moments, or drop one of the two"
            )
        if self.shard_latents and self.optimizer != "adamw":
            raise ValueError(
                f"shard_latents={self.shard_latents}: moments of 8 bits are not divided; use "
                "--optimizer adamw (with --latent-dtype bf16 for six bytes a weight)"
            )
        return self

    @property
    def own_rows(self) -> int:
        """Rows of a micro-batch that hold the student's own text."""
        return round(self.on_policy * self.batch_size)

    @property
    def reads_cache(self) -> bool:
        """True if `losses` read the cache's targets.

        With a teacher the losses use its output instead. With `on_policy` the teacher is there for
        the student's own text, and the losses use its output only if they include `kl`, which needs
        all words.
        """
        return self.teacher is None or (self.on_policy > 0 and "kl" not in self.losses)

    def divided(self, world: int) -> Self:
        """Return each rank's settings: `grad_accum_steps` follows from the global batch.

        Raises:
            ConfigError: the global batch is not a multiple of the ranks' micro-batches.
        """
        if not self.global_batch_size:
            return self
        unit = world * self.batch_size
        if self.global_batch_size % unit:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} does not divide by {world} ranks x "
                f"batch_size={self.batch_size}; expected a multiple of {unit}: use --batch-size N "
                "or another number of ranks"
            )
        return self.model_copy(update={"grad_accum_steps": self.global_batch_size // unit})


def fixed_because(name: str) -> str | None:
    """Return why a run must be resumed with the same setting `name`; None if it may change."""
    marks = TrainConfig.model_fields[name].metadata
    return next(mark for mark in marks if isinstance(mark, OnResume)).fixed_because
