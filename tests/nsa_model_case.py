"""Tiny models with Native Sparse Attention that is sparse at lengths of a test."""

import torch
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.swap import swap_attention

SMALL = NSAConfig(
    compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=16, select_tile=16
)
"""Settings that reach 64 tokens, half of what `tiny_model` reads."""


def small(**changes: object) -> NSAConfig:
    """`SMALL` with some fields changed."""
    return NSAConfig(**{**SMALL.model_dump(), **changes})


def sparse_model(
    architecture: str = "qwen3", config: NSAConfig = SMALL, **overrides: object
) -> PreTrainedModel:
    """`tiny_model`, swapped, that keeps no cache unless asked to."""
    model = tiny_model(architecture, use_cache=False, **overrides)
    swap_attention(model, config)
    return model


def opened_model(config: NSAConfig = SMALL, **overrides: object) -> PreTrainedModel:
    """`sparse_model`, all of whose branches contribute."""
    model = sparse_model(config=config, **overrides)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".nsa." in name:
            nn.init.normal_(parameter, std=0.5)
    return model
