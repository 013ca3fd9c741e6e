"""The student of a benchmark: a checkpoint, or a published shape with random codes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qat.backend.device import on, select
from qat.convert.config import ConvertConfig, read_kv, read_plan
from qat.data.packing import Batch
from qat.errors import ConfigError
from qat.extensions.bench.config import MeasureConfig, shape_called
from qat.models.attention import change_attention, read_attention
from qat.models.document_attention import set_kv
from qat.models.hf_quantizer import empty_linear, put_empty_table
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.nn.activation import ActivationQuantizer
from qat.nn.quant_weight import PackedWeight
from qat.nn.sites import Owner, open_sites
from qat.nn.swap import linear_names, replace_module, table_names
from qat.quant.activation import LEVELS
from qat.quant.codebook import fixed_grid
from qat.quant.spec import QuantPlan
from qat.quant.weight import round_levels
from qat.ranks import ALONE, Ranks
from qat.train.start import make_trainable
from qat.train.step import StepResult, TrainingStep
from qat.train.step_config import KINDS, OptimConfig, StepConfig, rate_of

WEIGHT_RMS = 0.02  # root mean square of the random weights, as in these models' initialization
INPUT_RANGE = 4.0
"""Largest input that a static scale represents: four times the RMS of a norm's output."""


def is_shape(source: str) -> bool:
    """Return whether `source` is the name of a published shape rather than a checkpoint."""
    return not (Path(source).exists() or "/" in source)


def open_student(source: str, config: MeasureConfig, device: str | None = None) -> LanguageModel:
    """Open the quantized student `source` on `config.device`, in float32 and eval mode.

    Its attention follows `config.attention`; a shape may be created on another `device`.

    Raises:
        ConfigError: there is no shape or preset of that name.
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
    """Return a checkpoint's float32 model, or random codes in the formats of preset `config.to`.

    A shape's model is created on `device`, which may be `meta`. Nothing is fitted, so this is fast,
    and it never exists in floating point, for which a large one would not fit.
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
        model.to_empty(device=place)
        for module in model.modules():
            if isinstance(module, PackedWeight):
                fill_at_random_(module)
            elif not isinstance(module, Owner):  # the stacks of an `Owner` are such linears
                model._init_weights(module)
        model.tie_weights()
    return model.float()


def random_model(
    shape: str, config: MeasureConfig, device: str | torch.device | None = None
) -> PreTrainedModel:
    """Return a random bfloat16 model of a published shape, by default on `config.device`.

    Raises:
        ConfigError: no shape has that name, or the device is not available.
    """
    layers = {} if config.layers is None else {"num_hidden_layers": config.layers}
    settings = AutoConfig.for_model(**shape_called(shape) | layers)
    torch.manual_seed(config.seed)
    with torch.device(device or select(config.device).device):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    open_sites(model)
    return model


def quantize_at_random_(model: PreTrainedModel, plan: QuantPlan) -> None:
    """Replace every linear and table in `plan` by one with random codes.

    Inputs are quantized as in the plan; linears of one module and width share a static scale.
    """
    quantizers: dict[tuple[str, int], ActivationQuantizer] = {}
    tables = table_names(model)
    for name, spec in plan.assign(linear_names(model), tables).items():
        device = model.get_submodule(name).weight.device
        if name in tables:
            put_empty_table(model, name, spec)
            table = model.get_submodule(name).to_empty(device=device)
            fill_at_random_(cast(PackedWeight, table))
            continue
        frozen = empty_linear(model, name, spec).to_empty(device=device)
        activation = plan.activation_for(name)
        if activation is not None:
            scale = torch.empty((), device=device) if activation.is_static else None
            key = name.rpartition(".")[0], frozen.in_features
            quantizer = ActivationQuantizer(activation, scale)
            frozen.activation = quantizers.setdefault(key, quantizer)
        fill_at_random_(frozen)
        replace_module(model, name, frozen.eval())


@torch.no_grad()
def fill_at_random_(module: PackedWeight) -> None:
    """Fill a linear or a table with random codes and with scales that give an RMS of `WEIGHT_RMS`.

    Levels are evenly spread in [-1, 1], codewords are random in that range, and a static input
    scale represents up to `INPUT_RANGE`.
    """
    O, I, spec = module.out_features, module.in_features, module.spec
    grid = fixed_grid(spec)
    levels = torch.linspace(-1, 1, spec.num_levels) if grid is None else grid
    if spec.vector_size > 1 and grid is None:  # codewords `(C, vector_size)`
        levels = torch.empty(spec.codebook_shape).uniform_(-1, 1)
    levels = round_levels(levels.to(module.codebook), spec.level_bits)
    scale = WEIGHT_RMS / levels.pow(2).mean().sqrt()
    module.packed.random_(0, 256)  # any bits are valid indices: the presets' codebooks are full
    module.codebook.copy_(levels)
    if spec.scale == "group":
        module.scales.uniform_(0.5, 1.5).mul_(scale)
    else:
        module.scale_out.uniform_(0.5, 1.5).mul_(O**-0.5)
        module.scale_in.uniform_(0.5, 1.5).mul_(I**-0.5)
        module.rank_gain.fill_(scale * (O * I) ** 0.5 / spec.rank)
    bias = getattr(module, "bias", None)
    if bias is not None:
        bias.zero_()
    if module.activation is not None and module.activation.scale is not None:
        module.activation.scale.fill_(INPUT_RANGE / LEVELS)


class Subject(Protocol):
    """One implementation of a training step."""

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take one optimizer step."""

    def compile_facts(self) -> dict[str, object]:
        """Return what the compiler did: compiled, graphs, recompiles, cuda_graph, fallback."""

    def close(self) -> None:
        """Free the memory of this subject."""


class Ours:
    """A student ready to train; every `subject()` is a fresh training step over it.

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
        settings = without_learning(config)
        self.optimizer = make_trainable(
            student.model, settings, shards_latents=is_sharded, ranks=ranks
        )
        # create the optimizer's moments now, so that the first step uses as much memory as the
        # others
        for parameter in self.optimizer.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step(0)
        backend = on(student.device)
        state = self.optimizer.state().values()
        self._undo = backend.undoing(state) if backend.is_traced else None

    def subject(self) -> TrainingStep:
        """Return a training step that has not compiled or captured anything yet."""
        self.optimizer.forget_gradients()
        return TrainingStep(self.student, self.optimizer, self.config)

    @contextmanager
    def restored_on_failure(self) -> Iterator[None]:
        """Clear gradients after a block of steps and, if it fails, restore the state.

        A failed compiled step has lost its inputs, because their buffers were donated to its
        outputs.
        """
        try:
            yield
        except (RuntimeError, MemoryError):
            if self._undo is not None:
                self._undo()
            raise
        finally:
            self.optimizer.forget_gradients()


def without_learning(config: MeasureConfig) -> OptimConfig:
    """Return the settings of endlessly many such steps with learning rates of zero."""
    shared = {name: getattr(config, name) for name in StepConfig.model_fields}
    rates = {rate_of(kind): 0.0 for kind in KINDS}
    return OptimConfig(max_steps=2**31, schedule="constant", warmup_steps=0, **rates, **shared)
