"""torchao's own quantization-aware training: 2-bit weights, groups of 32, straight-through."""

from collections.abc import Collection
from importlib.util import find_spec

import torch

from qat.backend import DTYPES
from qat.bench.baselines.plain import PlainStep, chunked_loss, dense_copy
from qat.bench.config import MeasureConfig
from qat.models.language_model import LanguageModel

GROUP_SIZE = 32


def is_installed() -> bool:
    """Whether torchao can be imported."""
    return find_spec("torchao") is not None


def torchao_step(
    student: LanguageModel, names: Collection[str], config: MeasureConfig, *, is_compiled: bool
) -> PlainStep:
    """Fake-quantized training of the linears called `names`, weights only."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = dense_copy(student, DTYPES[config.dtype])
    loss = chunked_loss(model, student, config)
    wanted = set(names)
    weights = IntxFakeQuantizeConfig(torch.int2, group_size=GROUP_SIZE, is_symmetric=True)
    quantize_(
        model,
        QATConfig(weight_config=weights, step="prepare"),
        filter_fn=lambda _module, name: name in wanted,
    )
    if is_compiled:
        loss.compile()
    return PlainStep(
        model,
        [model.get_submodule(name).weight for name in names],
        loss,
        is_compiled=is_compiled,
        is_checkpointed=config.gradient_checkpointing,
    )
