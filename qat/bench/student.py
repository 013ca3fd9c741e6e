"""The student that a benchmark trains: a checkpoint, or random codes in a published shape."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qat.backend.device import on, select
from qat.bench.config import MeasureConfig, shape_called
from qat.convert.config import ConvertConfig, read_kv, read_plan
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.models.hf_quantizer import empty_linear
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.models.regions import set_kv
from qat.nn.activation import ActivationQuantizer
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.sites import Owner, open_sites
from qat.nn.swap import linear_names, replace_module
from qat.nsa.swap import change_attention, read_attention
from qat.quant.activation import LEVELS
from qat.quant.codebook import fixed_grid
from qat.quant.spec import QuantPlan
from qat.quant.weight import round_levels
from qat.ranks import ALONE, Ranks
from qat.train.config import StepConfig, TrainConfig
from qat.train.start import make_trainable
from qat.train.step import StepResult, TrainingStep

WEIGHT_RMS = 0.02
"""Root mean square of the random weights: what these models are initialised with."""
INPUT_RANGE = 4.0
"""The largest input that a static scale holds: four times the size of what a norm gives."""


def is_shape(source: str) -> bool:
    """Whether `source` is called like a published shape, not like a checkpoint."""
    return not (Path(source).exists() or "/" in source)


def open_student(source: str, config: MeasureConfig, device: str | None = None) -> LanguageModel:
    """The quantized student that `source` names, on `config.device`, in float32 and eval mode.

    Either kind attends as `config.attention` says; a shape's may be on another `device`.

    Raises:
        ConfigError: `source` or the preset has no such name.
        CheckpointError: the checkpoint is damaged.
    """
    attention = None if config.attention is None else read_attention(config.attention)
    model = quantized_model(source, config, device)
    if config.attention is not None:
        change_attention(model, attention)
    return LanguageModel(model)


def quantized_model(
    source: str, config: MeasureConfig, device: str | torch.device | None = None
) -> PreTrainedModel:
    """A checkpoint's float32 model; or random codes in the formats of preset `config.to`.

    A shape's model is made on `device`, which may be `meta`: nothing is fitted, so it is there at
    once, and never in floating point, which a large one has no room for.
    """
    if not is_shape(source):
        if config.layers is not None:
            raise ConfigError(
                f"layers={config.layers}, but {source} is no shape's name and has the layers that "
                "it has; leave --layers out"
            )
        return load_model(source, device=config.device, dtype="fp32").model
    model, formats = random_model(source, config, "meta"), ConvertConfig(to=config.to)
    kv = read_kv(formats)
    if kv is not None:
        set_kv(model, kv)
    quantize_at_random_(model, read_plan(formats))
    place = torch.device(device or select(config.device).device)
    if place.type != "meta":
        _fill_all_at_random_(model, place)
    return model.float()


def random_model(
    shape: str, config: MeasureConfig, device: str | torch.device | None = None
) -> PreTrainedModel:
    """A bfloat16 model of a published shape with random weights, by default on `config.device`.

    Raises:
        ConfigError: no shape has that name, or the device is not there.
    """
    layers = {} if config.layers is None else {"num_hidden_layers": config.layers}
    settings = AutoConfig.for_model(**shape_called(shape) | layers)
    torch.manual_seed(config.seed)
    with torch.device(device or select(config.device).device):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    open_sites(model)
    return model


def quantize_at_random_(model: PreTrainedModel, plan: QuantPlan) -> None:
    """Put a `FrozenLutLinear` of random codes in the place of every linear that `plan` names.

    Inputs are quantized as it says; static scales are shared by linears of one module and width.
    """
    quantizers: dict[tuple[str, int], ActivationQuantizer] = {}
    for name, spec in plan.assign(linear_names(model)).items():
        device = model.get_submodule(name).weight.device
        frozen = empty_linear(model, name, spec).to_empty(device=device)
        activation = plan.activation_for(name)
        if activation is not None:
            scale = torch.empty((), device=device) if activation.is_static else None
            key = name.rpartition(".")[0], frozen.in_features
            quantizer = ActivationQuantizer(activation, scale)
            frozen.activation = quantizers.setdefault(key, quantizer)
        fill_at_random_(frozen)
        replace_module(model, name, frozen.eval())


def _fill_all_at_random_(model: PreTrainedModel, device: torch.device) -> None:
    """Give a model on `meta`, its linears quantized, memory and random values."""
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, FrozenLutLinear):
            fill_at_random_(module)
        elif not isinstance(module, Owner):  # whose stacks are such linears
            model._init_weights(module)
    model.tie_weights()


@torch.no_grad()
def fill_at_random_(linear: FrozenLutLinear) -> None:
    """Random codes over levels evenly spread in -1 ... 1, or random codewords of such numbers, and
    scales that give `WEIGHT_RMS`; a static scale of inputs that gives `INPUT_RANGE`."""
    O, I, spec = linear.out_features, linear.in_features, linear.spec
    grid = fixed_grid(spec)
    levels = torch.linspace(-1, 1, spec.num_levels) if grid is None else grid
    if spec.has_codewords:
        levels = torch.empty(spec.codebook_shape).uniform_(-1, 1)
    levels = round_levels(levels.to(linear.codebook), spec.level_bits)
    scale = WEIGHT_RMS / levels.pow(2).mean().sqrt()
    linear.packed.random_(0, 256)  # any bits are indices: the presets' codebooks are full
    linear.codebook.copy_(levels)
    if spec.scale == "group":
        linear.scales.uniform_(0.5, 1.5).mul_(scale)
    else:
        linear.scale_out.uniform_(0.5, 1.5).mul_(O**-0.5)
        linear.scale_in.uniform_(0.5, 1.5).mul_(I**-0.5)
        linear.rank_gain.fill_(scale * (O * I) ** 0.5 / spec.rank)
    if linear.bias is not None:
        linear.bias.zero_()
    if linear.activation is not None and linear.activation.scale is not None:
        linear.activation.scale.fill_(INPUT_RANGE / LEVELS)


class Subject(Protocol):
    """One way to take a training step."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take one optimizer step."""

    def compile_facts(self) -> dict[str, object]:
        """What the compiler did: compiled, graphs, recompiles, cuda_graph, fallback."""

    def close(self) -> None:
        """Free the memory of this subject."""


class Ours:
    """A student ready to learn; every `subject()` is a fresh training step over it.

    Learning rates are zero, so all of them train the same student. Several `ranks` take each step
    together; with `is_sharded` each of them holds its rows of the latent weights.
    """

    def __init__(
        self,
        student: LanguageModel,
        config: MeasureConfig,
        *,
        ranks: Ranks = ALONE,
        is_sharded: bool = False,
    ) -> None:
        self.student = student
        self.config = config
        settings = standing_still(config, shard_latents=is_sharded)
        self.optimizer = make_trainable(student.model, settings, ranks=ranks)
        # moments are made now, so that the first step holds what all others do
        for parameter in self.optimizer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step(0)
        backend = on(student.device)
        state = self.optimizer.state().values()
        self._undo = backend.undoing(state) if backend.fixed_shapes() else None

    def subject(self) -> TrainingStep:
        """A training step that has compiled and recorded nothing yet."""
        self.optimizer.forget_gradients()
        return TrainingStep(self.student, self.optimizer, self.config)

    @contextmanager
    def mended(self) -> Iterator[None]:
        """A block of steps that leaves no gradients and, if it fails, all as it was before.

        A compiled step that fails has given away what it would have replaced.
        """
        try:
            yield
        except (RuntimeError, MemoryError):
            if self._undo is not None:
                self._undo()
            raise
        finally:
            self.optimizer.forget_gradients()


def standing_still(config: MeasureConfig, *, shard_latents: bool = False) -> TrainConfig:
    """The settings of an endless training run with these steps, whose learning rates are zero."""
    shared = {name: getattr(config, name) for name in StepConfig.model_fields}
    rates = {name: 0.0 for name in TrainConfig.model_fields if f"{name}_".startswith("lr_")}
    return TrainConfig(
        cache_dir=config.cache_dir or Path("synthetic"),
        max_steps=2**31,
        schedule="constant",
        warmup_steps=0,
        shard_latents=shard_latents,
        **rates,
        **shared,
    )
