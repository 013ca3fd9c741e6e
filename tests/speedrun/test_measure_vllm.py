"""What the script that compares vLLM's tokens with ours makes of them, without vLLM."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from quantized import SPECS, tiny_quantized
from tiny import tiny_model, tiny_tokenizer

from qat.errors import CheckpointError
from qat.generate.text import generate_text
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import load_model

SPEEDRUN = Path(__file__).parents[2] / "speedrun"
WORDS = 4
PROMPTS = [[5, 6, 7], [100, 3, 44], [270, 9, 31]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import measure_vllm

    monkeypatch.setattr(measure_vllm, "WORDS", WORDS)
    return measure_vllm


@pytest.fixture
def student(tmp_path: Path) -> Path:
    path = tmp_path / "student"
    save_checkpoint(tiny_quantized("llama", SPECS["lut2"]), tiny_tokenizer(), path)
    return path


def row(student: str, **said: object) -> dict[str, object]:
    return {"student": student, "served": "yes", "prompts": 4, **said}


def test_prompts_are_first_words_of_documents_and_no_two_are_alike(
    script: ModuleType, tmp_path: Path
) -> None:
    text, tokenizer = tmp_path / "text.txt", tiny_tokenizer()
    documents = ["the cat sat on the mat", "the cat sat on the dog", "the dog saw", "a"]
    text.write_text("\n\n".join(documents))
    found = script.first_words(text, tokenizer, 2, 3)
    assert found == [tokenizer(documents[0]).input_ids[:3], tokenizer(documents[2]).input_ids[:3]]
    with pytest.raises(SystemExit, match="2 documents that begin in 3 tokens of their own, expec"):
        script.first_words(text, tokenizer, 3, 3)


def test_groups_that_do_not_fit_are_the_given_ones(script: ModuleType, tmp_path: Path) -> None:
    text, model = tmp_path / "text.txt", LanguageModel(tiny_model())
    assert script.settings("q2a4", text, model, 8).group_size is None
    assert script.settings("v2a4", text, model, 8).group_size == 8  # 64 do not divide 32
    with pytest.raises(SystemExit, match="v2a4: .*group_size=64 .*; give --group-size"):
        script.settings("v2a4", text, model, None)


@torch.no_grad()
def test_a_token_of_another_is_held_against_rounding(
    script: ModuleType, student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(student), device="cpu", dtype="fp32")
    ours = script.our_words(model, PROMPTS)
    said = generate_text(
        model, tiny_tokenizer(), "the cat", max_new_tokens=WORDS, temperature=0, raw=True
    )
    words = script.our_words(model, [tiny_tokenizer()("the cat").input_ids])
    assert tiny_tokenizer().decode(words[0], skip_special_tokens=True) == said.text
    theirs = [[*words] for words in ours]
    other = (ours[1][2] + 1) % 320
    theirs[1][2] = other
    monkeypatch.setattr(script, "their_words", lambda path, prompts: theirs)
    found = script.compare(student, PROMPTS, decoded=True)
    (differs,) = found["differ"]
    assert (found["served"], found["equal"], found["within"]) == ("yes", 2, 0)
    assert (differs["prompt"], differs["place"]) == (1, 2)
    logits = model.model(torch.tensor([PROMPTS[1] + ours[1][:2]])).logits[0, -1]
    expected = (logits[ours[1][2]] - logits[other]).item()
    assert differs["lead"] == pytest.approx(expected, abs=1e-5)
    assert 0 < differs["moved"] < differs["lead"]
    # what comes behind the other token need not be what we would say there
    assert 1 - 2 / (3 * WORDS) <= found["places"] < 1 == found["own_places"]
    assert script.is_rounding({"lead": 1e-6, "moved": 1e-6})
    found = script.compare(student, PROMPTS, decoded=False)
    assert {*found} == {"served", "places", "own_places"}


def test_a_refused_student_counts_as_not_served(
    script: ModuleType, student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, prompts: list[list[int]]) -> None:
        raise CheckpointError("no; take another")

    monkeypatch.setattr(script, "their_words", refuse)
    assert script.compare(student, PROMPTS, decoded=True) == {"served": "no; take another"}


def test_the_figures_are_of_all_presets_and_of_the_least_rounded(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    differ = [{"prompt": 1, "place": 7, "lead": 2e-6, "moved": 3e-6}]
    shares = {"places": 1.0, "own_places": 1.0}
    rows = [
        row("q2a4", equal=3, within=1, differ=differ, **shares),
        row("v2a2", served="no"),
        row("q2a4_a8", places=0.9, own_places=0.8),
        row("q2a4_kv4", places=0.99, own_places=0.98),
    ]
    script.show(rows, columns=script.COLUMNS)
    script.conclude(rows, tmp_path / "figures.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [(line["figure"], line["value"], line["goal"]) for line in lines] == [
        ("vllm_cpu_greedy_equal", 0.375, "== 1"),
        ("vllm_cpu_formats", 1, f"== {len(script.PRESETS)}"),
        ("vllm_cpu_rounded_equal", 0.9, ""),
    ]
    said = capsys.readouterr().out
    assert "q2a4, prompt 1: another token at place 7" in said and "within rounding" in said
    assert "v2a2 is not served: no" in said and "99.0000%" in said
