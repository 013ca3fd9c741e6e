"""Small GGUF files whose tables have types of ggml, as real ones do."""

from pathlib import Path

import torch
from cache_case import TOKENIZER
from tiny import tiny_model
from torch import Tensor

from qat.convert.quantize import quantize_model
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.extensions.targets.gguf import FILE_NAME
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.nn.swap import put_table, table_names
from qat.quant.integers import exact_integers, integer_spec
from qat.quant.spec import LutSpec, PlanRule, QuantPlan

INT4 = QuantPlan(
    name="int4", rules=(PlanRule(pattern="*", spec=LutSpec(bits=4, codebook="int", group_size=32)),)
)
TYPES = {"Q4_0": 4, "Q5_0": 5, "Q8_0": 8}


def rounded(table: Tensor, kind: str) -> Tensor:
    """`table` after a round trip through that type of ggml."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(table.numpy(), number)
    return torch.from_numpy(gguf.quants.dequantize(blocks, number).copy())


def gguf_of(place: Path, embedding: str, head: str, *, same: bool = True) -> Path:
    """A GGUF file of a small llama whose tables are of these types of ggml; tied for no head."""
    model = tiny_model("llama", tie_word_embeddings=not head, initializer_range=0.2)
    table = model.model.embed_tokens.weight.detach().clone()
    quantize_model(LanguageModel(model), INT4)
    other = table if same else torch.randn(table.shape) * 0.2
    for name, kind, values in zip(
        table_names(model), (embedding, head), (table, other), strict=False
    ):
        bits = TYPES[kind]
        put_table(model, name, exact_integers(rounded(values, kind), bits), integer_spec(bits))
    save_checkpoint(model, TOKENIZER, place / "packed")
    export_model(str(place / "packed"), ExportConfig(to="gguf"), place / "out")
    return place / "out" / FILE_NAME
