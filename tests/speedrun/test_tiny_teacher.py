"""The embedded teacher: how its rows are packed and split, and that what is committed works."""

import itertools
import math
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat.backend import device as backend
from qat.data.packing import NO_LABEL
from qat.data.sources import open_source
from qat.data.stream import split_of

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
TEACHER = SPEEDRUN.parent / "checkpoints" / "tiny-qwen3"
TEXTS = [
    "Return the list.\nSorted by key.",
    "Raise ValueError if empty.",
    "Open a file.\nClose it.",
]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import make_tiny_teacher

    return make_tiny_teacher


@pytest.fixture
def text(script: object) -> object:
    return sys.modules["tiny_teacher_text"]


@pytest.fixture
def tokenizer(text: object) -> object:
    return text.train_tokenizer(TEXTS, 512)


def test_pack_restarts_positions_and_never_predicts_across_documents(text: object) -> None:
    ids, positions, labels = text.pack([[1, 2, 3], [4, 5], [6, 7]], 4)
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert positions[:, :3].tolist() == [[0, 1, 2], [0, 0, 1]]
    assert labels.tolist() == [[2, 3, NO_LABEL, 5], [NO_LABEL, 7, NO_LABEL, NO_LABEL]]


def test_packed_loss_is_the_sum_over_documents(script, text, tokenizer) -> None:
    config = script.TeacherConfig(hidden=128, layers=1, vocab=512)
    model = script.build_model(config, tokenizer).eval()
    encoded = text.encode(tokenizer, TEXTS)
    cpu = backend.select("cpu")
    alone = 0.0
    with torch.no_grad():
        for tokens in encoded:
            logits = model(torch.tensor([tokens])).logits[0, :-1]
            alone += F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum").item()
        packed = script.loss_sum(model, text.pack(encoded, 128), cpu).item()
    assert packed == pytest.approx(alone, rel=1e-5)


def test_schedule_warms_up_and_ends_at_zero(script: object) -> None:
    rates = [script.learning_rate(2.0, step / 100) for step in range(101)]
    assert max(rates) == rates[5] == 2.0
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert sorted(rates[5:], reverse=True) == rates[5:]


def test_documents_of_this_python_are_found(text: object) -> None:
    source = (
        b'"""M."""\nclass A:\n    """\n    C.\n      c\n    """\n    def f(self):\n        "F."\n'
    )
    assert list(text.docstrings(source)) == ["M.", "C.\n  c", "F."]
    texts = list(itertools.islice(text.stdlib_documents(), 50))
    assert len(texts) == len(set(texts)) == 50 and min(map(len, texts)) >= 80


def test_what_is_frozen_judges_by_nothing_that_was_learned(text: object, tmp_path: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(3000)]
    documents = [" ".join(rng.choices(words, k=60)) for _ in range(400)]
    sides = [split_of(document, 0, 0.05) for document in documents]
    learned = documents[sides.index("train")]
    quoting = next(  # to be held out, and a fifth of it was learned
        quote
        for number in range(999)
        if split_of(quote := f"{number} {documents[0]} {learned[:100]}", 0, 0.05) == "held_out"
    )
    near = next(
        copy for word in words if split_of(copy := f"{learned} {word}", 0, 0.05) == "held_out"
    )
    corpus = text.freeze(tmp_path / "frozen.jsonl.gz", [*documents, quoting, near])
    assert corpus.train + corpus.held_out != documents
    assert sorted(corpus.train + corpus.held_out) == sorted(documents)
    assert list(open_source(str(tmp_path / "frozen.jsonl.gz")).documents) == documents


def test_the_committed_text_judges_by_nothing_that_was_learned(text: object) -> None:
    corpus = text.read_corpus()
    documents = list(open_source("stdlib").documents)
    sides = [split_of(document, 0, 0.05) for document in documents]
    assert len(corpus.held_out) == sides.count("held_out") == 164
    assert {split_of(document, 0, 0.05) for document in corpus.held_out} == {"held_out"}
    learned = set().union(*map(text.runs_of_words, corpus.train))
    judged = map(text.runs_of_words, corpus.held_out)
    assert max(len(runs & learned) / len(runs) for runs in judged) < 0.1


def test_chat_keeps_the_whole_document(text: object) -> None:
    chat = text.as_chat(TEXTS[0])
    assert chat.startswith("<|im_start|>user\nReturn the list.<|im_end|>\n<|im_start|>assistant\n")
    assert chat.endswith("Sorted by key.")


def test_trial_run_writes_a_whole_checkpoint(
    script, text, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = script.TeacherConfig(hidden=128, layers=1, vocab=512, rows=2, row=64, max_steps=2)
    corpus = text.split([f"Return item number {i}: {'abcdef'[i % 6] * i}." for i in range(60)])
    monkeypatch.setattr(script, "read_corpus", lambda: corpus)
    script.main(out=tmp_path / "teacher", config=config)
    assert '"perplexity"' in capsys.readouterr().out
    assert f"hash {corpus.hash}" in (tmp_path / "teacher" / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "teacher").config.vocab_size == 512


def test_committed_teacher_knows_its_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    ids = tokenizer("Return a list of all the values of the dictionary.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss.item()
    assert loss < math.log(100)


@pytest.mark.parametrize(("thinking", "ending"), [(True, "t\n"), (False, "</think>\n\n")])
def test_committed_template_knows_thinking(thinking: bool, ending: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.endswith(ending)
