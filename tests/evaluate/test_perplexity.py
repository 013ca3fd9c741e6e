"""Sliding-window perplexity against Hugging Face's loop, and each token scored once."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import LONGROPE, VOCAB, tiny_model, tiny_tokenizer

from qat.backend.base import Backend
from qat.data.text import Tokens
from qat.errors import ConfigError, DataError
from qat.evaluate.config import EvalConfig
from qat.evaluate.text import Text, read_text, text_batches, text_perplexity
from qat.models.language_model import LanguageModel


def one_text(ids: torch.Tensor) -> Text:
    return Text([Tokens(ids.tolist(), None)], num_bytes=100)


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
    text = one_text(ids)
    actual = text_perplexity(model, text, context=context, stride=stride, batch_size=2)
    expected = reference_nats(model, ids, context, stride)
    assert actual.num_tokens == num_tokens - 1
    assert actual.nats_per_token == pytest.approx(expected, rel=1e-5)
    assert actual.ppl == pytest.approx(math.exp(expected), rel=1e-4)
    bits = expected * (num_tokens - 1) / math.log(2)
    assert actual.bits_per_byte == pytest.approx(bits / 100, rel=1e-5)


def test_refuses_bad_windows() -> None:
    model = LanguageModel(tiny_model())
    text = one_text(torch.arange(40))
    with pytest.raises(ConfigError, match="stride=8 with context=8; .* use --stride 4"):
        EvalConfig(text="a.txt", context=8, stride=8).check_named()
    with pytest.raises(ConfigError, match="context=256, .*--context 128"):
        text_perplexity(model, text, context=256, stride=8, batch_size=1)


def test_read_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the cat s\u00e4t on the mat", encoding="utf-8")
    text = read_text(EvalConfig(text=path), tiny_tokenizer())
    assert text.num_bytes == 23
    assert tiny_tokenizer().decode(text.documents[0].ids) == "the cat s\u00e4t on the mat"


def test_each_window_begins_with_the_token_for_it(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    path.write_text("the cat sat on the mat and the dog saw the cat", encoding="utf-8")
    (plain,) = read_text(EvalConfig(text=path), tokenizer).documents
    tokenizer.bos_token = "<|system|>"
    text = read_text(EvalConfig(text=path), tokenizer)
    assert text.documents[0].ids == [tokenizer.bos_token_id, *plain.ids]
    batches = list(text_batches(text, 6, 3, batch_size=2))
    assert all((batch.input_ids[:, 0] == tokenizer.bos_token_id).all() for batch in batches)
    scored = torch.cat([batch.labels[batch.mask] for batch in batches])
    assert scored.tolist() == plain.ids, "each token of the text once"


def test_read_text_refuses(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    (tmp_path / "empty.txt").write_text("")
    for name, message in [
        ("none.txt", "none.txt: No such file"),
        ("latin.txt", r"not UTF-8 text \(byte 3\)"),
        ("empty.txt", "holds 0 tokens"),
    ]:
        with pytest.raises(DataError, match=message):
            read_text(EvalConfig(text=tmp_path / name), tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"targets=assistant, but text=.*empty.txt"):
        read_text(EvalConfig(text=tmp_path / "empty.txt", targets="assistant"), tiny_tokenizer())


QUESTIONS = ["the cat sat", "the dog saw the cat and the mat", "on"]
ANSWERS = ["on the mat and the dog", "the", "the cat s\u00e4t on the mat and the dog saw the cat"]


def chat_file(place: Path) -> Path:
    """Chats of one question each, the last of them of two."""
    pairs = list(zip(QUESTIONS, ANSWERS, strict=True))
    path = place / "chats.jsonl"
    rows = [
        [
            message
            for question, answer in turns
            for message in (
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            )
        ]
        for turns in ([pairs[0]], [pairs[1]], pairs[1:])
    ]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows), encoding="utf-8")
    return path


def test_assistants_alone_are_scored_in_chats(tmp_path: Path) -> None:
    """The expected value is a loop over each chat alone, with its tokens written by hand."""
    model, tokenizer = LanguageModel(tiny_model(initializer_range=0.3)), tiny_tokenizer()
    nats, num_bytes = [], 0
    pairs = list(zip(QUESTIONS, ANSWERS, strict=True))
    for turns in ([pairs[0]], [pairs[1]], pairs[1:]):
        ids, counts = [], []
        for question, answer in turns:
            asked = tokenizer(f"<|user|>{question}<|end|><|assistant|><think></think>").input_ids
            said = tokenizer(f"{answer}<|end|>").input_ids
            ids += asked + said
            counts += [False] * len(asked) + [True] * len(said)
            num_bytes += len(answer.encode())
        with torch.no_grad():
            logits = model.model(torch.tensor([ids])).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        nats += each[torch.tensor(counts[1:])].tolist()
    text = read_text(EvalConfig(text=chat_file(tmp_path)), tokenizer)
    for batch_size in (1, 2, 8):
        actual = text_perplexity(model, text, context=128, stride=64, batch_size=batch_size)
        assert actual.num_tokens == len(nats)
        assert actual.nats_per_token == pytest.approx(sum(nats) / len(nats), rel=1e-5)
        bits = sum(nats) / math.log(2)
        assert actual.bits_per_byte == pytest.approx(bits / num_bytes, rel=1e-5)


def test_what_counts_in_chats_is_scored_once(tmp_path: Path) -> None:
    for targets in ("assistant", "all"):
        for batch_size in (1, 2, 3, 50):
            config = EvalConfig(text=chat_file(tmp_path), targets=targets)
            text = read_text(config, tiny_tokenizer())
            expected = [
                token
                for ids, is_target in text.documents
                for place, token in enumerate(ids)
                if place and (is_target is None or is_target[place])
            ]
            batches = list(text_batches(text, 8, 4, batch_size))
            scored = torch.cat([batch.labels[batch.mask] for batch in batches])
            assert sorted(scored.tolist()) == sorted(expected)
            assert all(batch.mask.any(1).all() for batch in batches), "no window for nothing"
            shapes = [batch.input_ids.shape for batch in batches]
            assert shapes[0] == (max(s[0] for s in shapes), max(s[1] for s in shapes))


def test_rows_of_plain_text_are_documents(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "rows.csv", tiny_tokenizer()
    path.write_text("story,n\nthe cat sat,1\non the mat,2\n", encoding="utf-8")
    text = read_text(EvalConfig(text=path, text_field="story"), tokenizer)
    found = [tokenizer.decode(tokens.ids) for tokens in text.documents]
    assert found == ["the cat sat<|end|>", "on the mat<|end|>"]
    assert text.num_bytes == len("the cat saton the mat")


def test_a_short_document_is_judged_alike_beside_a_long_one() -> None:
    model = LanguageModel(tiny_model("llama", initializer_range=0.3, **LONGROPE))
    documents = [Tokens(torch.randint(VOCAB, (size,)).tolist(), None) for size in (40, 9, 8, 5)]
    text = Text(documents, num_bytes=100)
    together, alone = (
        text_perplexity(model, text, context=64, stride=8, batch_size=size) for size in (4, 1)
    )
    assert together.nats_per_token == pytest.approx(alone.nats_per_token, rel=1e-6)


def test_a_token_that_has_no_embedding_is_refused() -> None:
    model = LanguageModel(tiny_model())
    with pytest.raises(ConfigError, match=f"token {VOCAB}, "):
        text_perplexity(
            model, one_text(torch.tensor([1, VOCAB])), context=8, stride=4, batch_size=1
        )


def test_one_shape_is_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = LanguageModel(tiny_model(initializer_range=0.3)), set()
    text = one_text(torch.randint(VOCAB, (50,)))
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
    monkeypatch.setattr(Backend, "is_traced", True)
    actual = text_perplexity(model, text, **sizes)
    assert seen == {(2, 16)} and actual.num_tokens == expected.num_tokens
    assert actual.nats_per_token == pytest.approx(expected.nats_per_token, rel=1e-6)
