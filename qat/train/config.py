"""Settings of `qat train`."""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from qat.config import (
    Careful,
    DeviceSettings,
    Free,
    Learns,
    Loss,
    OnResume,
    Rates,
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

T = TypeVar("T")
Part = TypeVar("Part", bound=Settings)
# Reasons why a resumed run must keep a setting; each setting names one of them, or is `Free`.
Moments = Annotated[T, OnResume("what learns has its moments, which would fit nothing else")]
OneCourse = Annotated[T, OnResume("a run has one course of rates")]
Comparable = Annotated[T, OnResume("the losses before and after would not compare")]
OneJudge = Annotated[
    T, OnResume("the best student is told by the same sequences from the first to the last")
]
OneOrder = Annotated[T, OnResume("it decides which sequences a step sees")]
OneTeacher = Annotated[T, OnResume("it belongs to the teacher, which stays the same")]

KINDS = ("weights", "scales", "codebook", "lora", "norms", "gates", "router")
"""Kinds of parameter that may learn; each has its own learning rate."""

Scope = Literal["mlp", "attention", "e2e"]

MOST_WARM_UP, WARM_UP_PART = 50, 10
"""Most default steps of warm-up; the divisor of max_steps that gives fewer in a short run."""
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


class StepConfig(DeviceSettings):
    """Settings of one optimizer step: what learns, from which loss, in which shape and dtype."""

    mlp_only: Learns[Moments[bool]] = False
    """Train the quantized linears of the MLPs only."""
    attention_only: Learns[Moments[bool]] = False
    """Train the quantized linears of the attention only."""
    e2e: Learns[Moments[bool]] = False
    """Train all quantized linears (the default)."""
    learn: Learns[Moments[str]] = "weights,scales,codebook"
    """Kinds of parameter that learn, joined by commas: weights, scales, codebook, lora, norms,
    gates, router (lora is for fixed codes, so not with weights; gates are those of sparse
    attention; router is the choice among experts)."""
    lora_rank: Learns[Moments[int]] = Field(16, gt=0)
    """Rank of the adapters that learn=lora adds; adapters that the student has already are kept."""
    loss: Loss[Comparable[str]] = "tail"
    """tail, sampled, candidates, reverse_kl, jsd, cakld, hard_ce, or a sum: tail:1,hard_ce:0.1;
    with --teacher: kl, reverse_kl, jsd, cakld, hard_ce."""
    temperature: Loss[Comparable[float]] = Field(1.0, gt=0)
    """Softmax temperature of the divergences (the reference's candidates loss uses 2)."""
    batch_size: Steps[Free[int]] = Field(64, gt=0)
    """Sequences in one forward (the micro-batch); larger steps end closer to the teacher."""
    grad_accum_steps: Steps[Free[int]] = Field(1, gt=0)
    """Micro-batches per optimizer step."""
    optimizer: Speed[Moments[Literal["adamw", "adamw8bit"]]] = "adamw"
    """Optimizer of the latent weights; adamw8bit keeps their moments in 8 bits (needs torchao)."""
    latent_dtype: Speed[Moments[Literal["fp32", "bf16"]]] = "fp32"
    """Dtype of the latent weights; bf16 rounds each step stochastically, at half the memory."""
    offload: Speed[Free[Literal["none", "moments", "latents"]]] = "none"
    """Parts of bf16 latent weights to keep in pinned host memory: their moments, or with latents
    the weights as well. They are copied to the device one tensor ahead of the optimizer, and back
    after."""
    gradient_checkpointing: Speed[Free[bool]] = False
    """Recompute layers in backward instead of keeping their activations."""
    checkpoint_every: Speed[Free[int]] = Field(1, gt=0)
    """With gradient checkpointing: recompute every n-th layer."""
    form: Speed[Free[Literal["auto", "whole", "layer"]]] = "auto"
    """Form all weights once a step, or those of a layer when it runs and again in backward, in
    memory shared by all layers: the same results. auto forms by layer if all would not fit."""
    compile: Speed[Free[Literal["auto", "on", "off"]]] = "auto"
    """Compile the decoder layers; auto does so on a GPU."""
    dtype: Speed[Comparable[Literal["auto", "fp32", "tf32", "bf16", "fp16"]]] = "auto"
    """Compute dtype; auto is bf16, or fp16 on a GPU without bf16, or fp32 on a CPU."""
    seed: Steps[OneOrder[int]] = Field(0, ge=0)
    """Seed of the order of the data and of sampling."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mlp_only + self.attention_only + self.e2e > 1:
            raise ValueError("mlp_only, attention_only and e2e exclude each other; give one")
        unknown = set(self.kinds) - set(KINDS)
        if unknown or not self.learn:
            raise ValueError(f"learn={self.learn!r}: choose among {', '.join(KINDS)}")
        if {"weights", "lora"} <= set(self.kinds):
            raise ValueError(
                f"learn={self.learn!r}: lora is for frozen codes, which weights would move; drop "
                "one of the two"
            )
        is_plain = self.optimizer == "adamw" and self.latent_dtype == "fp32"
        if "weights" not in self.kinds and not is_plain:
            raise ValueError(
                f"optimizer={self.optimizer}, latent_dtype={self.latent_dtype}: these are for "
                f"latent weights, but learn={self.learn} has none; add weights or drop them"
            )
        is_stochastic = self.optimizer == "adamw" and self.latent_dtype == "bf16"
        if self.offload != "none" and not is_stochastic:
            raise ValueError(
                f"offload={self.offload} with optimizer={self.optimizer}, "
                f"latent_dtype={self.latent_dtype}: only bf16 latent weights and their bf16 "
                "moments can lie on the host; use --optimizer adamw --latent-dtype bf16, or drop it"
            )
        return self

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parameter that learn."""
        return tuple(self.learn.split(","))

    @property
    def scope(self) -> Scope:
        """The part of the model whose quantized linears learn."""
        return "mlp" if self.mlp_only else "attention" if self.attention_only else "e2e"

    @property
    def losses(self) -> dict[str, float]:
        """Weight of each loss by name."""
        return parse_losses(self.loss)

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step of one rank."""
        return self.batch_size * self.grad_accum_steps


class DataConfig(Settings):
    """Settings of what the student learns from: a cache, and a teacher that may run as well."""

    cache_dir: Required[Free[Location]]
    """Teacher cache to learn from (see qat cache): a directory, or s3://... and the like."""
    order: Steps[OneOrder[Literal["shuffled", "arrival"]]] = "shuffled"
    """Order of the sequences; arrival is for a cache that 'qat cache' may still be writing: the
    first pass goes through its shards as they come."""
    bucket_lengths: Steps[OneOrder[str]] = Field("", pattern=r"^(auto|\d+(,\d+)*)?$")
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


class OptimConfig(StepConfig):
    """Settings of the optimizer: those of its steps, their number, and the learning rates.

    Learning rates are relative: an AdamW step moves a tensor by about its learning rate times the
    root mean square that it started with, so one value serves models of any size.
    """

    max_steps: Steps[Free[int]] = Field(1000, gt=0)
    """Optimizer steps."""
    lr: Rates[OneCourse[float]] = Field(1e-2, ge=0)
    """Peak learning rate of the latent weights."""
    lr_scales: Rates[OneCourse[float]] = Field(1e-3, ge=0)
    """Peak learning rate of the scales."""
    lr_codebook: Rates[OneCourse[float]] = Field(1e-3, ge=0)
    """Peak learning rate of the codebooks."""
    lr_lora: Rates[OneCourse[float]] = Field(1e-2, ge=0)
    """Peak learning rate of the adapters, relative to an adapter as large as its weight."""
    lr_norms: Rates[OneCourse[float]] = Field(1e-3, ge=0)
    """Peak learning rate of the normalisation weights."""
    lr_gates: Rates[OneCourse[float]] = Field(3e-3, ge=0)
    """Peak learning rate of sparse attention's gates and pooling weights."""
    lr_router: Rates[OneCourse[float]] = Field(1e-3, ge=0)
    """Peak learning rate of the routers, which choose among experts."""
    schedule: Rates[OneCourse[Literal["cosine", "constant", "wsd"]]] = "cosine"
    """Shape of the learning rates after the warm-up; wsd decays over the last fifth."""
    warmup_steps: Rates[OneCourse[int]] = Field(
        default_factory=lambda known: min(MOST_WARM_UP, known["max_steps"] // WARM_UP_PART), ge=0
    )
    """Steps of linear warm-up; by default a tenth of max_steps, at most 50."""
    min_lr_ratio: Rates[OneCourse[float]] = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    weight_decay: Rates[OneCourse[float]] = Field(0.0, ge=0)
    """Decay of the latent weights; quantizer parameters and norms never decay."""
    beta2: Rates[OneCourse[float]] = Field(0.95, gt=0, lt=1)
    """AdamW's beta2, the decay of its mean of squared gradients."""
    clip_grad_norm: Rates[OneCourse[float]] = Field(1.0, gt=0)
    """Largest gradient norm; larger gradients are scaled down to it."""

    @property
    def rates(self) -> dict[str, float]:
        """Peak learning rate of each kind of parameter."""
        return {kind: getattr(self, rate_of(kind)) for kind in KINDS}


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


def rate_of(kind: str) -> str:
    """Return the name of the setting of a kind's learning rate."""
    return "lr" if kind == "weights" else f"lr_{kind}"


def fixed_because(name: str) -> str | None:
    """Return why a run must be resumed with the same setting `name`; None if it may change."""
    marks = TrainConfig.model_fields[name].metadata
    return next(mark for mark in marks if isinstance(mark, OnResume)).fixed_because
