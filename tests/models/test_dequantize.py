"""Checkpoints that others quantized are read as the floats that they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.errors import CheckpointError
from qat.models.checkpoint import save_checkpoint
from qat.models.dequantize import AWQ_ORDER
from qat.models.load import load_model
from qat.nn.swap import linear_names

GROUP = 16


def packed_rows(numbers: Tensor, bits: int) -> Tensor:
    """Numbers along the last dimension, N in an int32, lowest bits first."""
    N = 32 // bits
    shifts = torch.arange(0, 32, bits)
    words = (numbers.long().view(len(numbers), -1, N) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq(bits: int, offset: int, *, shuffles: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a GPTQ linear of 64 inputs and 32 outputs, and its weight `(O, I)`."""
    q, zeros = torch.randint(2**bits, (64, 32)), torch.randint(1, 2**bits, (4, 32))
    scales = (torch.rand(4, 32) * 0.02 + 0.01).half()
    groups = torch.arange(64) // GROUP
    groups = groups[torch.randperm(64)] if shuffles else groups
    weight = (q - zeros[groups]).half() * scales[groups]
    tensors = {
        "qweight": packed_rows(q.T, bits).T.contiguous(),
        "qzeros": packed_rows(zeros - offset, bits),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return tensors, weight.T


def awq() -> tuple[dict[str, Tensor], Tensor]:
    """The same of AWQ, whose numbers lie in an order of its own."""
    q, zeros = torch.randint(16, (64, 32)), torch.randint(16, (4, 32))
    scales = (torch.rand(4, 32) * 0.02 + 0.01).half()
    groups = torch.arange(64) // GROUP
    nibbles = torch.tensor(AWQ_ORDER).argsort()

    def packed(numbers: Tensor) -> Tensor:
        return packed_rows(numbers.view(len(numbers), -1, 8)[:, :, nibbles].flatten(1), 4)

    tensors = {"qweight": packed(q), "qzeros": packed(zeros), "scales": scales}
    return tensors, ((q - zeros[groups]).half() * scales[groups]).T


def checkpoint(out: Path, settings: dict[str, object], linear: dict[str, Tensor]) -> str:
    """A tiny model whose up projections are that linear."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=32)
    model.half().save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    state = load_file(out / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj"
        del state[f"{name}.weight"]
        state |= {f"{name}.{key}": tensor.clone() for key, tensor in linear.items()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = settings
    (out / "config.json").write_text(json.dumps(config))
    return str(out)


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize(("kind", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_is_read_as_floats(
    bits: int, kind: str, offset: int, shuffles: bool, tmp_path: Path
) -> None:
    linear, weight = gptq(bits, offset, shuffles=shuffles)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": kind}
    found = load_model(checkpoint(tmp_path / "in", settings, linear), device="cpu", dtype="fp32")
    assert torch.equal(found.model.model.layers[1].mlp.up_proj.weight, weight.float())


def test_awq_is_read_as_floats_and_can_be_converted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    linear, weight = awq()
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    source = checkpoint(tmp_path / "in", settings, linear)
    with caplog.at_level("INFO", "qat"):
        found = load_model(source, device="cpu", dtype="fp32")
    assert torch.equal(found.model.model.layers[0].mlp.up_proj.weight, weight.float())
    assert "its awq weights are read as floats" in caplog.text
    convert_model(found, ConvertConfig(to="q2a4", device="cpu"))
    save_checkpoint(found.model, tiny_tokenizer(), tmp_path / "out")
    again = load_model(str(tmp_path / "out"), device="cpu")
    assert len(linear_names(again.model)) == 14


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq weights of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq weights of 4 bits .version g"),
        ({"quant_method": "eetq"}, "weights quantized by eetq, expected floats or weights of"),
    ],
)
def test_other_formats_are_refused(settings: dict, said: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", settings, gptq(4, 1, shuffles=False)[0])
    with pytest.raises(CheckpointError, match=said) as caught:
        load_model(source, device="cpu")
    assert "\n" not in str(caught.value)


def test_a_packed_weight_without_its_scales_is_damaged(tmp_path: Path) -> None:
    linear, _ = gptq(4, 1, shuffles=False)
    del linear["scales"]
    source = checkpoint(tmp_path / "in", {"quant_method": "gptq", "bits": 4}, linear)
    with pytest.raises(CheckpointError, match="up_proj lacks its qzeros or scales"):
        load_model(source, device="cpu")
