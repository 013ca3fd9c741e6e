"""Sliding-window perplexity against Hugging Face's loop, and each token scored once."""

import math
from pathlib import Path

import pytest
import torch
from tiny import VOCAB, tiny_model, tiny_tokenizer

from qat.backend.device import Backend
from qat.errors import ConfigError, DataError
from qat.evaluate.perplexity import text_perplexity
from qat.evaluate.text import Text, read_text, text_batches, windows
from qat.models.language_model import LanguageModel


def reference_nats(model: LanguageModel, ids: torch.Tensor, context: int, stride: int) -> float:
    """The loop of Hugging Face's guide, weighting each window by its tokens."""
    total, counted, previous = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = ids[None, begin:end]
        labels = window.clone()
        labels[:, : previous - begin] = -100
        scored = (labels[:, 1:] != -100).sum().item()
        with torch.no_grad():
            total += model.model(window, labels=labels).loss.item() * scored
        counted, previous = counted + scored, end
        if end == len(ids):
            return total / counted
    raise AssertionError


@pytest.mark.parametrize(
    ("num_tokens", "context", "stride"), [(50, 16, 8), (50, 16, 5), (37, 16, 15), (9, 16, 4)]
)
def test_equals_the_loop_of_hugging_face(num_tokens: int, context: int, stride: int) -> None:
    model = LanguageModel(tiny_model(initializer_range=0.3))
    ids = torch.randint(VOCAB, (num_tokens,))
    text = Text(ids, num_bytes=100)
    actual = text_perplexity(model, text, context=context, stride=stride, batch_size=2)
    expected = reference_nats(model, ids, context, stride)
    assert actual.num_tokens == num_tokens - 1
    assert actual.nats_per_token == pytest.approx(expected, rel=1e-5)
    assert actual.ppl == pytest.approx(math.exp(expected), rel=1e-4)
    bits = expected * (num_tokens - 1) / math.log(2)
    assert actual.bits_per_byte == pytest.approx(bits / 100, rel=1e-5)


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 30, 31])
@pytest.mark.parametrize(("context", "stride"), [(8, 1), (8, 3), (8, 7), (2, 1)])
def test_each_token_but_the_first_is_scored_once(
    num_tokens: int, context: int, stride: int
) -> None:
    ids = torch.arange(num_tokens)
    batches = list(text_batches(ids, context, stride, batch_size=3))
    scored = torch.cat([batch.labels[batch.mask] for batch in batches])
    assert torch.equal(scored.sort().values, ids[1:])
    assert max(len(batch.input_ids) for batch in batches) <= 3
    for begin, _, first_scored in windows(num_tokens, context, stride)[1:]:
        assert first_scored - begin >= context - stride, "less context than promised"


def test_context_and_stride_change_the_number() -> None:
    model = LanguageModel(tiny_model(initializer_range=0.3))
    text = Text(torch.randint(VOCAB, (60,)), num_bytes=60)
    settings = [(8, 4), (16, 4), (16, 8)]
    found = {
        text_perplexity(model, text, context=c, stride=s, batch_size=4).nats_per_token
        for c, s in settings
    }
    assert len(found) == 3


def test_refuses_bad_windows() -> None:
    model = LanguageModel(tiny_model())
    text = Text(torch.arange(40), num_bytes=40)
    with pytest.raises(ConfigError, match="stride=8 with context=8; .* use --stride 4"):
        text_perplexity(model, text, context=8, stride=8, batch_size=1)
    with pytest.raises(ConfigError, match="context=256, .*positions for 128.*--context 128"):
        text_perplexity(model, text, context=256, stride=8, batch_size=1)


def test_read_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat s\u00e4t on the mat", encoding="utf-8")
    text = read_text(path, tiny_tokenizer())
    assert text.num_bytes == 23
    assert tiny_tokenizer().decode(text.ids) == "the cat s\u00e4t on the mat"


def test_each_window_begins_with_the_token_for_it(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    path.write_text("the cat sat on the mat and the dog saw the cat", encoding="utf-8")
    plain = read_text(path, tokenizer)
    tokenizer.bos_token = "<|system|>"
    text = read_text(path, tokenizer)
    assert text.ids.tolist() == [tokenizer.bos_token_id, *plain.ids.tolist()]
    batches = list(text_batches(text.ids, 6, 3, batch_size=2, begin=text.begin))
    assert all((batch.input_ids[:, 0] == tokenizer.bos_token_id).all() for batch in batches)
    scored = torch.cat([batch.labels[batch.mask] for batch in batches])
    assert torch.equal(scored, plain.ids), "each token of the text once"


def test_read_text_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.txt: No such file.*check --text"):
        read_text(tmp_path / "none.txt", tiny_tokenizer())
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    with pytest.raises(DataError, match="byte 3 is not UTF-8"):
        read_text(tmp_path / "latin.txt", tiny_tokenizer())
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="holds 0 tokens"):
        read_text(tmp_path / "empty.txt", tiny_tokenizer())


def test_one_shape_is_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = LanguageModel(tiny_model(initializer_range=0.3)), set()
    text = Text(torch.randint(VOCAB, (50,)), num_bytes=100)
    sizes = {"context": 16, "stride": 8, "batch_size": 2}
    expected = text_perplexity(model, text, **sizes)
    real = model.hidden

    def hidden(ids: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
        seen.add(tuple(ids.shape))
        return real(ids, *rest, **named)

    monkeypatch.setattr(model, "hidden", hidden)
    text_perplexity(model, text, **sizes)
    assert len(seen) == 3  # a batch of one window, and the shorter last one
    seen.clear()
    monkeypatch.setattr(Backend, "fixed_shapes", lambda _: True)
    actual = text_perplexity(model, text, **sizes)
    assert seen == {(2, 16)} and actual.num_tokens == expected.num_tokens
    assert actual.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-6)
