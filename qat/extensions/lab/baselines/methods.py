"""The methods that our recipes are compared with, each from a teacher to an evaluable student."""

import math
import re
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import Signature, signature
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from qat.convert.calibrate import StackInputs, TokenBatch, stages_in_order
from qat.data.reader import TeacherCache
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, ConfigError, how_to_install
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.measure import compile_anew, time_steps
from qat.extensions.lab.baselines.config import METHODS, PTQ, BaselineSettings
from qat.extensions.lab.baselines.reference import reference_training
from qat.extensions.lab.baselines.training import (
    FP16_BITS,
    BaselineJob,
    Deployed,
    PlainStep,
    PreparedTraining,
    SplitStack,
    check_groups,
    dense_copy,
    distil,
    plain_step,
    put_plain,
    warm_up,
)
from qat.extensions.lab.baselines.uniform import (
    efficientqat_training,
    gptq,
    round_to_nearest,
    uniform_bits,
)
from qat.models.language_model import LanguageModel
from qat.nn.swap import CACHE, decoder_layers

# torchao's own quantization-aware training: int2 or int4 weights in groups, straight-through.

GROUP_SIZE = 32  # group size in the speed benchmark


def is_installed() -> bool:
    """Return whether torchao can be imported."""
    return find_spec("torchao") is not None


def torchao_step(
    student: LanguageModel, names: Collection[str], config: MeasureConfig, *, is_compiled: bool
) -> PlainStep:
    """Return a step that trains the linears called `names` with int2 fake-quantized weights."""
    return plain_step(
        student,
        names,
        config,
        is_compiled=is_compiled,
        change=lambda model: fake_quantize(model, dict.fromkeys(names, 2), GROUP_SIZE),
    )


def fake_quantize(model: PreTrainedModel, bits: dict[str, int], group_size: int) -> None:
    """Fake-quantize the linears in `bits` to symmetric integers with that number of bits."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    for kind in sorted(set(bits.values())):
        dtype = {2: torch.int2, 4: torch.int4}[kind]
        weights = IntxFakeQuantizeConfig(dtype, group_size=group_size, is_symmetric=True)
        quantize_(
            model,
            QATConfig(weight_config=weights, step="prepare"),
            filter_fn=lambda _module, name, kind=kind: bits.get(name) == kind,
        )


def torchao_training(job: BaselineJob) -> PreparedTraining:
    """Prepare training of the weights of all linears through torchao's fake quantizers.

    Raises:
        ConfigError: torchao is not installed.
    """
    if not is_installed():
        raise ConfigError(
            "method=torchao_int2, but torchao is not installed; leave the method out, or: "
            f"{how_to_install('adam8bit')}"
        )
    settings = job.settings
    bits = {name: settings.bits_of(name) for name in job.names}
    fake_quantize(job.model, bits, settings.group_size)
    step = job.step(
        [job.model.get_submodule(name).weight for name in job.names],
        job.kd_loss(),
        steps=settings.max_steps,
    )
    return PreparedTraining(step, lambda: _deployed(job.model, bits, settings), settings.max_steps)


@torch.no_grad()
def _deployed(
    model: PreTrainedModel, bits: dict[str, int], settings: BaselineSettings
) -> dict[str, Deployed]:
    """Return the fake-quantized weights; the size includes a 16-bit scale per group."""
    found = {}
    for name, kind in bits.items():
        linear: nn.Linear = model.get_submodule(name)
        weight = linear.weight_fake_quantizer(linear.weight)
        groups = weight.numel() // settings.group_size
        found[name] = Deployed(weight, weight.numel() * kind + FP16_BITS * groups)
    return found


# EdgeRazor's own training (arXiv:2605.04062): rows of 4 bits and ternary rows, straight-through.
#
# Optionally the inputs of linears and the cached keys and values are rounded to 8 bits: codes of
# -127 ... 127 times a scale of max |x| / 127 per token.

ROW_WISE = "weight_quant_uniform_symmetric_clip_per_block_mp_int1_58_int4_static_row_wise_sparse"
"""The weight quantizer of its recipes of "2.79 bits" and "1.88 bits"."""
INPUTS = "state_quant_uniform_symmetric_absmax_per_block_int8"
"""The input quantizer of its recipes, in blocks of the same size as the weights' groups."""
HEADS = "state_quant_uniform_symmetric_absmax_per_token_int8"
"""The quantizer of a token's head: as `INPUTS` with the head's width as block size, as in its
recipes for Qwen3 and MobileLLM."""


def edgerazor_training(job: BaselineJob) -> PreparedTraining:
    """Prepare training of the weights of all linears through EdgeRazor's quantizers.

    Raises:
        ConfigError: EdgeRazor is not installed, a group does not divide a row, or the model
            computes inputs, keys or values where EdgeRazor cannot round them.
    """
    try:
        from edgerazor.log import set_component_level
        from edgerazor.qat import QAT, QuantizedKVState
    except ImportError:
        raise ConfigError(
            "method=edgerazor, but edgerazor is not installed; leave the method out, or: "
            f"{how_to_install('edgerazor')}"
        ) from None

    class Rounded(QuantizedKVState):
        def update(self, *heads: object, **_more: object) -> tuple[Tensor, Tensor]:
            """Drop keyword arguments, which transformers 5.24 passes and edgerazor rejects."""
            return super().update(*heads)

    settings, size = job.settings, job.settings.group_size
    for name in job.names:
        check_groups(job.model.get_submodule(name).in_features, size)
    if settings.activations and any(isinstance(m, SplitStack) for m in job.model.modules()):
        raise ConfigError(
            f"activations={settings.activations}, but {type(job.model).__name__} multiplies with "
            "its experts itself, expected linears, whose inputs EdgeRazor rounds; leave "
            "activations out"
        )
    function = {
        "weight_function": ROW_WISE,
        "w_block_size": size,
        "w_mixed_precision_prop": settings.int4_share,
        "activation_function": INPUTS if settings.activations else "",
        "a_block_size": size,
        "kv_cache_function": HEADS if settings.kv else "",
    }
    select = {"target_names": [re.escape(name) for name in job.names]}
    set_component_level("QAT", "ERROR")  # it logs each of its steps

    def apply(model: PreTrainedModel, *, is_w_quantized: bool) -> None:
        own = QAT({"function": function | {"is_w_quantized": is_w_quantized}, "select": select})
        own.quantize(model)
        if settings.kv:
            rounding = {
                "quant_fn": own.config.function.kv_cache_function,
                "kv_kwargs": {"epsilon": own.config.function.epsilon},
            }
            wrap_caches(model, lambda cache: Rounded(cache, **rounding))

    apply(job.model, is_w_quantized=False)
    linears = {name: job.model.get_submodule(name) for name in job.names}
    for linear in linears.values():
        linear.train()  # only in training mode it passes gradients straight through
    step = job.step(
        [linear.weight for linear in linears.values()], job.kd_loss(), steps=settings.max_steps
    )

    @torch.no_grad()
    def deploy() -> dict[str, Deployed]:
        every = int(1 / settings.int4_share)
        found = {}
        for name, linear in linears.items():
            O, I = linear.weight.shape
            wide = -(-O // every)
            codes = I * (4 * wide + math.log2(3) * (O - wide))
            scales = FP16_BITS * O * I // size
            found[name] = Deployed(linear._weight_quant(), math.ceil(codes) + scales)
        return found

    return PreparedTraining(
        step, deploy, settings.max_steps, finish=lambda model: apply(model, is_w_quantized=True)
    )


class NothingKept(Cache):
    """A stand-in for a cache that returns the given keys and values, as if nothing came before."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key: Tensor, value: Tensor, *_rest: object, **_more: object
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer unchanged."""
        return key, value


def wrap_caches(model: PreTrainedModel, wrap: Callable[[object], object]) -> None:
    """Make each layer use `wrap` of the cache that it is given, or of `NothingKept` without one.

    A cache passed to the whole model instead would make transformers treat packed documents as one.

    Raises:
        ConfigError: a layer does not take a cache of keys and values.
    """
    layers, nothing_kept = decoder_layers(model), wrap(NothingKept())
    calls = [signature(layer.forward) for layer in layers]
    kept = DynamicCache(config=model.config).layers
    if not all(CACHE in call.parameters for call in calls) or any(
        hasattr(each, "update_conv_state") for each in kept
    ):
        raise ConfigError(
            f"kv=int8, but layers of {type(model).__name__} do not keep keys and values in a cache "
            "that they are given, expected all of them to, for EdgeRazor rounds them there; leave "
            "kv out"
        )

    def hand_on(
        call: Signature, _layer: nn.Module, args: tuple, named: dict[str, object]
    ) -> tuple[tuple, dict]:
        bound = call.bind(*args, **named)  # some models pass the cache by position
        given = bound.arguments.get(CACHE)
        bound.arguments[CACHE] = nothing_kept if given is None else wrap(given)
        return bound.args, bound.kwargs

    for layer, call in zip(layers, calls, strict=True):
        layer.register_forward_pre_hook(partial(hand_on, call), with_kwargs=True)


TRAINERS: dict[str, Callable[[BaselineJob], PreparedTraining]] = {
    "reference": reference_training,
    "torchao_int2": torchao_training,
    "efficientqat": efficientqat_training,
    "edgerazor": edgerazor_training,
}


class BaselineStudent(NamedTuple):
    """The student that a baseline made of a teacher."""

    model: LanguageModel
    """The float32 model; its linears hold exactly the weights that the method would deploy."""
    linear_bits: float
    """Bits per weight of the quantized linears: codes, scales, zero points and codebooks."""
    steps: int  # optimizer steps, with steps of blocks as fractions; 0 without training
    seconds: float  # seconds of the training loop alone, or of the quantization without training
    peak_gib: float  # peak memory of that time


def train_baseline(
    method: str,
    teacher: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: TeacherCache,
    *,
    settings: BaselineSettings,
    calibration: Sequence[TokenBatch] = (),
) -> BaselineStudent:
    """Make a student from a float teacher, which is not modified.

    Sequences come in the order of `qat train` with the same seed and batch size. Only `gptq` reads
    the calibration batches.

    Raises:
        ConfigError: the method is unknown or not installed, or the settings do not fit it.
        CacheError: the cache does not belong to this teacher.
        TrainingError: the loss is not finite.
    """
    _check(method, settings, calibration)
    vocab_size, cached = teacher.config.vocab_size, cache.manifest.teacher.vocab_size
    cache.check_student(tokenizer_hash(tokenizer), vocab_size, teacher.longest)
    if vocab_size != cached:
        raise CacheError(
            f"{cache.directory} is over a vocabulary of {cached}, the model's has {vocab_size}, "
            "expected the same; rebuild the cache with this model"
        )
    compile_anew()
    if method in PTQ:
        return _quantize(method, BaselineJob.of(teacher, cache, settings, calibration))
    job = BaselineJob.of(teacher, cache, settings.filled(method))
    training = TRAINERS[method](job)
    cost = distil(training, job)
    bits = put_plain(job.model, training.deploy())
    training.step.close()
    student = _judgeable(job)
    training.finish(student.model)
    return BaselineStudent(student, bits, *cost)


def time_step(
    method: str,
    teacher: LanguageModel,
    cache: TeacherCache,
    *,
    settings: BaselineSettings,
    steps: int,
) -> float:
    """Return the median seconds of an optimizer step; 0 for a method without training.

    For `efficientqat` this is a step of its second stage; a step of the first stage costs as much,
    summed over all blocks.
    """
    _check(method, settings)
    if method in PTQ:
        return 0.0
    compile_anew()
    job = BaselineJob.of(
        teacher, cache, settings.filled(method).model_copy(update={"block_steps": 0})
    )
    training = TRAINERS[method](job)
    warm_up(training.step, job)
    numbered = enumerate(repeat([job.batch(0)]))
    timing = time_steps(training.step, numbered, job.backend, warmup=1, steps=steps)
    training.step.close()
    return timing.step_s


def _check(
    method: str, settings: BaselineSettings, calibration: Sequence[TokenBatch] | None = None
) -> None:
    if method not in METHODS:
        raise ConfigError(f"method={method!r} is unknown; choose among {', '.join(METHODS)}")
    settings.check(method)
    if method == "gptq" and calibration is not None and not calibration:
        raise ConfigError(
            "method=gptq, but there are no calibration batches; give a calibration text or leave "
            "the method out"
        )


@torch.no_grad()
def _quantize(method: str, job: BaselineJob) -> BaselineStudent:
    settings, model, size = job.settings, job.model, job.settings.group_size
    weights = {name: model.get_submodule(name).weight for name in job.names}

    stacks = {n: m for n, m in model.named_modules() if isinstance(m, SplitStack)}
    parts = tuple(f"{name}." for name in stacks)
    alone = [name for name in job.names if not name.startswith(parts)]
    job.backend.reset_peak_memory()
    began = time.perf_counter()
    if method == "gptq":
        # as published: towards the original weight, with inputs from the quantized student
        walk = stages_in_order(LanguageModel(model), job.calibration, [*alone, *stacks])
        for names, inputs in walk:
            if isinstance(inputs, StackInputs):
                experts = enumerate(inputs.second_moments)
                moments = {f"{names[0]}.experts.{expert}": each for expert, each in experts}
            else:
                moments = {} if inputs is None else dict.fromkeys(names, inputs.second_moment)
            for name, second_moment in moments.items():
                bits = settings.bits_of(name)
                weights[name].copy_(gptq(weights[name], second_moment, bits, size))
    else:
        for name, weight in weights.items():
            weight.copy_(round_to_nearest(weight, settings.bits_of(name), size))
    job.backend.synchronize()
    seconds = time.perf_counter() - began
    deployed = {
        n: Deployed(w, uniform_bits(w, settings.bits_of(n), size)) for n, w in weights.items()
    }
    bits = put_plain(model, deployed)
    peak = job.backend.memory_use().peak_gib or 0.0
    return BaselineStudent(_judgeable(job), bits, 0, seconds, peak)


def _judgeable(job: BaselineJob) -> LanguageModel:
    return LanguageModel(dense_copy(LanguageModel(job.model), torch.float32))
