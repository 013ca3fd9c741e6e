"""The hook: what the core gets of the extension, and what it does without."""

import pytest
import torch
from quantized import SPECS, tiny_quantized
from tiny import tiny_tokenizer

from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.step import DecodeStep
from qat.generate.text import generate_text, open_generator
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import quant_linears


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("decoded") / "student"
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), out)
    return str(out)


def test_a_decoder_speaks_where_it_fits(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_generator(source, device="cpu", dtype="fp32")[0], LanguageModel)
    monkeypatch.setattr(Decoder, "fits", staticmethod(DecodeStep.fits))
    assert isinstance(open_generator(source, device="cpu", dtype="fp32")[0], Decoder)


def test_without_it_the_model_speaks(source: str, request: pytest.FixtureRequest) -> None:
    def said() -> tuple[str, set[bool], torch.Tensor]:
        model, tokenizer = open_generator(source, device="cpu", dtype="fp32")
        has_reader = {each.reader is not None for each in quant_linears(model.model).values()}
        text = generate_text(model, tokenizer, "the cat", max_new_tokens=8, temperature=0.0).text
        with torch.no_grad():
            return text, has_reader, model.model(torch.tensor([[1, 2, 3]])).logits

    text, has_reader, logits = said()
    assert has_reader == {True}
    request.getfixturevalue("no_extensions")
    assert said()[:2] == (text, {False}) and torch.equal(said()[2], logits)
