"""The student that a benchmark trains: a packed checkpoint, or random codes in a published shape.

Shapes: O out_features, I in_features, G groups per row, C codebook entries, R rank.
"""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qat.backend.device import select
from qat.bench.config import MeasureConfig
from qat.bench.shapes import shape_called
from qat.convert.config import ConvertConfig
from qat.convert.plan import read_plan
from qat.models.hf_quantizer import empty_linear
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.swap import linear_names, replace_module
from qat.nsa.swap import change_attention, read_attention
from qat.quant.codebook import fixed_grid
from qat.quant.spec import LutSpec, QuantPlan

WEIGHT_RMS = 0.02
"""Root mean square of the random weights: what these models are initialised with."""


def open_student(source: str, config: MeasureConfig) -> LanguageModel:
    """The quantized student that `source` names, on `config.device`, in float32 and eval mode.

    A shape's name gives a model of that shape with random weights and codes in the formats of
    preset `config.to`; nothing is fitted, so it is there at once. Either attends as
    `config.attention` says.

    Raises:
        ConfigError: `source` or the preset has no such name.
        CheckpointError: the checkpoint is damaged.
    """
    attention = None if config.attention is None else read_attention(config.attention)
    if Path(source).exists() or "/" in source:
        model = load_model(source, device=config.device, dtype="fp32").model
    else:
        model = random_model(source, config).float()
        quantize_at_random_(model, read_plan(ConvertConfig(to=config.to)))
    if config.attention is not None:
        change_attention(model, attention)
    return LanguageModel(model)


def random_model(shape: str, config: MeasureConfig) -> PreTrainedModel:
    """A bfloat16 model of a published shape with random weights, on `config.device`.

    Raises:
        ConfigError: no shape has that name, or the device is not there.
    """
    settings = AutoConfig.for_model(**shape_called(shape))
    torch.manual_seed(config.seed)
    with select(config.device).device:
        return AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()


def quantize_at_random_(model: PreTrainedModel, plan: QuantPlan) -> None:
    """Put a `FrozenLutLinear` of random codes in the place of every linear that `plan` names."""
    for name, spec in plan.assign(linear_names(model)).items():
        linear: nn.Linear = model.get_submodule(name)
        frozen = empty_linear(model, name, spec).to_empty(device=linear.weight.device)
        fill_at_random_(frozen)
        replace_module(model, name, frozen.eval())


@torch.no_grad()
def fill_at_random_(linear: FrozenLutLinear) -> None:
    """Random codes over evenly spread levels in -1 ... 1, and scales that give `WEIGHT_RMS`."""
    O, I, spec = linear.out_features, linear.in_features, linear.spec
    levels = _spread_levels(spec).to(linear.codebook)
    scale = WEIGHT_RMS / levels.pow(2).mean().sqrt()
    linear.packed.random_(0, 256)  # any bits are indices: the presets' codebooks are full
    linear.codebook.copy_(levels)
    if spec.scale == "group":
        linear.scales.uniform_(0.5, 1.5).mul_(scale)
    else:
        linear.scale_out.uniform_(0.5, 1.5).mul_(O**-0.5)
        linear.scale_in.uniform_(0.5, 1.5).mul_(I**-0.5)
        linear.rank_gain.fill_(scale.item() * (O * I) ** 0.5 / spec.rank)
    if linear.bias is not None:
        linear.bias.zero_()


def _spread_levels(spec: LutSpec) -> torch.Tensor:
    grid = fixed_grid(spec)
    return torch.linspace(-1, 1, spec.num_levels) if grid is None else grid
