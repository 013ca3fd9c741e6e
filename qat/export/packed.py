"""Target `packed`: the checkpoint itself, without what training keeps beside it."""

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.export.parts import reloaded_logits
from qat.models.checkpoint import write_checkpoint
from qat.quant.spec import LutSpec

COMPARED = "bits"
HOLDS_ADAPTERS = True
HOLDS_TABLES = True
HOW_TO_LOAD = """\
```python
import qat  # registers the format
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```
"""


def lost(spec: LutSpec, shape: tuple[int, int]) -> str | None:
    """None: a packed checkpoint holds every format."""
    return None


def scheme(spec: LutSpec, shape: tuple[int, int]) -> LutSpec:
    """`spec` as it is."""
    return spec


def check(model: PreTrainedModel) -> None:
    """Every model can be written."""


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write a packed checkpoint.

    Raises:
        CheckpointError: a scale is not finite as stored.
    """
    write_checkpoint(model, tokenizer, directory)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Logits of the model that transformers reads back."""
    return reloaded_logits(model, directory, ids)
