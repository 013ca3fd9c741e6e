"""Sparse models behind the interface that training, judging and generation use."""

import pytest
import torch
from nsa_model_case import SMALL, opened_model, small, sparse_model
from quantized import SPECS, with_random_codes
from tiny import tiny_tokenizer

from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.step import DecodeStep
from qat.extensions.nsa.kernels import router
from qat.extensions.nsa.swap import unswap_attention
from qat.generate.text import generate_text
from qat.models import document_attention as attention
from qat.models.flops import forward_flops
from qat.models.language_model import LanguageModel
from qat.models.regions import attention_kernel, join_projections, part_projections
from qat.models.split_check import check_split
from qat.nn.step import form_weights

B, S = 2, 100
IDS = torch.arange(B * S).view(B, S) * 3 % 320
POSITIONS = torch.cat([torch.arange(37), torch.arange(63)]).expand(B, -1)


@pytest.mark.parametrize("config", [SMALL, small(layers=(1,)), small(mode="merged")])
@torch.no_grad()
def test_packed_or_not_it_is_the_model_itself(config) -> None:
    model = opened_model(config=config)
    expected = model(IDS, position_ids=POSITIONS).logits
    one = model(IDS).logits
    wrapped = LanguageModel(model)
    check_split(wrapped)
    packed = wrapped.logits(wrapped.hidden(IDS, POSITIONS))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    whole = torch.arange(S).expand(B, S)
    for is_packed in (True, False):
        found = wrapped.logits(wrapped.hidden(IDS, whole, is_packed=is_packed))
        torch.testing.assert_close(found, one, rtol=0, atol=1e-5)


@torch.no_grad()
def test_no_mask_over_pairs_is_made(monkeypatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError

    wrapped = LanguageModel(opened_model())
    monkeypatch.setattr(attention, "sdpa_mask", refused)
    monkeypatch.setattr("qat.models.language_model.document_mask", refused)
    wrapped.hidden(IDS, POSITIONS)
    tokens = torch.ones(B, S, dtype=torch.long)
    whole = wrapped.model(IDS, attention_mask=tokens).logits
    torch.testing.assert_close(whole, wrapped.model(IDS).logits)
    tokens[0, :5] = 0
    assert wrapped.model(IDS, attention_mask=tokens).logits.isfinite().all()
    unswap_attention(wrapped.model)
    with pytest.raises(AssertionError):
        wrapped.hidden(IDS, POSITIONS)


@torch.no_grad()
def test_joined_projections_compute_the_same() -> None:
    model = with_random_codes(opened_model(), SPECS["lut2"])
    wrapped = LanguageModel(model)
    form_weights(model, torch.float32)
    expected = wrapped.hidden(IDS, POSITIONS)
    join_projections(model)
    form_weights(model, torch.float32)
    assert hasattr(model.model.layers[0].self_attn, "qkv")
    torch.testing.assert_close(wrapped.hidden(IDS, POSITIONS), expected, rtol=0, atol=1e-5)
    part_projections(model)
    assert not hasattr(model.model.layers[0].self_attn, "qkv")
    torch.testing.assert_close(wrapped.hidden(IDS, POSITIONS), expected, rtol=0, atol=1e-5)


def test_the_packed_loop_leaves_it_to_transformers() -> None:
    wrapped = LanguageModel(opened_model(config=small(layers=(0,))))
    assert not DecodeStep.fits(wrapped) and not Decoder.fits(wrapped)
    prompt = "the cat sat on the mat " * 12
    said = [
        generate_text(wrapped, tiny_tokenizer(), prompt, max_new_tokens=20, temperature=0, raw=True)
        for _ in range(2)
    ]
    assert said[0] == said[1] and said[0].num_tokens > 0


@torch.no_grad()
def test_what_runs_is_logged_and_named(monkeypatch, caplog) -> None:
    wrapped = LanguageModel(opened_model())
    monkeypatch.setattr(router, "_logged", set())
    with caplog.at_level("INFO", router.__name__):
        wrapped.hidden(IDS, POSITIONS)
        wrapped.hidden(IDS, POSITIONS)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "nsa: reference"
    ]
    models = wrapped, LanguageModel(opened_model(config=small(layers=(1,))))
    kernels = [attention_kernel(each, S, torch.float32, is_compiled=False) for each in models]
    assert kernels == ["nsa", "sdpa"]


def test_flops_are_those_of_keys_that_are_read() -> None:
    def keys(config: object, length: int) -> float:
        """Return the mean number of keys of a query, from the FLOPs that sparse attention saves."""
        sparse, dense = sparse_model(config=config), sparse_model(config=config)
        unswap_attention(dense)
        flops = [forward_flops(LanguageModel(model), length) for model in (sparse, dense)]
        saved = (flops[1] - flops[0]) / (4.0 * 2 * 32 * 2)
        return (length + 1) / 2 - saved

    merged = small(mode="merged")
    assert keys(merged, 64) == pytest.approx(65 / 2)
    assert keys(merged, 128) == pytest.approx(sum(min(t + 1, 64) for t in range(128)) / 128)
    reads = [min(t + 1, 64) + min(t + 1, 16) + max(0, (t + 1 - 8) // 4 + 1) for t in range(128)]
    assert keys(SMALL, 128) == pytest.approx(sum(reads) / 128)
