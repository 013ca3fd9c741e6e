"""Target `coreai`: an .aimodel for Apple's Core AI, run here by Core AI's own runtime on the CPU.

A weight is a `lut_to_dense`, with a table for some rows or for all, and the scale of a row
multiplies the product: what the Neural Engine computes right (see `ane`). The rest is the model of
transformers as torch exports it. On a CPU Core AI rounds each term and each partial sum of a
float16 product to float16, so products and attention of a float16 program are in float32. Only this
file imports coreai and coreai_torch.

Shapes: O out_features, I in_features, T tables, d weights of an index, S positions, V words.
"""

import asyncio
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qat.export.dense import dense_state_dict
from qat.export.parts import DtypeError, float_model
from qat.extensions.targets import ane
from qat.extensions.targets.coreml import Palette, length_of, palette
from qat.extensions.targets.shared import DTYPE_NAMES, plain_decoder, write_config
from qat.models.stored_state import quantized_modules
from qat.nn.lut_embedding import TiedLutHead
from qat.nn.swap import embedding_dtype, replace_module

COMPARED = "constants"
HOLDS_ADAPTERS = False
HOLDS_TABLES = True
HOLDS_ACTIVATIONS = (None,)
FILE_NAME = "model.aimodel"
DTYPES = (torch.float16, torch.float32)
"""Dtypes in which a program is written."""
SUMS = ("mm", "addmm", "bmm", "scaled_dot_product_attention")
"""Operators of a traced model that add up products."""
lost, scheme, file_bits = ane.lost, ane.scheme, ane.file_bits
HOW_TO_LOAD = """\
```python
# pip install coreai-core transformers
import asyncio

import numpy as np
from coreai.authoring import AIModelAsset
from coreai.runtime import NDArray
from transformers import AutoTokenizer

tokenizer, asset = AutoTokenizer.from_pretrained("DIR"), AIModelAsset.load("DIR/model.aimodel")
ids = tokenizer("Once upon a time").input_ids


async def logits():
    async with asset.executable() as model:
        function = model.load_function("main")
        length = function.desc.input_descriptor("input_ids").shape[1]
        padded = np.array([ids + [0] * (length - len(ids))], np.int32)  # what follows is not seen
        found = await function({"input_ids": NDArray(padded)})
        return found["logits"].numpy()[0, len(ids) - 1]


print(asyncio.run(logits()))
```

The program has a fixed length and no state: it reads a prompt and gives the logits of every place.
"""


def check(model: PreTrainedModel) -> None:
    """Refuse an architecture that is not known to become a program."""
    plain_decoder(model, "a Core AI program")


def write(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path
) -> None:
    """Write model.aimodel, config.json and the tokenizer, in float16 or float32."""
    dtype = embedding_dtype(model)
    if dtype not in DTYPES:
        raise DtypeError(
            f"Core AI programs are not written in {DTYPE_NAMES[dtype]}, expected float16 or "
            "float32; export with --dtype fp16 or fp32"
        )
    ids = torch.zeros(1, length_of(model), dtype=torch.int32)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # libraries warn about each other
        import coreai_torch

        exported = torch.export.export(_Logits(with_palettes(model)), (ids,))
        exported = exported.run_decompositions(coreai_torch.get_decomp_table())
        sum_in_float32(exported.graph)
        converter = coreai_torch.TorchConverter()
        converter.add_exported_program(exported, output_names=["logits"])
        converter.to_coreai().save_asset(directory / FILE_NAME)
    write_config(model, tokenizer, directory)


def read_logits(model: PreTrainedModel, directory: Path, ids: Tensor) -> Tensor:
    """Return the logits that Core AI computes from the saved program."""
    from coreai.authoring import AIModelAsset
    from coreai.runtime import NDArray

    S = ids.shape[1]
    padded = torch.zeros(1, length_of(model), dtype=torch.int32)
    padded[:, :S] = ids

    async def run() -> Tensor:
        async with AIModelAsset.load(directory / FILE_NAME).executable() as program:
            function = program.load_function("main")
            found = await function({"input_ids": NDArray(padded.numpy())})
            return torch.from_numpy(found["logits"].numpy().copy()).float()

    return asyncio.run(run())[:, :S]


def with_palettes(model: PreTrainedModel) -> PreTrainedModel:
    """Return the float model of `model`, in its dtype, whose quantized weights are looked up."""
    import coreai_torch._compression.custom_layers  # noqa: F401 - defines the operator

    dtype = embedding_dtype(model)
    dense = float_model(model, dense_state_dict(model, dtype), dtype)
    heads = {n: m.table for n, m in model.named_modules() if isinstance(m, TiedLutHead)}
    made: dict[int, _Lookup] = {}
    for name, module in {**quantized_modules(model), **heads}.items():
        if id(module) not in made:
            made[id(module)] = _Lookup(palette(name, module, dtype))
        old = dense.get_submodule(name)
        is_embedding = isinstance(old, nn.Embedding)
        own = _Rows(made[id(module)]) if is_embedding else _Product(made[id(module)], old.bias)
        replace_module(dense, name, own)
    return dense


def sum_in_float32(graph: Graph) -> None:
    """Cast what the sums of a traced model read to float32, and their results back.

    With 1,536 terms a float16 sum of Core AI on a CPU is off by 28 roundings of the result.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target.__name__.split(".")[0] not in SUMS:
            continue
        result = node.meta["val"]
        if result.dtype != torch.float16:
            continue
        for read in [n for n in node.all_input_nodes if n.meta["val"].dtype == torch.float16]:
            with graph.inserting_before(node):
                node.replace_input_with(read, _cast(graph, read, torch.float32))
        users, node.meta["val"] = list(node.users), result.float()
        with graph.inserting_after(node):
            rounded = _cast(graph, node, torch.float16)
        for user in users:
            user.replace_input_with(node, rounded)


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    copy = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    copy.meta["val"] = node.meta["val"].to(dtype)
    return copy


class _Lookup(nn.Module):
    """A weight `(O, I)` as a table lookup, `lut[indices]`, and the scale of each row."""

    def __init__(self, weight: Palette) -> None:
        super().__init__()
        self.register_buffer("indices", weight.indices)
        self.register_buffer("lut", weight.lut[:, None])  # `(T, 1, C, d)`: the converter's name
        self.register_buffer("scale", weight.scale[:, 0])

    def forward(self) -> Tensor:
        """Return the weight without its scales; the converter sees the operator alone."""
        return torch.ops.coreai.lut_to_dense(self.indices, self.lut, 1)


class _Product(nn.Module):
    """`(x @ lut[indices].T) * scale + bias`."""

    def __init__(self, lookup: _Lookup, bias: Tensor | None) -> None:
        super().__init__()
        self.lookup, self.bias = lookup, bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of the inputs `(B, S, I)`."""
        y = F.linear(x, self.lookup()) * self.lookup.scale
        return y if self.bias is None else y + self.bias


class _Rows(nn.Module):
    """`lut[indices][ids] * scale[ids]`."""

    def __init__(self, lookup: _Lookup) -> None:
        super().__init__()
        self.lookup = lookup

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` `(B, S)`."""
        return F.embedding(ids, self.lookup()) * self.lookup.scale[ids][..., None]


class _Logits(nn.Module):
    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits.float()
