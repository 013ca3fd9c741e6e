"""Prepared models: their forward, for any loop, and the way back to a packed model.

    student = qat.prepare(model, "q2a4", calibration=texts)
    optimizer = qat.AdamW(qat.param_groups(student))
    for batch in batches:
        out = student(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
        qat.loss(out, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    qat.save(qat.finish(student), "students/mine")

What learns are parameters of the model, with gradients by autograd: wrappers and compilers see
nothing unusual. Called as any model of transformers it returns what that returns; with
`with_logits=False` hidden states and a head, of which `qat.loss` makes losses without all logits.

Shapes: B sequences, S positions, D model width, V words.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qat import python
from qat.backend import device as backends
from qat.errors import ConfigError
from qat.extensions.integrations.modules import join, put_in_loop
from qat.extensions.integrations.operator import Made, Numbers, formed, parts_of, whole_pulled_back
from qat.kernels.head import Head
from qat.models.language_model import LanguageModel
from qat.models.precision import compute_in
from qat.nn.lut_embedding import (
    TableHead,
)
from qat.train.adamw import BETA1, EPS
from qat.train.learnable import learnable, weights_in_scope
from qat.train.start import check_dtype, make_trainable
from qat.train.step import has_documents
from qat.train.step_config import OptimConfig

WHAT_LEARNS = ("learn", "mlp_only", "attention_only", "e2e", "lora_rank", "dtype", "seed")
"""Flags of 'qat train' that `prepare` takes."""


class StudentOutput(NamedTuple):
    """The hidden states and the head, from which losses are computed without all logits."""

    hidden: Tensor
    """`(B, S, D)`: the last hidden states, as the head reads them."""
    head: Head
    """The output embedding."""


@dataclass
class Prepared:
    """The settings and facts of a prepared model that are not parameters."""

    language: LanguageModel
    dtype: torch.dtype
    """The dtype that forward computes in."""
    kinds: dict[str, str]
    """Kind of each parameter that learns, by its name."""
    sizes: dict[str, float]
    """Natural size of each of them, by which its learning rate is multiplied."""
    end_precision: Callable[[], None]
    """Stops casting the residual stream."""


class LoopModel(PreTrainedModel):
    """A model in a user's own loop; `in_loop` makes a model one by changing its class."""

    own_class: ClassVar[type[PreTrainedModel]]
    """The class that the model had before."""
    prepared: Prepared

    def read(self, input_ids: Tensor, position_ids: Tensor | None = None) -> StudentOutput:
        """Return hidden states of packed rows, and the head.

        Args:
            input_ids: token ids, `(B, S)`.
            position_ids: positions, `(B, S)`; where they restart another document begins. By
                default each row is one.
        """
        if position_ids is None:
            row = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = row.expand_as(input_ids)
        language, dtype = self.prepared.language, self.prepared.dtype
        is_packed = has_documents(position_ids)
        with autocast(language.device, dtype):
            hidden = language.hidden(input_ids, position_ids, is_packed=is_packed)
        # last of all: a compiler would compile what follows a break, for each step's head anew
        return _with_head(language, hidden.to(dtype), dtype)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return autocast in `dtype`; in float32 that of the caller stays."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)


def in_loop(model: PreTrainedModel, prepared: Prepared) -> PreTrainedModel:
    """Give `model` the forward of a prepared one."""
    put_in_loop(model)
    vars(model).pop("is_quantized", None)  # what learns is not packed, which trainers would refuse
    model.__class__ = _loop_class(type(model))
    model.prepared = prepared
    return model


@cache
def _loop_class(own: Any) -> type[LoopModel]:
    @wraps(own.forward)
    def forward(
        self: LoopModel,
        input_ids: Tensor | None = None,
        *args: Any,
        with_logits: bool = True,
        **named: Any,
    ) -> Any:
        if not with_logits:
            given = {name: value for name, value in named.items() if value is not None}
            return self.read(input_ids, **given)  # peft names every parameter
        # a cache, which transformers makes unasked, hides from it where documents begin
        named.setdefault("use_cache", False)
        with autocast(self.prepared.language.device, self.prepared.dtype):
            return own.forward(self, input_ids, *args, **named)

    members = {"__doc__": own.__doc__, "__module__": own.__module__, "own_class": own}
    return type(own.__name__, (LoopModel, own), {**members, "forward": forward})


@torch.compiler.disable
def _with_head(language: LanguageModel, hidden: Tensor, dtype: torch.dtype) -> StudentOutput:
    """Return the head in `dtype`, over `language.num_words`, with the hidden states that it reads.

    The gradient of a table that learns is pulled back in float32, as a run does: the loss leaves it
    in a list, from which the backward of `hidden` takes it. Autograd would round it to `dtype`.
    """
    head: Any = language.head
    table = head.table if isinstance(head, TableHead) else head
    if hasattr(table, "unshard"):  # fully_shard divides it alone, and its forward is not called
        table.unshard()
    take = None
    if not isinstance(head, TableHead):
        W = head.weight.to(dtype)
    elif not (table.learns() and torch.is_grad_enabled()):
        W = formed(table, dtype)
    else:
        with torch.no_grad():
            W = formed(table, dtype)
        left, parts = [], parts_of(table)
        known = Numbers.of(table), [*parts]
        hidden = _TakesTableGradient.apply(hidden, left, known, *parts.values())
        W.requires_grad_()
        take = left.append
    whole = Head(W, head.bias, language.softcap, take)
    return StudentOutput(hidden, whole.words(0, language.num_words))


class _TakesTableGradient(torch.autograd.Function):
    """Returns hidden states; backward pulls back the gradient that the loss left of the table."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        left: list[Tensor],
        known: tuple[Numbers, list[str]],
        *parts: Tensor,
    ) -> Tensor:
        ctx.left, (ctx.numbers, ctx.names) = left, known
        ctx.save_for_backward(*parts)
        return hidden.clone()  # FSDP2 warns of views

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:
        parts = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        needed = zip(ctx.names, ctx.needs_input_grad[3:], strict=True)
        wanted = [name for name, is_needed in needed if is_needed]
        found: dict[str, Tensor] = {}
        while ctx.left:  # one for each loss of these hidden states
            dW = ctx.left.pop(0)
            made, rest = Made.of(parts, ctx.numbers), [name for name in wanted if name != "weight"]
            gradients = whole_pulled_back(made, dW, rest, ctx.numbers)
            if "weight" in wanted:
                gradients["weight"] = dW
            found = {name: found.get(name, 0) + each for name, each in gradients.items()}
        return d_hidden, None, None, *(found.get(name) for name in ctx.names)


def prepare(
    model: PreTrainedModel,
    to: str | None = "q2a4",
    **settings: Any,
) -> PreTrainedModel:
    """Quantize `model` in place, make its weights trainable, and return it for a loop of your own.

        student = qat.prepare(model, "q2a4", calibration=texts, tokenizer=tokenizer)

    Args:
        model: a causal language model, float or quantized; in float32 afterwards.
        to: format as in `qat.quantize`; None leaves the codes of a quantized model as they are.
        settings: what learns and in which dtype, by the flags of 'qat train': `learn`, `mlp_only`,
            `attention_only`, `lora_rank`, `dtype`, `seed`. All others are those of `qat.quantize`,
            such as `calibration` and `tokenizer`.

    Raises:
        ConfigError: a setting is wrong, does not fit the model, or nothing is quantized.
        CacheError, DataError: see `qat.quantize`.
    """
    if isinstance(model, LoopModel):
        raise ConfigError(
            f"the {type(model).__name__} is prepared already, expected a float or packed model; go "
            "on with it, or finish it first with qat.finish"
        )
    training = {name: settings.pop(name) for name in WHAT_LEARNS if name in settings}
    values = {**training, "device": str(model.device)}
    config = check_dtype(OptimConfig.parse(values, "qat.prepare"))
    if to is not None or settings:
        python.quantize(model, to, **settings)
    nn.Module.float(model)
    language, backend = LanguageModel(model), backends.select(config.device)
    states = {name: each.get_state() for name, each in backend.generators().items()}
    optimizer = make_trainable(model, config)
    for name, generator in backend.generators().items():  # a run seeds them; a loop is its own
        generator.set_state(states[name])
    names = weights_in_scope(model, config.scope, config.kinds)
    by_kind = learnable(model, names, config.kinds)
    dtype = backend.dtype(config.dtype)
    prepared = Prepared(
        language,
        dtype,
        kinds={name: kind for kind, each in by_kind.items() for name in each},
        sizes=optimizer.sizes,
        end_precision=compute_in(model, dtype),
    )
    in_loop(model.train(), prepared)
    if backend.compiles:  # the device where 'qat train' joins them too
        join(model)
    return model


def has_adapter(student: nn.Module) -> bool:
    """Return whether peft put an adapter on the model (`qat.integrations.peft.prepare_lora`)."""
    return hasattr(student, "peft_config") and hasattr(student, "get_base_model")


def unwrapped(student: nn.Module) -> LoopModel:
    """Return the prepared model in `student`, which DDP, `torch.compile` or peft may have wrapped.

    Raises:
        ConfigError: there is none.
    """
    model: Any = student
    while not isinstance(model, LoopModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if has_adapter(model):
            inner = model.get_base_model()
        if not isinstance(inner, nn.Module):
            raise ConfigError(
                f"{type(model).__name__} is not a prepared student, expected what qat.prepare "
                "returned, or a wrapper of it; call qat.prepare(model) first"
            )
        model = inner
    return model


def param_groups(student: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    """Return what learns as groups for `qat.AdamW`, with the rates that 'qat train' has.

        optimizer = qat.AdamW(qat.param_groups(student, lr=5e-3))

    A learning rate is relative: it is multiplied by the size that the tensor had when it was
    prepared. So nearly every tensor is a group of its own, for which `torch.optim.AdamW` launches
    a kernel each on a GPU. Call it after `fully_shard`, which exchanges parameters.

    Args:
        student: a prepared model, wrapped or not.
        settings: `lr`, `lr_scales`, `lr_codebook`, ..., `beta2` and `weight_decay` of 'qat train'.

    Raises:
        ConfigError: a setting is wrong, or the model is not prepared.
    """
    config = OptimConfig.parse(settings, "qat.param_groups")
    model = unwrapped(student)
    parameters, groups = dict(model.named_parameters()), {}
    # without it each group would take about ten kernels, that pass over its tensors one by one
    kernel = {"fused": True} if model.prepared.language.device.type == "cuda" else {}
    for name, kind in model.prepared.kinds.items():
        size = model.prepared.sizes[name]
        # AdamW multiplies the decay by the learning rate, which includes the size here
        decay = config.weight_decay / size if kind == "weights" else 0.0
        groups.setdefault((config.rates[kind] * size, decay), []).append(parameters[name])
    return [
        {
            "params": each,
            "lr": lr,
            "weight_decay": decay,
            "betas": (BETA1, config.beta2),
            "eps": EPS,
            **kernel,
        }
        for (lr, decay), each in groups.items()
    ]


def as_teacher(model: PreTrainedModel, *, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Return `model`, which learns nothing, with the forward of a prepared student.

    `with_logits=False` then gives what `qat.loss(..., teacher=)` compares without all logits.

    Args:
        model: a causal language model, float or quantized; changed in place.
        dtype: dtype that forward computes in: auto, fp32, bf16, fp16, or one of torch.

    Raises:
        ConfigError: there is no such dtype.
    """
    if isinstance(model, LoopModel):
        return model
    if isinstance(dtype, str):
        known = OptimConfig.parse({"dtype": dtype}, "qat.as_teacher")
        dtype = backends.select(str(model.device)).dtype(known.dtype)
    model.eval().requires_grad_(False)
    language = LanguageModel(model)
    return in_loop(model, Prepared(language, dtype, {}, {}, compute_in(model, dtype)))
