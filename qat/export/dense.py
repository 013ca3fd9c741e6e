"""Target `dense`: a plain Hugging Face directory that any program can read."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.export.parts import (
    any_model,
    as_it_is,
    cast,
    float_skeleton,
    loses_nothing,
    reloaded_logits,
    without_quantized,
)
from qat.models.checkpoint import copy_processors, finish_config, quiet_transformers
from qat.models.stored_state import narrowed, quantized_modules
from qat.nn.lut_embedding import TiedLutHead
from qat.nn.sites import close_sites, open_sites
from qat.nn.swap import embedding_dtype

COMPARED = "bits"
HOLDS_ADAPTERS = True
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
lost, scheme, check, read_logits = loses_nothing, as_it_is, any_model, reloaded_logits
HOW_TO_LOAD = """\
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```
"""


def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model with ordinary linears in `dtype`, by default that which it computes in.

    Raises:
        ExportError: a value does not fit into it.
    """
    dtype = dtype or embedding_dtype(model)
    state = dense_state_dict(model, dtype)
    with torch.device("meta"):
        dense = float_skeleton(model, dtype)
        open_sites(dense)
    dense.generation_config = model.generation_config
    dense.load_state_dict(state, assign=True)
    dense.tie_weights()
    close_sites(dense)
    with quiet_transformers():
        dense.save_pretrained(directory, state_dict=narrowed(dense.state_dict()))
    finish_config(directory, dense, dtype=dtype)
    copy_processors(model, directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def dense_state_dict(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the state of the same model with ordinary linears and tables, in `dtype`.

    Inputs of the linears are not quantized in it.

    Raises:
        ExportError: a finite value overflows `dtype`.
    """
    state = without_quantized(model)
    for name, module in quantized_modules(model).items():
        state[f"{name}.weight"] = module.quantized_weight()
    for name, module in model.named_modules():
        if isinstance(module, TiedLutHead):
            state[f"{name}.weight"] = module.table.quantized_weight()
    return {name: cast(name, tensor, dtype) for name, tensor in state.items()}
