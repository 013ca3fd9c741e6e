"""torchao's own quantization-aware training: int2 or int4 weights in groups, straight-through."""

from collections.abc import Collection
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

from qat.bench.baselines.config import BaselineSettings
from qat.bench.baselines.training import (
    FP16_BITS,
    BaselineJob,
    Deployed,
    Lesson,
    PlainStep,
    plain_step,
)
from qat.bench.config import MeasureConfig
from qat.errors import ConfigError, how_to_install
from qat.models.language_model import LanguageModel

GROUP_SIZE = 32
"""Of the benchmark of speed."""


def is_installed() -> bool:
    """Whether torchao can be imported."""
    return find_spec("torchao") is not None


def check_installed() -> None:
    """Refuse to go on without torchao.

    Raises:
        ConfigError: it is not there.
    """
    if not is_installed():
        raise ConfigError(
            "method=torchao_int2, but torchao is not installed; leave the method out, or: "
            f"{how_to_install('adam8bit')}"
        )


def torchao_step(
    student: LanguageModel, names: Collection[str], config: MeasureConfig, *, is_compiled: bool
) -> PlainStep:
    """Fake-quantized int2 training of the linears called `names`, weights only."""
    return plain_step(
        student,
        names,
        config,
        is_compiled=is_compiled,
        change=lambda model: fake_quantize(model, dict.fromkeys(names, 2), GROUP_SIZE),
    )


def fake_quantize(model: PreTrainedModel, bits: dict[str, int], group_size: int) -> None:
    """Let the linears named in `bits` compute with symmetric integers of so many bits."""
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


def torchao_lesson(job: BaselineJob) -> Lesson:
    """The weights of all linears learn through torchao's fake quantizers.

    Raises:
        ConfigError: torchao is not installed.
    """
    check_installed()
    settings = job.settings
    bits = {name: settings.bits_of(name) for name in job.names}
    fake_quantize(job.model, bits, settings.group_size)
    step = job.step(
        [job.model.get_submodule(name).weight for name in job.names],
        job.kd_loss(),
        steps=settings.max_steps,
    )
    return Lesson(step, lambda: _deployed(job.model, bits, settings), settings.max_steps)


@torch.no_grad()
def _deployed(
    model: PreTrainedModel, bits: dict[str, int], settings: BaselineSettings
) -> dict[str, Deployed]:
    """What the fake quantizers give, counted with a scale of 16 bits a group."""
    found = {}
    for name, kind in bits.items():
        linear: nn.Linear = model.get_submodule(name)
        weight = linear.weight_fake_quantizer(linear.weight)
        groups = weight.numel() // settings.group_size
        found[name] = Deployed(weight, weight.numel() * kind + FP16_BITS * groups)
    return found
