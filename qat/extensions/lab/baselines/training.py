"""Plain distillation of the same layers: ordinary weights, Hugging Face's model, fused AdamW."""

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qat.backend.base import DTYPES, Backend
from qat.backend.device import on, select
from qat.convert.calibrate import TokenBatch
from qat.data.packing import Batch
from qat.data.pipeline import computed_ahead
from qat.data.reader import TeacherCache
from qat.data.sampler import sequence_indices
from qat.errors import ConfigError, TrainingError
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.lab.baselines.config import BaselineSettings
from qat.logs import progress
from qat.losses.config import parse_losses, targets_read
from qat.losses.formulas import NO_LABEL, Targets, to_targets
from qat.models.document_attention import use_packed_attention
from qat.models.language_model import LanguageModel, softcap_of
from qat.models.opening import auto_class
from qat.models.regions import compile_facts
from qat.nn.quant_linear import quant_linears
from qat.nn.sites import StackedLinear, experts_of, open_sites
from qat.nn.swap import body_of, decoder_layers, linear_names, replace_module
from qat.train.optim import lr_share
from qat.train.step import StepResult

# The losses as a competent user would write them: log-softmax over all logits, chunk by chunk.
#
# They are independent of `qat.losses` on purpose: equal numbers in a table then verify both.
# Shapes: T tokens, V vocabulary, K teacher tokens kept, D width.

CHUNK_TOKENS = 2048


def tail(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the KL over the teacher's K tokens and one bucket for all others, `(T,)`."""
    log_q = torch.log_softmax(logits, -1).gather(1, targets.topk_ids)
    others = torch.log1p(-log_q.exp().sum(1).clamp(max=1 - 1e-6))
    log_q = torch.log_softmax(torch.cat([log_q, others[:, None]], 1) / temperature, 1)
    log_p = torch.cat([targets.topk_logprobs, targets.tail_logprob[:, None]], 1)
    return _kl(log_p, log_q, temperature)


def candidates(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the KL over the teacher's K tokens alone, with both sides renormalised, `(T,)`."""
    chosen = logits.gather(1, targets.topk_ids)
    return _kl(targets.topk_logprobs, torch.log_softmax(chosen / temperature, 1), temperature)


def sampled(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the cross-entropy with tokens drawn from the teacher, `(T,)`."""
    log_q = torch.log_softmax(logits, -1).gather(1, targets.sample_ids)
    shares = targets.sample_counts / targets.sample_counts.sum(1, keepdim=True).clamp_min(1)
    return -(shares * log_q).sum(1)


def hard_ce(logits: Tensor, targets: Targets, temperature: float) -> Tensor:
    """Return the cross-entropy with the next token, `(T,)`."""
    return F.cross_entropy(logits, targets.labels, ignore_index=NO_LABEL, reduction="none")


LOSSES: dict[str, Callable[[Tensor, Targets, float], Tensor]] = {
    "tail": tail,
    "candidates": candidates,
    "sampled": sampled,
    "hard_ce": hard_ce,
}


def check_losses(terms: dict[str, float]) -> None:
    """Raise ConfigError for the first loss that is not implemented here."""
    for name in terms:
        if name not in LOSSES:
            raise ConfigError(
                f"loss={name}, but the baselines know {', '.join(LOSSES)} only; choose among them "
                "or leave the plain cases out of --only"
            )


class ChunkedLoss:
    """The weighted sum of losses over valid tokens, `CHUNK_TOKENS` rows of logits at a time.

    Each chunk is recomputed in backward, so that only one chunk of logits exists at a time.
    """

    def __init__(
        self, head: Tensor, softcap: float | None, terms: dict[str, float], temperature: float
    ) -> None:
        self._head = head
        self._softcap = softcap
        self._terms = terms
        self._temperature = temperature
        self._run: Callable[..., Tensor] = self._chunk

    def compile(self) -> None:
        """Compile the computation of a chunk, so that it is fused."""
        self._run = torch.compile(self._chunk)

    def run_eagerly(self) -> None:
        """Undo `compile`."""
        self._run = self._chunk

    def __call__(self, hidden: Tensor, targets: Targets) -> Tensor:
        """Map `(T, D)` hidden states to the sum in nats."""
        pieces = zip(
            hidden.split(CHUNK_TOKENS), *(t.split(CHUNK_TOKENS) for t in targets), strict=True
        )
        parts = [
            checkpoint(self._run, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in pieces
        ]
        return torch.stack(parts).sum()

    def _chunk(self, hidden: Tensor, *target_rows: Tensor) -> Tensor:
        targets = Targets(*target_rows)
        logits = F.linear(hidden, self._head).float()
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        losses = [
            weight * LOSSES[name](logits, targets, self._temperature)
            for name, weight in self._terms.items()
        ]
        return torch.where(targets.mask, sum(losses), 0.0).sum()


def _kl(log_p: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    log_p = torch.log_softmax(log_p / temperature, 1)
    return temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(1)


HiddenLoss = Callable[[Tensor, Targets], Tensor]
Change = Callable[[PreTrainedModel], None]  # replaces or wraps modules of a model
MAX_GRAD_NORM = 1.0


class PlainStep:
    """A training step of any Hugging Face model with the given `learning` parameters.

    `lr` gives the learning rate of each step; the default is zero, which leaves the model
    unchanged. With `autocast` matmuls compute in that dtype, whatever the dtype of the parameters.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learning: Sequence[nn.Parameter],
        loss: HiddenLoss,
        *,
        is_compiled: bool,
        is_checkpointed: bool,
        lr: Callable[[int], float] = lambda _step: 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._lr = lr
        self._autocast = autocast
        self._loss = loss
        self._learning = list(learning)
        self._before = compile_facts()
        self._is_compiled = is_compiled
        model.requires_grad_(False)
        for parameter in self._learning:
            parameter.requires_grad_(True)
        self._adamw = torch.optim.AdamW(self._learning, lr=0.0, weight_decay=0.0, fused=True)
        if is_checkpointed:
            name = "activation_checkpointing_enable"  # newer transformers call it so
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            model.train()
        if is_compiled:
            for layer in decoder_layers(model):
                layer.forward = torch.compile(layer.forward)

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take one optimizer step."""
        valid, sums = self.add_gradients(batches)
        norm = nn.utils.clip_grad_norm_(self._learning, MAX_GRAD_NORM)
        for group in self._adamw.param_groups:
            group["lr"] = self._lr(step)
        self._adamw.step()
        self.forget_gradients()
        positions = sum(batch.mask.numel() for batch in batches)
        return StepResult({"loss": sums}, norm, valid, positions)

    def add_gradients(self, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Run forward and backward of the mean loss; return the valid tokens and the sum."""
        is_packed = any(bool((batch.position_ids[:, 1:] == 0).any()) for batch in batches)
        device = self._learning[0].device
        batches = [batch.to(device) for batch in batches]
        valid = torch.stack([batch.mask.sum() for batch in batches]).sum()
        sums = []
        for batch in batches:
            positions = batch.position_ids if is_packed else None
            is_mixed = self._autocast is not None
            with on(device).autocast(self._autocast) if is_mixed else nullcontext():
                hidden = body_of(self._model)(
                    input_ids=batch.input_ids, position_ids=positions, use_cache=False
                ).last_hidden_state
            hidden = hidden.flatten(0, 1).to(self._autocast or hidden.dtype)
            loss = self._loss(hidden, to_targets(batch))
            (loss / valid.clamp(min=1)).backward()
            sums.append(loss.detach())
        return valid, torch.stack(sums).sum()

    def forget_gradients(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def run_eagerly(self) -> None:
        """Undo the compilation of the layers and of the loss."""
        self._is_compiled = False
        for layer in decoder_layers(self._model):
            vars(layer).pop("forward", None)
        if isinstance(self._loss, ChunkedLoss):
            self._loss.run_eagerly()

    def compile_facts(self) -> dict[str, object]:
        """Return compiler facts under the same keys as our own step."""
        found = compile_facts()
        return {
            "compiled": self._is_compiled,
            "graphs": found.graphs - self._before.graphs,
            "recompiles": found.recompiles - self._before.recompiles,
            "cuda_graph": False,
            "fallback": None,
        }

    def close(self) -> None:
        """Drop model and optimizer."""
        self._learning.clear()
        self._adamw.state.clear()
        self._adamw.param_groups.clear()
        self._model = self._loss = None


def plain_step(
    student: LanguageModel,
    names: Collection[str],
    config: MeasureConfig,
    *,
    is_compiled: bool,
    change: Change = lambda _model: None,
) -> PlainStep:
    """Return a step that trains the linears called `names` of the student after `change`."""
    model = dense_copy(student, DTYPES[config.dtype])
    change(model)
    loss = chunked_loss(model, config.losses, config.temperature, dtype=DTYPES[config.dtype])
    if is_compiled:
        loss.compile()
    return PlainStep(
        model,
        [model.get_submodule(name).weight for name in names],
        loss,
        is_compiled=is_compiled,
        is_checkpointed=config.gradient_checkpointing,
    )


def chunked_loss(
    model: PreTrainedModel, terms: dict[str, float], temperature: float, *, dtype: torch.dtype
) -> ChunkedLoss:
    """Return the exact sum of losses with the head of `model`, computed in `dtype`."""
    head = model.get_output_embeddings().weight.detach().to(dtype)
    return ChunkedLoss(head, softcap_of(model.config.get_text_config()), terms, temperature)


@torch.no_grad()
def dense_copy(student: LanguageModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copy the student to an ordinary model in `dtype` with PyTorch's own attention."""
    settings = deepcopy(student.model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    attention = "sdpa" if student.model._supports_sdpa else "eager"
    with student.device:
        model = auto_class(settings).from_config(
            settings, dtype=dtype, attn_implementation=attention
        )
        open_sites(model)
    # others keep `sdpa`: DeepSeek-V3.2 selects keys, and Falcon has a class, by that name alone
    use_packed_attention(model)
    linears = quant_linears(student.model)
    for name, linear in linears.items():
        plain = model.get_submodule(name)
        plain.weight.copy_(linear.quantized_weight())
        if linear.bias is not None:
            plain.bias.copy_(linear.bias)
    inside = {f"{name}.{part}" for name, m in linears.items() for part in m.state_dict()}
    rest = {k: v for k, v in student.model.state_dict().items() if k not in inside}
    own = model.state_dict()
    for name, tensor in rest.items():
        own[name].copy_(tensor)
    return model.eval()


# The result of a baseline: plain linears with the weights it would deploy, and their bits.
#
# Shapes: O out_features, I in_features.

FP16_BITS = 16


class Deployed(NamedTuple):
    """One quantized linear as it would be stored."""

    weight: Tensor  # the dequantized weight `(O, I)`
    stored_bits: int  # bits of codes, scales, zero points and codebook together


def put_plain(model: nn.Module, deployed: dict[str, Deployed]) -> float:
    """Put float linears with these weights into `model`; return their mean bits per weight."""
    for name, (weight, _) in deployed.items():
        bias = model.get_submodule(name).bias
        replace_module(model, name, _linear(weight, bias))
    for name, module in [*model.named_modules()]:
        if isinstance(module, SplitStack):
            replace_module(model, name, _linear(module.weight, None))
    bits = sum(part.stored_bits for part in deployed.values())
    return bits / sum(part.weight.numel() for part in deployed.values())


class SplitStack(nn.Module):
    """Replaces one linear that stacks all experts by a linear per expert.

    The methods do not support stacks: each sees one weight at a time, as published.
    """

    def __init__(self, stack: nn.Linear, experts: int) -> None:
        super().__init__()
        self.in_features = stack.in_features
        self.experts = nn.ModuleList(_linear(part, None) for part in stack.weight.chunk(experts))

    @property
    def weight(self) -> Tensor:
        """The stacked weight `(E * O, I)` of the linears, however a method changed them."""
        unit = torch.eye(self.in_features, device=next(self.parameters()).device)
        return torch.cat([linear(unit).T for linear in self.experts])


def split_stacks(model: nn.Module) -> None:
    """Give every expert its own linears, which `put_plain` merges again."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, StackedLinear):
            owner, _, key = name.rpartition(".")
            experts = experts_of(model.get_submodule(owner), key)
            replace_module(model, name, SplitStack(module, experts))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    O, I = weight.shape
    linear = nn.Linear(I, O, bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return linear.eval()


def check_groups(in_features: int, group_size: int) -> None:
    """Raise ConfigError if a group size does not divide the rows."""
    if in_features % group_size:
        raise ConfigError(
            f"group_size={group_size} does not divide rows of {in_features} weights; choose one "
            "that does"
        )


# Training of a baseline on a teacher cache: the same sequences, schedule and clock for all methods.

logger = logging.getLogger(__name__)

WARMUP_PASSES = 2
"""Forward and backward passes before the clock starts; compilation happens in the first."""


@dataclass(frozen=True)
class BaselineJob:
    """A float copy of the teacher to be quantized, with its data and settings.

    `settings` must have the method's defaults filled in.
    """

    model: PreTrainedModel  # the float32 model with transformers' own attention
    names: list[str]  # names of its linears, all of which are quantized
    cache: TeacherCache
    settings: BaselineSettings
    backend: Backend
    dtype: torch.dtype  # the compute dtype of matmuls
    calibration: Sequence[TokenBatch]

    @classmethod
    def of(
        cls,
        teacher: LanguageModel,
        cache: TeacherCache,
        settings: BaselineSettings,
        calibration: Sequence[TokenBatch] = (),
    ) -> "BaselineJob":
        """Create the job of making a student of `teacher` on the settings' device."""
        backend = select(settings.device)
        dtype = backend.dtype(settings.dtype)
        model = dense_copy(teacher, torch.float32).to(backend.device)
        split_stacks(model)
        return cls(
            model=model,
            names=linear_names(model),
            cache=cache,
            settings=settings,
            backend=backend,
            # fp16, which `auto` means on old GPUs, would need loss scaling
            dtype=torch.float32 if dtype == torch.float16 else dtype,
            calibration=calibration,
        )

    def batch(self, step: int) -> Batch:
        """Return the sequences of a step in pinned host memory, the same as in `qat train`."""
        settings, total = self.settings, self.cache.num_sequences("train")
        indices = sequence_indices(settings.seed, step, settings.batch_size, total)
        # the reference reads the top K, whatever `loss` says
        targets = {"topk"} | targets_read(parse_losses(settings.loss))
        return Batch(*map(self.backend.pinned, self.cache.batch(indices, targets=targets)))

    def step(
        self,
        learning: Sequence[nn.Parameter],
        loss: HiddenLoss,
        *,
        steps: int,
        is_compiled: bool = True,
        is_checkpointed: bool = False,
    ) -> PlainStep:
        """Return a step that trains `learning` in a run of `steps`, compiled if the backend can."""
        settings = self.settings
        share = partial(
            lr_share,
            schedule="cosine",
            warmup_steps=settings.warmup_steps,
            min_ratio=settings.min_lr_ratio,
        )
        return PlainStep(
            self.model,
            learning,
            loss,
            is_compiled=is_compiled and self.backend.compiles,
            is_checkpointed=is_checkpointed,
            lr=lambda step: settings.lr * share(step, steps),
            autocast=self.dtype,
        )

    def kd_loss(self) -> ChunkedLoss:
        """Return the settings' distillation loss at temperature 1.

        Raises:
            ConfigError: the baselines do not implement it.
        """
        terms = parse_losses(self.settings.loss)
        check_losses(terms)
        loss = chunked_loss(self.model, terms, 1.0, dtype=self.dtype)
        if self.backend.compiles:
            loss.compile()
        return loss


class TrainingCost(NamedTuple):
    """The accumulated cost of training."""

    steps: int = 0
    seconds: float = 0.0
    peak_gib: float = 0.0


class PreparedTraining(NamedTuple):
    """A prepared training run: its step, and what follows after the last one."""

    step: PlainStep
    deploy: Callable[[], dict[str, Deployed]]
    """Returns the quantized linears by name after training."""
    steps: int  # steps still to take
    before: TrainingCost = TrainingCost()  # the cost of earlier stages
    finish: Change = lambda _model: None
    """Adds the rounding of inputs or caches to the final model with the deployed weights."""


def distil(training: PreparedTraining, job: BaselineJob) -> TrainingCost:
    """Run the steps of a training; return the cost including `training.before`.

    Raises:
        TrainingError: the final loss is not finite.
    """
    before, backend = training.before, job.backend
    warm_up(training.step, job)
    backend.reset_peak_memory()
    began = time.perf_counter()
    with progress("training a baseline", training.steps, "steps") as ticker:
        numbers = range(before.steps, before.steps + training.steps)
        with closing(computed_ahead(job.batch, numbers, backend.batches_ahead)) as stream:
            for step, batch in enumerate(stream):
                result = training.step([batch], step)
                ticker.advance()
    backend.synchronize()
    seconds = before.seconds + time.perf_counter() - began
    loss = result.sums["loss"].item() / max(int(result.valid_tokens), 1)
    if not math.isfinite(loss):
        raise TrainingError(
            f"the baseline's loss is {loss} after {training.steps} steps, expected a number; lower "
            f"lr={job.settings.lr}"
        )
    peak_gib = max(before.peak_gib, backend.memory_use().peak_gib or 0.0)
    return TrainingCost(before.steps + training.steps, seconds, peak_gib)


def warm_up(step: PlainStep, job: BaselineJob) -> None:
    """Warm up compiler and allocator without changing the student."""

    def run() -> None:
        for number in range(WARMUP_PASSES):
            step.add_gradients([job.batch(number)])
            step.forget_gradients()

    run_or_uncompile(run, step.run_eagerly)
    job.backend.synchronize()


def run_or_uncompile(run: Callable[[], None], uncompile: Callable[[], None]) -> None:
    """Call `run`; if the compiler fails, call `uncompile` and run again."""
    try:
        run()
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        logger.warning("the baseline cannot be compiled (%s): it runs eagerly", reason)
        uncompile()
        run()
