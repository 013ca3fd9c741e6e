"""Plain distillation of the same layers: ordinary weights, Hugging Face's model, fused AdamW."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.backend.base import DTYPES
from qat.backend.device import on
from qat.bench.baselines.textbook import ChunkedLoss
from qat.bench.config import MeasureConfig
from qat.data.packing import Batch
from qat.evaluate.divergence import to_targets
from qat.losses.targets import Targets
from qat.models.language_model import LanguageModel
from qat.models.regions import compile_facts
from qat.nn.step import quant_linears
from qat.nn.swap import decoder_layers
from qat.train.step import StepResult

HiddenLoss = Callable[[Tensor, Targets], Tensor]
Change = Callable[[PreTrainedModel], None]
"""Puts other modules into a model, or wraps those it has."""
MAX_GRAD_NORM = 1.0


class PlainStep:
    """A step of any Hugging Face model whose `learning` parameters train.

    `lr` gives the learning rate of each step; by default it is zero, and the model stands still.
    With `autocast` the matmuls compute in that dtype whatever the parameters are kept in.
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
        """Forward and backward of the mean loss: the number of valid tokens, and the sum."""
        is_packed = any(bool((batch.position_ids[:, 1:] == 0).any()) for batch in batches)
        device = self._learning[0].device
        batches = [batch.to(device) for batch in batches]
        valid = torch.stack([batch.mask.sum() for batch in batches]).sum()
        sums = []
        for batch in batches:
            positions = batch.position_ids if is_packed else None
            with self._mixed_precision(device):
                hidden = self._model.base_model(
                    input_ids=batch.input_ids, position_ids=positions, use_cache=False
                ).last_hidden_state
            hidden = hidden.flatten(0, 1).to(self._autocast or hidden.dtype)
            loss = self._loss(hidden, to_targets(batch))
            (loss / valid.clamp(min=1)).backward()
            sums.append(loss.detach())
        return valid, torch.stack(sums).sum()

    def _mixed_precision(self, device: torch.device) -> AbstractContextManager:
        return nullcontext() if self._autocast is None else on(device).autocast(self._autocast)

    def forget_gradients(self) -> None:
        """Drop the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def run_eagerly(self) -> None:
        """Let the layers, and a loss that the compiler helps, run as they are written."""
        self._is_compiled = False
        for layer in decoder_layers(self._model):
            vars(layer).pop("forward", None)
        if isinstance(self._loss, ChunkedLoss):
            self._loss.run_eagerly()

    def compile_facts(self) -> dict[str, object]:
        """As our own step tells them."""
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
    """Training of the linears called `names`, from the student's own weights, after `change`."""
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
    """The exact sum of losses behind the head of `model`, computed in `dtype`."""
    head = model.get_output_embeddings().weight.detach().to(dtype)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return ChunkedLoss(head, softcap, terms, temperature)


@torch.no_grad()
def dense_copy(student: LanguageModel, dtype: torch.dtype) -> PreTrainedModel:
    """The student as an ordinary model in `dtype` with transformers' own attention."""
    settings = deepcopy(student.model.config)
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with student.device:
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation="sdpa")
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
