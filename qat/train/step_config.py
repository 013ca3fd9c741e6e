"""Settings of an optimizer step, and of the optimizer: the parts of `qat train` that steps read."""

from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, model_validator

from qat.config import DeviceSettings, Free, Learns, Loss, OnResume, Rates, Speed, Steps
from qat.losses.config import parse_losses

T = TypeVar("T")
# Reasons why a resumed run must keep a setting; each setting names one of them, or is `Free`.
Moments = Annotated[T, OnResume("what learns has its moments, which would fit nothing else")]
OneCourse = Annotated[T, OnResume("a run has one course of rates")]
Comparable = Annotated[T, OnResume("the losses before and after would not compare")]
OneOrder = Annotated[T, OnResume("it decides which sequences a step sees")]

KINDS = ("weights", "scales", "codebook", "lora", "norms", "gates", "router")
"""Kinds of parameter that may learn; each has its own learning rate."""

Scope = Literal["mlp", "attention", "e2e"]

MOST_WARM_UP, WARM_UP_PART = 50, 10
"""Most default steps of warm-up; the divisor of max_steps that gives fewer in a short run."""


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


class OptimConfig(StepConfig):
    """Settings of the optimizer: those of its steps, their number, and the learning rates.

    Learning rates are relative: an AdamW step moves a tensor by about its learning rate times the
    root mean square that it started with, so one value serves models of any size. Latent weights
    of more than 2 bits move less: half as far with each bit.
    """

    max_steps: Steps[Free[int]] = Field(1000, gt=0)
    """Optimizer steps."""
    lr: Rates[OneCourse[float]] = Field(1e-2, ge=0)
    """Peak learning rate of latent weights of up to 2 bits; each further bit of their mean halves
    it."""
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


def rate_of(kind: str) -> str:
    """Return the name of the setting of a kind's learning rate."""
    return "lr" if kind == "weights" else f"lr_{kind}"
