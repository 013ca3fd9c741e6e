"""Target `onnx`: a directory for onnxruntime-genai, run by ONNX Runtime on a CPU.

A weight is codes of 2, 4 or 8 bits (`MatMulNBits`, `GatherBlockQuantized`): `W = scale * (code -
zero_point)`, where the zero point is half of the codes, or 1.5 for 2 bits of `seq`. Two programs
share the weights and compute in float32. `model.onnx` rounds what its quantized products read to 8
bits, a scale for each block: ONNX Runtime has no fast products of 2 or 8 bits without that.
`exact.onnx` rounds nothing. Only this file imports onnxruntime.

Shapes: B sequences, S positions, V words.
"""

import json
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError, how_to_install, is_installed
from qat.extensions.targets.codes import (
    BLOCK_SIZES,
    Codes,
    block_size,
    blocks_bits,
    lost_by_blocks,
    stored_bits,
    to_codes,
)
from qat.extensions.targets.shared import (
    even_levels,
    group_size_near,
    plain_decoder,
    refuse_all_but_float32,
    refuse_all_but_groups,
    steps,
    write_config,
)
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_weight import QuantWeight
from qat.nn.swap import head_dim
from qat.quant.spec import LutSpec

logger = logging.getLogger(__name__)

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
FILE_NAME, EXACT_NAME, DATA_NAME = "model.onnx", "exact.onnx", "model.onnx.data"
FAST_BLOCK_SIZES = BLOCK_SIZES[1:]
"""The block sizes for which ONNX Runtime has fast products of 2 bits."""
FAST, SLOW = {"mlas.use_lut_gemm": "1"}, {"mlas.use_lut_gemm": "0"}
"""Settings of a session with which products with zero points of 1.5 are fast and round what they
read, whatever the program says, or are slow and exact."""
MOVED = 0.5
"""Rounding moves logits by less than this share of their norm; those of a wrong product are as far
from ours as any."""
EXACT = {"model": {"decoder": {"filename": EXACT_NAME, "session_options": SLOW}}}
"""Settings for onnxruntime-genai that replace those of genai_config.json, so that nothing is
rounded."""
HOW_TO_LOAD = f"""\
```python
# pip install onnxruntime-genai
import onnxruntime_genai as og

model = og.Model("DIR")
tokenizer = og.Tokenizer(model)
parameters = og.GeneratorParams(model)
parameters.set_search_options(max_length=200, do_sample=False)
generator = og.Generator(model, parameters)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```

This rounds what the products read to 8 bits. To round nothing, which is slower with 2 or 8 bits:

```python
config = og.Config("DIR")
config.overlay('{json.dumps(EXACT)}')
model = og.Model(config)
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not.

    Even levels in codes of up to 8 bits, in groups of a multiple of 16, lose nothing.
    """
    return lost_by_blocks(spec, code_bits(spec), BLOCK_SIZES[0])


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels without a zero up to 3 bits, integers above, in groups of a block."""
    refuse_all_but_groups(spec)
    size = group_size_near(spec.group_size, FAST_BLOCK_SIZES, shape[1])
    return even_levels(spec, size, seq_bits=3)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in the files, with 16-bit scales."""
    return blocks_bits(shape, code_bits(spec), block_size(spec))


def code_bits(spec: LutSpec) -> int | None:
    """Return the bits of the codes of a weight that is no table; None if there are none."""
    return stored_bits(spec.bits + (spec.codebook == "seq" and not has_half(spec)))


def has_half(spec: LutSpec, *, is_table: bool = False) -> bool:
    """Return whether the zero point of a weight is 1.5, which no table may have."""
    return (spec.codebook, spec.bits) == ("seq", 2) and not is_table


def codes_of(name: str, module: QuantWeight) -> Codes:
    """Return the codes of a module called `name`."""
    is_half = has_half(module.spec, is_table=isinstance(module, QuantTable))
    return to_codes(name, module, is_half=is_half)


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a program for ONNX Runtime")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write the program, its weights, genai_config.json, config.json and the tokenizer."""
    refuse_all_but_float32(model, "ONNX Runtime on a CPU")
    if not is_installed("onnx"):
        raise ExportError(
            "the library onnx is not installed, expected it beside onnxruntime to write the "
            f"program; run: {how_to_install('onnx')}"
        )
    from qat.extensions.targets.onnx_program import save

    codes = {name: codes_of(name, module) for name, module in quantized_modules(model).items()}
    save(model, codes, tuple(directory / name for name in (FILE_NAME, EXACT_NAME, DATA_NAME)))
    settings = json.dumps(_genai_config(model), indent=2) + "\n"
    (directory / "genai_config.json").write_text(settings, encoding="utf-8")
    write_config(model, tokenizer, directory)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits of the program that does not round what its products read.

    Raises:
        ValueError: the other one gives logits that rounding does not explain.
    """
    exact, fast = logits(model, directory / EXACT_NAME, ids), directory / FILE_NAME
    moved = ((logits(model, fast, ids, FAST) - exact).norm() / exact.norm()).item()
    if not moved < MOVED:  # NaN too
        raise ValueError(f"inputs of 8 bits move its logits by {moved:.0%} of their norm")
    logger.info("inputs of 8 bits move the logits of %s by %.1f %%", FILE_NAME, 100 * moved)
    return exact


def logits(
    model: PreTrainedModel, program: Path, ids: Tensor, options: dict[str, str] | None = None
) -> Tensor:
    """Return the logits `(B, S, V)` of a program, with `options` as settings of its session.

    It is called as `steps` says.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # errors alone
    settings.intra_op_num_threads = torch.get_num_threads()
    for name, value in (options or {}).items():
        settings.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(program, settings, ["CPUExecutionProvider"])
    config = model.config
    names = [each.name for each in session.get_inputs()]
    empty = np.zeros((1, config.num_key_value_heads, 0, head_dim(config)), np.float32)
    rows = []
    for row in ids.numpy():
        state, found = {name: empty for name in names if name.startswith("past")}, []
        for part in steps(ids.shape[1]):
            given = {"input_ids": row[None, part], "attention_mask": np.ones((1, part.stop), int)}
            part, *present = session.run(None, given | state)
            state, found = dict(zip(state, present, strict=True)), [*found, part]
        rows.append(np.concatenate(found, axis=1))
    return torch.from_numpy(np.concatenate(rows))


def _genai_config(model: PreTrainedModel) -> dict[str, object]:
    """Return the contents of genai_config.json: names of inputs, sizes, special tokens."""
    config, generation = model.config, model.generation_config
    length = config.max_position_embeddings
    tokens = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        own = None if generation is None else getattr(generation, name)
        tokens[name] = getattr(config, name) if own is None else own
    if tokens["pad_token_id"] is None:  # it is needed where sequences of a batch end early
        end = tokens["eos_token_id"]
        tokens["pad_token_id"] = end[0] if isinstance(end, list) else end
    return {
        "model": {
            **{name: value for name, value in tokens.items() if value is not None},
            "type": config.model_type,
            "vocab_size": config.vocab_size,
            "context_length": length,
            "decoder": {
                "session_options": {"provider_options": [], **FAST},
                "filename": FILE_NAME,
                "head_size": head_dim(config),
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.num_attention_heads,
                "num_hidden_layers": config.num_hidden_layers,
                "num_key_value_heads": config.num_key_value_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": length, "do_sample": False, "past_present_share_buffer": True},
    }
