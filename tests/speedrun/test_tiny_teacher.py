"""The embedded teacher: how its rows are packed and split, and that what is committed works."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat.backend import device as backend
from qat.data.batch import NO_LABEL
from qat.data.split import split_of

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


def test_split_is_that_of_the_cache(text: object) -> None:
    documents = [f"Document number {i}." for i in range(400)]
    train, held_out = text.split(documents)
    assert sorted(train + held_out) == sorted(documents)
    assert 5 <= len(held_out) <= 40
    assert all(split_of(document, 0, 0.05) == "held_out" for document in held_out)


def test_chat_keeps_the_whole_document(text: object) -> None:
    chat = text.as_chat(TEXTS[0])
    assert chat.startswith("<|im_start|>user\nReturn the list.<|im_end|>\n<|im_start|>assistant\n")
    assert chat.endswith("Sorted by key.")


def test_trial_run_writes_a_whole_checkpoint(script, text, tmp_path, capsys) -> None:
    config = script.TeacherConfig(hidden=128, layers=1, vocab=512, rows=2, row=64, max_steps=2)
    corpus = tmp_path / "corpus.jsonl"
    lines = ['{"python": "3.x"}', *(f'{{"text": "Return item number {i}."}}' for i in range(60))]
    corpus.write_text("\n".join(lines))
    script.main(out=tmp_path / "teacher", corpus=corpus, config=config)
    assert '"perplexity"' in capsys.readouterr().out
    assert "standard library of Python 3.x" in (tmp_path / "teacher" / "README.md").read_text()
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
