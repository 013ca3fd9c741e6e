"""Tasks of lm-eval on a packed student: the harness's numbers against sums of log-probabilities."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from quantized import SPECS, tiny_quantized
from tiny import tiny_tokenizer

from qat.cli.eval import evaluate
from qat.errors import DataError
from qat.evaluate.config import EvalConfig
from qat.evaluate.judge import judge
from qat.extensions.suite.harness import measures
from qat.models.checkpoint import save_checkpoint
from qat.models.load import load_model

QUESTIONS = [
    {"question": "the cat", "choices": [" sat on the mat", " and"], "answer": 0},
    {"question": "the dog", "choices": [" saw the cat", " mat"], "answer": 1},
    {"question": "on the", "choices": [" mat and", " dog saw the", " cat"], "answer": 2},
    {"question": "and the dog", "choices": [" sat", " saw"], "answer": 0},
]
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module", autouse=True)
def _datasets_stay_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets
    import lm_eval.evaluator

    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
        patch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # it asks the network
        # it runs a dozen programs to describe the machine, which we keep nothing of
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda found: None)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed student, and a directory with a task and its questions."""
    place = tmp_path_factory.mktemp("tasks")
    torch.manual_seed(3)
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), place / "student")
    (place / "own").mkdir()
    file = place / "questions.json"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (place / "own" / "tiny.yaml").write_text(TASK.format(file=file))
    return place


def settings(place: Path, **values: object) -> EvalConfig:
    found = {"tasks": "tiny_choice", "tasks_dir": place / "own", "batch_size": 3}
    return EvalConfig(**{**found, "device": "cpu", "dtype": "fp32", **values})


def by_hand(student: Path, count: int) -> float:
    """Share of questions whose answer has the largest sum of log-probabilities."""
    model, tokenizer = load_model(str(student), device="cpu", dtype="fp32"), tiny_tokenizer()
    hits = 0
    for question in QUESTIONS[:count]:
        start = tokenizer(question["question"])["input_ids"]
        sums = []
        for choice in question["choices"]:
            ids = tokenizer(question["question"] + choice)["input_ids"]
            with torch.no_grad():
                logprobs = model.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            sums.append(sum(logprobs[i - 1, ids[i]].item() for i in range(len(start), len(ids))))
        hits += sums.index(max(sums)) == question["answer"]
    return hits / count


def test_a_packed_student_scores_what_its_log_probabilities_say(place: Path, capsys) -> None:
    student = str(place / "student")
    found = evaluate(student, config=settings(place, teacher=student))
    scores = found["tasks"]["tiny_choice"]
    assert scores["acc"] == by_hand(place / "student", 4) and 0 < scores["acc_stderr"] < 1
    assert found["teacher_tasks"] == found["tasks"] and found["kl_nats"] is None
    assert (
        json.loads(json.dumps(found, default=str))["tasks"]["tiny_choice"]["acc"] == scores["acc"]
    )
    table = capsys.readouterr().out
    assert f"acc (tiny_choice) \u2502 {scores['acc']:.4f} +- {scores['acc_stderr']:.4f}" in table


def test_fewer_questions_and_examples_before_them(place: Path) -> None:
    found = judge(str(place / "student"), settings(place, limit=2, num_fewshot=1))
    assert set(found.tasks) == {"tiny_choice"} and found.tasks["tiny_choice"]["acc"] in (0, 0.5, 1)
    assert found.cached is None and found.numbers()["tasks"] == found.tasks


def test_texts_out_of_reach_are_one_line(place: Path, monkeypatch) -> None:
    import lm_eval

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach\n'allenai/ai2_arc' on the Hub")

    monkeypatch.setattr(lm_eval, "simple_evaluate", unreachable)
    with pytest.raises(DataError, match="tiny_choice cannot be read .Couldn't reach 'allenai"):
        judge(str(place / "student"), settings(place))


def test_filters_stay_in_the_name() -> None:
    result = {"alias": "x", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": "N/A"}
    result |= {"exact_match,strict": 1.0}
    assert measures(result) == {"acc": 0.5, "exact_match,strict": 1.0}
