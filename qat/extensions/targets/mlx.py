"""Target `mlx`: a directory for mlx-lm, with MLX's affine quantization.

A row of I weights of b bits is `I * b / 32` uint32 words, least significant bits first, with a
float `scale` and `bias` per group: `W = scale * code + bias`.
"""

import math
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError, is_installed
from qat.extensions.targets.shared import (
    EVEN_GRIDS,
    affine,
    even_levels,
    exact,
    group_size_near,
    lost_by_grid,
    narrow_state,
    refuse_all_but_groups,
    write_tensors,
)
from qat.models.stored_state import quantized_modules
from qat.nn.swap import embedding_dtype
from qat.quant.spec import LutSpec
from qat.quant.weight import pack

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
BITS = (1, 2, 3, 4, 5, 6, 8)
"""Bits per weight that MLX supports."""
GROUP_SIZES = (32, 64, 128)
"""Group sizes that MLX supports."""
SAME_AS = {"mistral": "llama"}
"""Models that mlx-lm runs with the code of another."""
WITHOUT_WINDOW = ("qwen2", "qwen3")
"""Models whose sliding window, if their configuration has one, mlx-lm ignores."""
HOW_TO_LOAD = """\
```
pip install mlx-lm        # on Linux: pip install 'mlx-lm[cpu]'
mlx_lm.generate --model DIR --prompt "Once upon a time"
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels of 1 to 8 bits (not 7) in groups of 32, 64 or 128 lose nothing.
    """
    reason = lost_by_grid(spec, EVEN_GRIDS)
    if reason is None and spec.bits not in BITS:
        reason = f"MLX has no type with bits={spec.bits}, expected one of {BITS}"
    if reason is None and spec.group_size not in GROUP_SIZES:
        reason = f"MLX has no groups of {spec.group_size}, expected one of {GROUP_SIZES}"
    return reason


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels without a zero up to 4 bits, integers above, with 8-bit scales."""
    refuse_all_but_groups(spec)
    if spec.bits not in BITS:
        raise ExportError(f"MLX has no type with bits={spec.bits}; name a plan of {BITS} bits")
    size = group_size_near(spec.group_size, GROUP_SIZES, shape[1])
    return even_levels(spec, size)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in the files, with 16-bit scales and biases."""
    return math.prod(shape) * (spec.bits * spec.group_size + 2 * 16) // spec.group_size


def check(model: PreTrainedModel) -> None:
    """Refuse a model that mlx-lm does not support or computes differently.

    Whether it supports the model is only checked if mlx-lm is installed.
    """
    config = model.config
    kind, layers = config.model_type, getattr(config, "layer_types", None) or []
    # find the file without an import: this check also runs before training
    file = f"{SAME_AS.get(kind, kind)}.py"
    if (
        is_installed("mlx_lm")
        and not Path(find_spec("mlx_lm").origin).with_name("models").joinpath(file).is_file()
    ):
        raise ExportError(
            f"model_type={kind} is none that mlx-lm knows, expected one of its models; export "
            "--to dense"
        )
    has_window = kind == "mistral" and config.sliding_window is not None
    if has_window or (kind in WITHOUT_WINDOW and "sliding_attention" in layers):
        raise ExportError(
            f"mlx-lm runs {kind} without the sliding window that this model has, expected layers "
            "of full_attention; export --to dense"
        )
    is_full = [layer == "full_attention" for layer in layers]
    every = is_full.index(True) + 1 if any(is_full) else 0
    is_periodic = every and is_full == [n % every == 0 for n in range(1, len(layers) + 1)]
    if kind == "gemma3_text" and not is_periodic:
        raise ExportError(
            "mlx-lm knows Gemma-3 with full attention in every n-th layer, expected that, but "
            f"layer_types={layers}; export --to dense"
        )


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer."""
    dtype = embedding_dtype(model)
    tensors, formats = narrow_state(model), {}
    for name, module in quantized_modules(model).items():
        codes, scale, bias = affine(module)
        tensors[f"{name}.weight"] = pack(codes, module.spec.bits).view(torch.uint32)
        tensors[f"{name}.scales"] = exact(f"{name}.scales", scale, dtype)
        tensors[f"{name}.biases"] = exact(f"{name}.biases", bias, dtype)
        formats[name] = (module.spec.group_size, module.spec.bits)
    common = Counter(formats.values()).most_common(1)[0][0]
    quantization = {**_format(common), **{n: _format(f) for n, f in formats.items()}}
    extra: dict[str, object] = {"quantization": quantization}
    if model.config.model_type == "gemma3_text":  # mlx-lm reads this instead of layer_types
        extra["sliding_window_pattern"] = model.config.layer_types.index("full_attention") + 1
    metadata = {"format": "mlx"}
    write_tensors(model, tokenizer, directory, tensors=tensors, extra=extra, metadata=metadata)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return logits of the model that mlx-lm reads, run in float32: on a CPU MLX sums in bfloat16.

    In any dtype mlx-lm rounds the factor of Gemma's embeddings to bfloat16, as transformers does in
    a bfloat16 model. Here both compute in float32, so that rounding is undone.
    """
    import mlx.core as mx
    import numpy as np
    from mlx_lm.utils import load_model

    mlx_model, _ = load_model(directory)
    mlx_model.set_dtype(mx.float32)
    given, places = {}, mx.array(ids.numpy())
    if model.config.model_type == "gemma3_text":
        factor = torch.tensor(model.config.hidden_size**0.5)
        rows = mlx_model.model.embed_tokens(places)
        given["input_embeddings"] = rows * (factor / factor.bfloat16()).item()
    logits = mlx_model(places, **given).astype(mx.float32)
    return torch.from_numpy(np.array(logits))


def _format(size_and_bits: tuple[int, int]) -> dict[str, object]:
    group_size, bits = size_and_bits
    return {"group_size": group_size, "bits": bits, "mode": "affine"}
