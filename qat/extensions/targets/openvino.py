"""Target `openvino`: a directory for openvino-genai, run by OpenVINO on a CPU.

Even levels are codes of 2, 4 or 8 bits that OpenVINO multiplies as they are: `W = scale * (code -
zero_point)`, where the zero point of levels without a zero lies between two codes. Other levels are
looked up as the program is loaded and take 32 bits in memory. The program computes in float32, but
OpenVINO may round more than it says: see `EXACT`. Only this file and openvino_program.py import
openvino.

Shapes: B sequences, S positions, V words.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.errors import ExportError, how_to_install, is_installed
from qat.extensions.targets.codes import (
    BLOCK_SIZES,
    block_size,
    blocks_bits,
    is_coded,
    stored_bits,
)
from qat.extensions.targets.shared import (
    even_levels,
    group_size_near,
    lost_by_rank,
    plain_decoder,
    refuse_all_but_float32,
    refuse_all_but_groups,
    steps,
    write_config,
)
from qat.quant.spec import LutSpec

COMPARED = "sums"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
FILE_NAME = "openvino_model.xml"
TOKENIZERS = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
EXACT = {"EXECUTION_MODE_HINT": "ACCURACY"}
"""The setting with which nothing is rounded. Without it a processor with products of bfloat16 uses
these, and keys and values are kept in 8 bits."""
HOW_TO_LOAD = f"""\
```python
# pip install openvino-genai
import openvino_genai

settings = {json.dumps(EXACT)}  # without it keys, values and products are rounded
pipeline = openvino_genai.LLMPipeline("DIR", "CPU", **settings)
print(pipeline.generate("Once upon a time", max_new_tokens=200))
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """Return why a weight would lose something; None if not: any levels with group scales."""
    return spec.lost_as_levels or lost_by_rank(spec)


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """Return even levels, without a zero up to 4 bits, in groups of a block."""
    refuse_all_but_groups(spec)
    size = group_size_near(spec.group_size, BLOCK_SIZES, shape[1])
    return even_levels(spec, size)


def file_bits(spec: LutSpec, shape: tuple[int, int]) -> int:
    """Return the bits of an `(O, I)` weight in the files, with 16-bit scales."""
    block = block_size(spec) if is_coded(spec) else spec.group_size
    return blocks_bits(shape, stored_bits(spec.bits), block)


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a program for OpenVINO")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write the program, config.json and the tokenizer, as transformers and as OpenVINO have it."""
    refuse_all_but_float32(model, "the program for OpenVINO")
    if tokenizer is not None and not is_installed("openvino_tokenizers"):
        raise ExportError(
            "the library openvino_tokenizers is not installed, expected it beside openvino to "
            f"write the tokenizer; run: {how_to_install('openvino')}"
        )
    import openvino

    from qat.extensions.targets.openvino_program import program

    openvino.save_model(program(model), directory / FILE_NAME, compress_to_fp16=False)
    write_config(model, tokenizer, directory)
    if tokenizer is not None:
        from openvino_tokenizers import convert_tokenizer

        made = convert_tokenizer(tokenizer, with_detokenizer=True)
        for each, name in zip(made, TOKENIZERS, strict=True):
            openvino.save_model(each, directory / name)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the program's logits where nothing is rounded."""
    return logits(directory, ids, EXACT)


def logits(directory: Path, ids: Tensor, settings: dict[str, str]) -> Tensor:
    """Return the logits `(B, S, V)` of the program, called as `steps` says, with `settings`."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), **settings}
    request = openvino.compile_model(directory / FILE_NAME, "CPU", settings).create_infer_request()
    rows, first = [], np.zeros(1, np.int32)
    for row in ids.numpy():
        request.reset_state()
        found = []
        for part in steps(ids.shape[1]):
            given = {"input_ids": row[None, part], "attention_mask": np.ones((1, part.stop), int)}
            given |= {"position_ids": np.array(part)[None], "beam_idx": first}
            found.append(request.infer(given)["logits"].copy())
        rows.append(np.concatenate(found, axis=1))
    return torch.from_numpy(np.concatenate(rows))
