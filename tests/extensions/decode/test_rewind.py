"""Models that go back in their cache: what they read again is as if they had never read on."""

import pytest
import torch
from quantized import tiny_quantized, with_kv, with_rounded_inputs
from tiny import LONGROPE, tiny_model
from transformers import MambaConfig, MambaForCausalLM

from qat.backend.cpu import CpuBackend
from qat.errors import ConfigError
from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.rewind import RewindableModel, RewindableStep, rewindable
from qat.extensions.decode.step import DecodeStep
from qat.models.language_model import LanguageModel
from qat.quant.spec import LutSpec

PACKED = LutSpec(bits=2, group_size=16, scale_bits=8)
RANGE = {"initializer_range": 0.3}
MODELS = {
    "qwen3": lambda: tiny_model("qwen3", **RANGE, num_attention_heads=4, num_key_value_heads=2),
    "packed, biases": lambda: tiny_quantized("llama", PACKED, **RANGE, attention_bias=True),
    "rounded inputs": lambda: with_rounded_inputs(tiny_quantized("qwen3", PACKED, **RANGE), "int8"),
    "keys and values of 4 bits": lambda: with_kv(tiny_model("qwen3", **RANGE), 4),
    "angles by length": lambda: tiny_model("llama", **RANGE, **LONGROPE),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_of_whole_forwards(name: str) -> None:
    """Some tokens, then from earlier positions on others, one or several at once."""
    model = LanguageModel(MODELS[name]())
    first, ids = torch.randint(1, 320, (2, 1, 14))
    whole = model.model(ids).logits[0]
    opened = [RewindableModel(model)]
    if DecodeStep.fits(model):
        opened.append(rewindable(Decoder(LanguageModel(MODELS[name]()))))
        assert isinstance(opened[1], RewindableStep)
    for each in opened:
        slack = {"rtol": 0, "atol": 1e-4 * whole.abs().max().item()}
        begun = each.begin(torch.cat([ids[:, :5], first[:, 5:8]], 1), 14)
        assert begun.shape == (1, 320)
        for start, end in ((5, 9), (9, 10), (10, 14), (7, 9), (6, 14)):
            each(first[0, start - 1 : end], torch.tensor([start - 1]))
            each(ids[0, start - 1 : start], torch.tensor([start - 1]))
            found = each(ids[0, start:end], torch.tensor([start]))
            torch.testing.assert_close(found, whole[start:end], **slack)


def test_what_cannot_go_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    states = LanguageModel(MambaForCausalLM(MambaConfig(**sizes)).eval())
    for model, found in (
        (states, "MambaForCausalLM keeps"),
        (LanguageModel(tiny_model("gemma3")), "Gemma3ForCausalLM keeps DynamicSlidingWindowLayer"),
    ):
        with pytest.raises(ConfigError, match=found):
            rewindable(model)
    monkeypatch.setattr(CpuBackend, "is_traced", True)
    with pytest.raises(ConfigError, match="draft: cpu compiles each length"):
        rewindable(LanguageModel(tiny_model("qwen3")))
