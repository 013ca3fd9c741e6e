"""Students for engines that store weights as codes: a format of its own in each linear."""

from pathlib import Path

import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from qat.convert.quantize import quantize_model
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.language_model import LanguageModel
from qat.nn.swap import table_names, with_tables
from qat.quant.spec import CodebookKind, LutSpec, PlanRule, QuantPlan

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}


def even(codebook: CodebookKind, bits: int, group_size: int = 32) -> LutSpec:
    """Evenly spaced levels with 8-bit scales."""
    return LutSpec(bits=bits, codebook=codebook, group_size=group_size, scale_bits=8)


MIXED = {  # and one linear in floating point
    "q_proj": even("seq", 3),
    "v_proj": even("int", 8),
    "o_proj": even("seq", 1),
    "gate_proj": even("seq", 2),
    "up_proj": even("ternary", 2, 64),
    "down_proj": even("int", 4, 96),
}


def mixed(
    place: Path, formats: dict[str, LutSpec], tables: LutSpec | None, **shape: object
) -> PreTrainedModel:
    """A llama saved in `place`, with `formats` of linears by name, and biases."""
    settings = {**SHAPE, **shape}
    model = tiny_model("llama", initializer_range=0.2, attention_bias=True, **settings)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    rules = tuple(PlanRule(pattern=f"*.{name}", spec=spec) for name, spec in formats.items())
    plan = QuantPlan(name="mixed", rules=rules)
    if tables is not None:
        plan = with_tables(plan, model, dict.fromkeys(table_names(model), tables))
    quantize_model(LanguageModel(model), plan)
    save_checkpoint(model, tiny_tokenizer(), place)
    return load_checkpoint(place, torch.float32)
