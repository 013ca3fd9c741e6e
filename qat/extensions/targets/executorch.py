"""Target `executorch`: a program for ExecuTorch, with products by XNNPACK on a CPU.

Where a student rounds the input of a linear to 8 bits, with a scale per token, XNNPACK multiplies
integers: a weight is 4-bit integers under a bfloat16 scale per group, or 8-bit integers under a
float32 scale per row. Else, and in tables, a weight is codes of 2, 4 or 8 bits. XNNPACK has no
product of floats and codes in groups, so the weight is formed at each call and nothing is rounded.
Only this file imports executorch.

Shapes: S positions, V words.
"""

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StaticCache

from qat.export.dense import dense_state_dict
from qat.export.parts import float_model
from qat.extensions.targets.codes import to_codes
from qat.extensions.targets.decoder import TABLE
from qat.extensions.targets.shared import (
    EVEN_GRIDS,
    affine,
    even_levels,
    exact,
    group_size_near,
    lost_by_grid,
    plain_decoder,
    refuse_all_but_float32,
    refuse_all_but_groups,
    steps,
    write_config,
)
from qat.models.stored_state import quantized_modules
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import CACHE, head_dim, weight_shape
from qat.quant.spec import LutSpec

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None, "int8-asymmetric")
FILE_NAME = "model.pte"
LENGTH = 1024
"""The largest number of positions in the cache of keys and values."""
GROUP_SIZES = (32, 64, 128, 256)
"""XNNPACK supports multiples of 32, only for 4-bit weights."""
HOW_TO_LOAD = """\
```python
# pip install executorch transformers
import executorch.kernels.quantized  # what forms weights of codes
import torch
from executorch.runtime import Runtime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
forward = Runtime.get().load_program("DIR/model.pte").load_method("forward")
ids = torch.tensor([tokenizer("Once upon a time").input_ids])
(logits,) = forward.execute([ids, torch.arange(ids.shape[1])])
```

The program keeps keys and values: give it a prompt, then each new token with its position.
"""


def stored_bits(spec: LutSpec, in_features: int) -> int | None:
    """Return the bits of the XNNPACK integers that hold the levels, 4 or 8; None if there are none.

    Levels without a zero are the odd multiples of half a step, which take one more bit.
    """
    bits = spec.bits + (spec.codebook == "seq")
    if bits <= 4 and spec.group_size % GROUP_SIZES[0] == 0 and spec.scale_bits == 8:
        return 4
    return 8 if bits <= 8 and spec.group_size == in_features else None


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels in 4-bit integers per group, or in 8-bit integers with a scale per row, lose
    nothing.
    """
    reason = lost_by_grid(spec, EVEN_GRIDS)
    if reason is None and stored_bits(spec, shape[1]) is None:
        reason = (
            f"{spec.codebook} of {spec.bits} bits in groups of {spec.group_size} with scales of "
            f"{spec.scale_bits} bits, expected integers of 4 bits in groups of a multiple of "
            f"{GROUP_SIZES[0]} with scales of 8, or integers of 8 bits with a scale for each row"
        )
    return reason


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels without a zero up to 3 bits, integers above; a scale per row above 4."""
    refuse_all_but_groups(spec)
    if spec.bits > 4:
        codebook = even_levels(spec, shape[1]).codebook
        return LutSpec(bits=spec.bits, codebook=codebook, group_size=shape[1])
    size = group_size_near(spec.group_size, GROUP_SIZES, shape[1])
    return even_levels(spec, size, seq_bits=3)


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a program for ExecuTorch")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.pte, config.json and the tokenizer, in float32 alone."""
    refuse_all_but_float32(model, "XNNPACK")
    made = float_model(model, dense_state_dict(model, torch.float32), torch.float32)
    for name, module in quantized_modules(model).items():
        readers = [name]
        if name == TABLE:
            made.set_submodule(name, _Coded(name, module))
            readers = ["lm_head"] if model.config.tie_word_embeddings else []
        for reader in readers:
            linear = made.get_submodule(reader)
            if module.activation is None:
                made.set_submodule(reader, _CodedLinear(_Coded(name, module), linear.bias))
            else:
                linear.weight = nn.Parameter(_tensor(name, module), requires_grad=False)
    length = min(LENGTH, model.config.max_position_embeddings)
    (directory / FILE_NAME).write_bytes(_lowered(_Cached(made, length)))
    write_config(model, tokenizer, directory)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the program's logits, called as `steps` says."""
    import executorch.kernels.quantized  # noqa: F401 - operators that form weights of codes
    from executorch.runtime import Runtime

    forward = Runtime.get().load_program(directory / FILE_NAME).load_method("forward")

    def logits(row: Tensor, part: range) -> Tensor:
        return forward.execute([row[None, part], torch.tensor(part)])[0].clone()

    return torch.cat(
        [torch.cat([logits(row, part) for part in steps(ids.shape[1])], dim=1) for row in ids]
    )


def _tensor(name: str, module: QuantWeight) -> Tensor:
    """Return `W = integer * scale`, to be multiplied with inputs that are rounded first."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    weight, spec = affine(module), module.spec
    bits, parts = stored_bits(spec, weight_shape(module)[1]), 2 if spec.codebook == "seq" else 1
    dtype = torch.bfloat16 if bits == 4 else torch.float32  # XNNPACK's scale dtypes
    scale = exact(f"{name}.scales", weight.scale / parts, dtype, has_choice=False).float()
    lowest, second = module.codebook.tolist()[:2]
    lowest = round(lowest / (second - lowest) * parts)
    return IntxUnpackedToInt8Tensor(
        (weight.codes.int() * parts + lowest).to(torch.int8),
        scale,
        torch.zeros_like(scale, dtype=torch.int8),
        getattr(torch, f"int{bits}"),
        (1, spec.group_size),
        torch.float32,
        "int8_asym_per_token",
    )


class _Coded(nn.Module):
    """A weight as codes; rows of it are formed when they are asked for."""

    def __init__(self, name: str, module: QuantWeight) -> None:
        super().__init__()
        codes = to_codes(name, module, is_half=module.spec.codebook == "seq")
        self.bits, self.zero = codes.bits, codes.zero - 2 ** (codes.bits - 1)
        packed = codes.packed
        if self.bits == 4:  # the first of two codes is the higher half of a byte here
            packed = packed << 4 | packed >> 4
        elif self.bits == 8:
            packed = (packed ^ 0x80).view(torch.int8)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", codes.scales)  # of 16 bits its kernels misread them

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` in float32."""
        form = {2: "embedding_2bit", 4: "embedding_4bit", 8: "embedding_byte"}[self.bits]
        zeros = torch.full_like(self.scales, self.zero) if self.zero else None
        ends = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        rows = getattr(torch.ops.quantized_decomposed, form).default
        return rows(self.packed, self.scales, zeros, *ends, ids)


class _CodedLinear(nn.Module):
    """A linear or head whose weight is formed at each call."""

    def __init__(self, weight: _Coded, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ W.T + b`."""
        rows = torch.arange(self.weight.packed.shape[0])
        return nn.functional.linear(x, self.weight(rows), self.bias)


class _Cached(nn.Module):
    """A model whose cache of fixed size is among its buffers, so that a program keeps it."""

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        super().__init__()
        self.model, self.length = model, length
        config = model.config
        room = torch.zeros(1, config.num_key_value_heads, length, head_dim(config))
        for layer in range(config.num_hidden_layers):
            self.register_buffer(f"keys_{layer}", room.clone())
            self.register_buffer(f"values_{layer}", room.clone())

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits `(1, S, V)` for `tokens` `(1, S)` at consecutive `positions` `(S,)`."""
        cache = StaticCache(config=self.model.config, max_cache_len=self.length)
        for number, layer in enumerate(cache.layers):
            layer.keys = self.get_buffer(f"keys_{number}")
            layer.values = self.get_buffer(f"values_{number}")
            layer.cumulative_length = positions[0].clone()
            layer.device, layer.is_initialized = positions.device, True
        return self.model(input_ids=tokens, use_cache=True, **{CACHE: cache}).logits


@torch.no_grad()
def _lowered(model: _Cached) -> bytes:
    """Return the program: tokens and their positions in, up to the cache size; logits out."""
    few = torch.arange(2)
    count = torch.export.Dim("count", min=1, max=model.length)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about each other
        from executorch.backends.xnnpack.partition.config.gemm_configs import LinearConfig
        from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import (
            XnnpackDynamicallyQuantizedPartitioner,
            XnnpackPartitioner,
        )
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        program = torch.export.export(
            model.eval(), (few[None], few), dynamic_shapes=({1: count}, {0: count}), strict=False
        )
        floats = XnnpackPartitioner(
            configs=[LinearConfig],
            config_precisions=ConfigPrecisionType.FP32,
            force_non_static_weights_for_f32_linear=True,  # they are formed at each call
        )
        lowered = to_edge_transform_and_lower(
            program,
            partitioner=[XnnpackDynamicallyQuantizedPartitioner(), floats],
            # torchao's operators are outside of the core set
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
        return lowered.to_executorch().buffer
