"""The compute dtype: nothing that a checkpoint holds changes."""

import torch
from families import build
from tiny import tiny_model

from qat.models.language_model import LanguageModel
from qat.models.precision import compute_in

IDS = torch.arange(6).view(1, 6)
POSITIONS = torch.arange(6)[None]


def test_what_survives_the_cast_is_cast_and_the_rest_stays() -> None:
    model = tiny_model()
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding.copy_(embedding.bfloat16())  # exact
        model.model.norm.weight.fill_(1.0001)  # not exact
    model.requires_grad_(False)
    learns = model.model.layers[0].input_layernorm.weight.requires_grad_(True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    compute_in(model, torch.bfloat16)
    assert embedding.dtype == torch.bfloat16
    assert model.model.norm.weight.dtype == torch.float32
    assert learns.dtype == torch.float32
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.float(), before[name])


def test_the_residual_stream_has_the_compute_dtype_until_ended() -> None:
    language_model = LanguageModel(tiny_model())
    end = compute_in(language_model.model, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        embedded = language_model.model.get_input_embeddings()(IDS)
        hidden = language_model.hidden(IDS, POSITIONS)
    assert embedded.dtype == torch.bfloat16 and hidden.isfinite().all()
    end()
    assert language_model.model.get_input_embeddings()(IDS).dtype == torch.float32


def test_a_layer_norm_that_stands_still_reads_positions_of_float32() -> None:
    model = build("BartForCausalLM").requires_grad_(False)  # its positions do not survive a cast
    expected = model(IDS).logits
    compute_in(model, torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual = model(IDS).logits
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)
