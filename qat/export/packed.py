"""Target `packed`: the checkpoint itself, without the state of training."""

from qat.export.parts import any_model, as_it_is, loses_nothing, reloaded_logits
from qat.models.checkpoint import write_checkpoint
from qat.quant.spec import ACTIVATION_KINDS

COMPARED = "bits"
HOLDS_ADAPTERS = True
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None, *ACTIVATION_KINDS)
lost, scheme, check = loses_nothing, as_it_is, any_model
write, read_logits = write_checkpoint, reloaded_logits
HOW_TO_LOAD = """\
```python
import qat  # registers the format
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")
```
"""
