"""Target ane: tables for some rows and scales of rows behind the product."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_model
from torch import nn
from transformers import PreTrainedModel

from qat.convert.quantize import quantize_model
from qat.convert.shipping import Shipping
from qat.errors import CheckpointError, ConfigError, ExportError
from qat.export.config import ExportConfig
from qat.export.model import export_model
from qat.export.targets import check_model, ships_to
from qat.extensions.targets import ane, coreml
from qat.extensions.vllm.packed import read_config
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.stored_state import quantized_modules
from qat.nn.latent import to_latent
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import with_tables
from qat.quant.spec import PRESETS, LutSpec, PlanRule, QuantPlan
from qat.ranks import Ranks

pytest.importorskip("coremltools")
from coremltools.converters.mil.frontend.milproto.load import load  # noqa: E402
from coremltools.models import MLModel  # noqa: E402

# coremltools leaves temporary directories to their finalizers
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")

TO = Shipping({"ane": ane})


def trained() -> PreTrainedModel:
    """A student for the Neural Engine whose tables, scales and latent weights have moved."""
    model = tiny_model("qwen3", num_hidden_layers=1, tie_word_embeddings=True, attention_bias=True)
    nn.init.normal_(model.model.layers[0].self_attn.o_proj.bias)
    plan = TO.plan(with_tables(PRESETS["q2a4"], model, 4), model)
    assert plan.name == "q2a4_ane"
    quantize_model(LanguageModel(model), plan)
    to_latent(model, list(quant_linears(model)))
    ids, linears = torch.arange(12).view(1, 12), quant_linears(model)
    optimizer = torch.optim.SGD([p for m in linears.values() for p in m.parameters()], lr=0.1)
    losses, before = [], {n: m.codebook.detach().clone() for n, m in linears.items()}
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(linears[n].codebook, old) for n, old in before.items())
    return model


def tables_in(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the look-up tables of a package that has no scales within a weight."""
    package = MLModel(str(directory / coreml.FILE_NAME), skip_model_load=True)
    spec = package.get_spec()
    program = load(spec, spec.specificationVersion, file_weights_dir=package.weights_dir)
    (main,) = program.functions.values()
    assert "constexpr_blockwise_shift_scale" not in {op.op_type for op in main.operations}
    return {op.name: op.lut.val.shape for op in main.operations if "lut" in op.op_type}


def test_a_trained_student_of_tables_is_stored_and_exported(tmp_path: Path) -> None:
    model = trained()
    save_checkpoint(model, None, tmp_path / "student")
    loaded = load_checkpoint(tmp_path / "student")
    assert loaded.config.quantization_config.features == ["tables"]
    for name, module in quantized_modules(loaded).items():
        assert torch.equal(module.quantized_weight(), model.get_submodule(name).quantized_weight())
        is_linear = name != "model.embed_tokens"
        assert (module.spec.table_rows, module.spec.scale_bits) == (16 * is_linear, 16)
    ships = ships_to(tmp_path / "student")
    assert ships["ane"] is None and ships["coreml"] is None and ships["dense"] is None
    assert "a codebook for each 16 rows" in ships["openvino"].reason
    config = loaded.config.quantization_config.to_dict()
    with pytest.raises(CheckpointError, match="tables"):
        read_config(config)
    with pytest.raises(ConfigError, match="2 processes"):
        to_latent(loaded, list(quant_linears(loaded)), Ranks(0, 2, torch.device("cpu")))

    for dtype, most in (("fp32", 1e-5), ("fp16", 0.05)):
        out, config = tmp_path / dtype, ExportConfig(to="ane", dtype=dtype)
        assert export_model(str(tmp_path / "student"), config, out).logits_max_diff < most
    tables = tables_in(out)
    assert tables["model_layers_0_mlp_up_proj_weight"] == (4, 1, 4, 1)
    assert tables["model_layers_0_self_attn_q_proj_weight"] == (4, 1, 16, 1)
    assert tables["model_embed_tokens_weight"] == (1, 1, 16, 1)


def test_other_scales_than_those_of_rows_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    student = tiny_model("llama", num_hidden_layers=1)
    quantize_model(LanguageModel(student), PRESETS["q2a2"])
    with pytest.raises(ExportError, match=r"16 features of a row.*--for ane"):
        check_model("ane", student)
    odd = ane.scheme(LutSpec(bits=2), (24, 32))
    assert (odd.table_rows, odd.group_size) == (0, 32)
    assert ane.scheme(LutSpec(bits=3, codebook="int"), (32, 64)).codebook == "int"
    sized = ane.scheme(LutSpec(bits=2), (32, 64))
    assert ane.file_bits(sized, (32, 64)) == 32 * 64 * 2 + 32 * 16 + 2 * 4 * 16
    rule = PlanRule(pattern="*embed_tokens", spec=LutSpec(bits=2, group_size=32, table_rows=8))
    with pytest.raises(ConfigError, match=r"embed_tokens: table_rows=8"):
        quantize_model(LanguageModel(model), QuantPlan(name="x", rules=(rule,)))
