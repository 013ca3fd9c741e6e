"""A suite from its file to its numbers: tiny models against plain PyTorch and transformers."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_case import call, said
from crash import stopped_at
from quantized import SPECS, tiny_quantized
from tiny import save_tiny, tiny_tokenizer
from transformers import PreTrainedModel

from qat.errors import CheckpointError, ConfigError
from qat.evaluate.config import EvalConfig, SuiteConfig
from qat.extensions.decode.slots import Batch, open_sampler
from qat.extensions.suite import engine, hook, side, task_names
from qat.extensions.suite import model as model_module
from qat.extensions.suite.answers import AnswerFile
from qat.extensions.suite.engine import VllmSampler
from qat.extensions.suite.judge import RESULTS
from qat.extensions.suite.model import Model
from qat.extensions.suite.plan import SuiteSettings
from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import load_model

WORDS = ("the cat", "the dog saw", "on the", "and the dog", "sat on", "the mat and the", "a", "saw")
CHOICES = [" sat on the mat", " and", " dog saw the"]
NEW_TOKENS = 12
LETTERS = """task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: {until}
  max_gen_toks: {limit}
filter_list:
  - name: first
    filter:
      - function: regex
        regex_pattern: "(?s)(.)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module", autouse=True)
def _datasets_stay_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
        patch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)  # it asks the network
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, a packed student, a directory of tasks, and files of questions."""
    place = tmp_path_factory.mktemp("suite")
    save_tiny(place / "teacher")
    torch.manual_seed(3)
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), tiny_tokenizer(), place / "student")
    given = [{"question": w, "choices": CHOICES, "answer": n % 3} for n, w in enumerate(WORDS)]
    lines(place / "choice.jsonl", given)
    lines(place / "cloze.jsonl", [{"text": f"{words} sat"} for words in WORDS])
    # the right letters: the teacher's own for every second question, else one of the student's
    letters = []
    for number, words in enumerate(WORDS):
        answers = {name: greedy(place / name, words)[1] for name in ("teacher", "student")}
        letters.append(
            {"question": words, "answer": answers[("teacher", "student")[number % 2]][0]}
        )
    lines(place / "letters.jsonl", letters)
    (place / "own").mkdir()
    task = LETTERS.format(file=place / "letters.jsonl", until="[]", limit=NEW_TOKENS)
    (place / "own" / "letters.yaml").write_text(task)
    (place / "mine.toml").write_text(
        "[letters]\n[facts]\ntask = 'choice'\ndata = 'choice.jsonl'\n"
        "[gaps]\ntask = 'cloze'\ndata = 'cloze.jsonl'\n"
    )
    return place


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def opened(source: Path) -> PreTrainedModel:
    return load_model(str(source), device="cpu", dtype="fp32").model


def greedy(source: Path, words: str) -> tuple[list[int], str]:
    """Tokens and text of the model's answer in its chat template, by transformers' own loop."""
    tokenizer = tiny_tokenizer()
    turn = [{"role": "user", "content": words}]
    text = tokenizer.apply_chat_template(
        turn, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        found = opened(source).generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    new = found[0, ids.shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def judge_suite(student: str, settings: SuiteSettings) -> dict:
    """Judge with settings that are taken apart as the verb has them."""
    asked = settings.model_dump(exclude_unset=True)
    config, suite = (
        kind(**{name: value for name, value in asked.items() if name in kind.model_fields})
        for kind in (EvalConfig, SuiteConfig)
    )
    return hook.judge_suite(student, config, suite)


def settings(place: Path, out: Path, **values: object) -> SuiteSettings:
    found = {"teacher": str(place / "teacher"), "suite": str(place / "mine.toml"), "out": out}
    found |= {"tasks_dir": place / "own", "device": "cpu", "dtype": "fp32", "batch_size": 3}
    return SuiteSettings(**{**found, **values})


def logprobs(source: Path, before: str, after: str) -> tuple[float, bool]:
    """Sum of the log-probabilities of `after`, and whether each token is the most likely."""
    tokenizer = tiny_tokenizer()
    start, ids = (tokenizer(text)["input_ids"] for text in (before, before + after))
    with torch.no_grad():
        rows = opened(source)(torch.tensor([ids])).logits[0].log_softmax(-1)
    places = range(len(start), len(ids))
    total = sum(rows[i - 1, ids[i]].item() for i in places)
    return total, all(rows[i - 1].argmax().item() == ids[i] for i in places)


def test_the_numbers_are_those_of_plain_loops(place: Path, tmp_path: Path, capsys) -> None:
    found = judge_suite(str(place / "student"), settings(place, tmp_path))
    picks, right, texts = {}, {}, {}
    for name in ("teacher", "student"):
        sums = [[logprobs(place / name, w, c)[0] for c in CHOICES] for w in WORDS]
        picks[name] = np.argmax(sums, 1)
        texts[name] = [greedy(place / name, words) for words in WORDS]
        gaps = [float(logprobs(place / name, words, " sat")[1]) for words in WORDS]
        letters = [row["answer"] for row in read(place / "letters.jsonl")]
        firsts = [float(t[0] == a) for (_, t), a in zip(texts[name], letters, strict=True)]
        right[name] = {
            "facts": (picks[name] == np.arange(len(WORDS)) % 3).astype(float),
            "gaps": np.array(gaps),
            "letters": np.array(firsts),
        }
    assert list(found["tasks"]) == ["letters", "facts", "gaps"]
    for task, got in found["tasks"].items():
        x, y = right["student"][task], right["teacher"][task]
        for side_name, scores in (("student", x), ("teacher", y)):
            assert got[side_name]["value"] == scores.mean()
            error = scores.std(ddof=1) / np.sqrt(len(WORDS))
            assert got[side_name]["stderr"] == pytest.approx(error)
        assert got["right_to_wrong"] == ((y == 1) & (x == 0)).sum()
        assert got["wrong_to_right"] == ((y == 0) & (x == 1)).sum()
        if y.mean():
            assert got["retention"]["value"] == pytest.approx(x.mean() / y.mean())
        else:
            assert got["retention"] is None
    assert 0 < right["teacher"]["letters"].mean() < 1  # the test would otherwise test little
    facts, letters = found["tasks"]["facts"], found["tasks"]["letters"]
    assert facts["agreement"]["value"] == (picks["student"] == picks["teacher"]).mean()
    assert facts["first_divergence_mean_tokens"] is None
    pairs = [(a, b) for (a, _), (b, _) in zip(texts["student"], texts["teacher"], strict=True)]
    shared = [len(os.path.commonprefix(pair)) for pair in pairs]
    assert letters["first_divergence_median_tokens"] == np.median(shared)
    assert letters["first_divergence_mean_tokens"] == np.mean(shared)
    assert json.loads((tmp_path / "suite.json").read_text()) == {
        name: value for name, value in found.items() if name != "out"
    }
    rows = read(tmp_path / "questions.jsonl")
    assert [r["student"] for r in rows if r["task"] == "facts"] == right["student"][
        "facts"
    ].tolist()
    assert [r["first_divergence_tokens"] for r in rows if r["task"] == "letters"] == shared
    table = capsys.readouterr().out
    assert f"-{facts['right_to_wrong']} +{facts['wrong_to_right']}" in table


def test_a_student_alone_has_scores_and_nothing_to_compare(place: Path, tmp_path: Path) -> None:
    config = settings(place, tmp_path, teacher=None, suite=f"choice={place / 'choice.jsonl'}")
    found = judge_suite(str(place / "student"), config.model_copy(update={"limit": 1}))
    (task,) = found["tasks"].values()
    assert task["questions"] == 1 and task["student"]["stderr"] is None
    assert task["teacher"] is None and task["agreement"] is None and found["retention"] is None


def test_a_text_that_ends_an_answer_cuts_text_and_tokens(place: Path, tmp_path: Path) -> None:
    ids, text = greedy(place / "teacher", WORDS[0])
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable() and c not in "'\"\\ ")
    (tmp_path / "own").mkdir()
    task = LETTERS.format(file=place / "letters.jsonl", until=json.dumps([stop]), limit=NEW_TOKENS)
    (tmp_path / "own" / "letters.yaml").write_text(task)
    config = settings(place, tmp_path / "out", suite="letters", tasks_dir=tmp_path / "own", limit=1)
    judge_suite(str(place / "student"), config)
    _, line = (tmp_path / "out" / "answers" / "letters.teacher.jsonl").read_text().splitlines()
    answer = json.loads(line)
    assert answer["text"] == text[: text.index(stop)]
    decoded = tiny_tokenizer().decode
    assert answer["ids"] == ids[: len(answer["ids"])]
    assert stop in decoded(answer["ids"]) and stop not in decoded(answer["ids"][:-1])


def test_an_interrupted_suite_goes_on_and_ends_the_same(place: Path, tmp_path: Path) -> None:
    whole = judge_suite(
        str(place / "student"), settings(place, tmp_path / "whole", suite="letters")
    )
    config = settings(place, tmp_path / "part", suite="letters")
    with stopped_at(AnswerFile, "add", len(WORDS) + 2):  # after the teacher's and two answers
        judge_suite(str(place / "student"), config)
    kept = tmp_path / "part" / "answers" / "letters.student.jsonl"
    assert len(kept.read_text().splitlines()) == 1 + 2
    with kept.open("a") as file:
        file.write('{"request": "0')  # what a kill leaves of a line
    answered = []
    with pytest.MonkeyPatch.context() as patch:
        real = Model.generate
        patch.setattr(Model, "generate", lambda *given: answered.extend(given[1]) or real(*given))
        found = judge_suite(str(place / "student"), config)
    assert len(answered) == len(WORDS) - 2
    for name in ("tasks", "retention"):
        assert found[name] == whole[name]
    for path in (tmp_path / "whole" / "answers").iterdir():
        again = (tmp_path / "part" / "answers" / path.name).read_bytes()
        assert sorted(path.read_bytes().splitlines()) == sorted(again.splitlines())


@pytest.mark.slow
def test_a_killed_suite_goes_on(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["eval", place / "student", "--teacher", place / "teacher", "--suite", "letters"]
    words += ["--tasks-dir", place / "own", "--batch-size", "1", "--device", "cpu", "--out", out]
    command = [sys.executable, "-m", "qat", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = out / "answers" / "letters.teacher.jsonl"
    while not (kept.is_file() and kept.read_bytes().count(b"\n") > 2):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = kept.read_bytes()
    assert not (out / "suite.json").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert kept.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    whole = judge_suite(
        str(place / "student"), settings(place, tmp_path / "whole", suite="letters", dtype="auto")
    )
    assert json.loads((out / "suite.json").read_text())["tasks"] == whole["tasks"]


PROBLEM = {
    "prompt": "import math\n\n\ndef root(x):\n    'The root.'\n",
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(9.0) == 3.0\n",
}
RIGHT = "```python\ndef root(x):\n    return math.sqrt(x)\n```"


def test_programs_pass_their_tests_and_answers_that_are_there_are_not_asked(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    lines(tmp_path / "problems.jsonl", [PROBLEM, {**PROBLEM, "prompt": "def root(x):\n"}])
    suite = f"humaneval={tmp_path / 'problems.jsonl'}"
    out = tmp_path / "out"
    config = settings(place, out, suite=suite, tasks_dir=None, allow_code_execution=True)
    judge_suite(str(place / "student"), config)
    for name in ("teacher", "student"):
        path = out / "answers" / f"humaneval.{name}.jsonl"
        first, *rows = read(path)
        rows[0]["text"] = RIGHT
        if name == "teacher":  # the second prompt imports no math
            rows[1]["text"] = RIGHT.replace("math.sqrt(x)", "x ** 0.5")
        lines(path, [first, *rows])
    monkeypatch.setattr(side, "Model", None)
    found = judge_suite(str(place / "student"), config)["tasks"]["humaneval"]
    assert found["teacher"]["value"] == 1.0 and found["student"]["value"] == 0.5
    assert found["retention"]["value"] == 0.5 and found["right_to_wrong"] == 1
    assert found["agreement"]["value"] == 0.5


def test_word_problems_take_the_last_box_or_number(place: Path, tmp_path: Path) -> None:
    rows = [{"question": w, "answer": f"so\n#### {n},000"} for n, w in enumerate(WORDS[:3])]
    lines(tmp_path / "train.jsonl", rows)
    suite, out = f"gsm8k={tmp_path / 'train.jsonl'}", tmp_path / "out"
    config = settings(place, out, suite=suite, teacher=None, tasks_dir=None)
    judge_suite(str(place / "student"), config)
    path = out / "answers" / "gsm8k.student.jsonl"
    first, *kept = read(path)
    boxed = r"\boxed{5} and then \[\boxed{\$1{,}000.00}\] for 2 days..."
    for texts, right in (
        (("2 and 0 #### 0,000", "it is $1000.", "1000"), 2),
        (("7 and 0000", boxed, r"\boxed{2000.}, so 3 a day"), 3),
    ):
        for row, text in zip(kept, texts, strict=True):
            row["text"] = text
        lines(path, [first, *kept])
        found = judge_suite(str(place / "student"), config)["tasks"]["gsm8k"]
        assert found["student"]["value"] == pytest.approx(right / 3)


def begun(place: Path, out: Path) -> SuiteSettings:
    """Settings of a suite with answers of the student in `out`."""
    suite = f"choice={place / 'choice.jsonl'}"
    config = settings(place, out, suite=suite, teacher=None, tasks_dir=None)
    judge_suite(str(place / "student"), config)
    return config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda text: text.replace('"model": "', '"model": "0'), "model="),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format="),
        (lambda text: text.replace("float32", "bfloat16"), "dtype="),
        (lambda text: text.replace('"logprob":', '"logprobs":', 1), "line 2"),
        (lambda text: text.replace('"is_greedy":', '"text":"","is_greedy":', 1), "line 2"),
        (lambda text: text.replace('{"request"', '{"reque', 1), "line 2"),
        (lambda text: "[]\n" + text, "line 1"),
    ],
    ids="model format dtype field both json list".split(),
)
def test_damaged_or_foreign_answers_are_one_line(
    place: Path, tmp_path: Path, monkeypatch, capsys, change, field: str
) -> None:
    config = begun(place, tmp_path)
    path = tmp_path / "answers" / "choice.student.jsonl"
    path.write_text(change(path.read_text()))
    words = ["eval", place / "student", "--suite", config.suite, "--out", tmp_path]
    assert call(monkeypatch, *words, "--device", "cpu", "--dtype", "fp32") == 1
    error = capsys.readouterr().err.strip()
    assert str(path) in error and field in error and "\n" not in error


def test_answers_of_another_model_are_refused(place: Path, tmp_path: Path, monkeypatch) -> None:
    config = begun(place, tmp_path)
    words = ["eval", place / "teacher", "--suite", config.suite, "--out", tmp_path]
    assert call(monkeypatch, *words, "--device", "cpu", "--dtype", "fp32") == 1


WRONG = {
    "no-out": (["--suite", "choice=F"], "--out"),
    "no-suite": (["--out", "OUT"], "--suite"),
    "with-text": (["--suite", "choice=F", "--out", "OUT", "--text", "F"], "text"),
    "no-data": (["--suite", "gsm8k", "--out", "OUT"], "gsm8k"),
    "no-file": (["--suite", "choice=none.jsonl", "--out", "OUT"], "none.jsonl"),
    "twice": (["--suite", "choice=F,choice=F", "--out", "OUT"], "choice"),
    "no-toml": (["--suite", "none.toml", "--out", "OUT"], "none.toml"),
    "bad-key": (["--suite", "bad.toml", "--out", "OUT"], "feilds"),
    "no-table": (["--suite", "flat.toml", "--out", "OUT"], "[choice]"),
    "bad-name": (["--suite", "name.toml", "--out", "OUT"], "../up"),
    "code-in-file": (["--suite", "code.toml", "--out", "OUT"], "allow_code_execution"),
    "not-allowed": (["--suite", "humaneval=P", "--out", "OUT"], "--allow-code-execution"),
    "draws": (["--suite", "draws", "--tasks-dir", "own", "--out", "OUT"], "do_sample"),
    "rolling": (["--suite", "rolling", "--tasks-dir", "own", "--out", "OUT"], "output_type"),
    "own-data": (["--suite", "draws=F", "--tasks-dir", "own", "--out", "OUT"], "data"),
    "out-file": (["--suite", "choice=F", "--out", "F"], "out=F"),
}


# the harness looks for the broken one among all of its own tasks, which takes it half a minute
BROKEN = (["--suite", "broken", "--tasks-dir", "own", "--out", "OUT"], "broken")
CALLS = [pytest.param(*each, id=name) for name, each in WRONG.items()]


@pytest.mark.parametrize(
    ("words", "named"), [*CALLS, pytest.param(*BROKEN, id="no-yaml", marks=pytest.mark.slow)]
)
def test_wrong_calls_are_one_line(
    place: Path, tmp_path: Path, monkeypatch, capsys, words: list[str], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(Path("F"), [{"question": "q", "choices": ["a", "b"], "answer": 0}])
    lines(Path("P"), [PROBLEM])
    Path("bad.toml").write_text("[choice]\ndata = 'F'\nfeilds = {}\n")
    Path("flat.toml").write_text("choice = 'F'\n")
    Path("name.toml").write_text("['../up']\ntask = 'choice'\ndata = 'F'\n")
    Path("code.toml").write_text("[humaneval]\nallow_code_execution = true\n")
    Path("own").mkdir()
    task = LETTERS.format(file=place / "letters.jsonl", until="[]", limit=3)
    draws = task.replace("task: letters", "task: draws").replace(
        "  until:", "  do_sample: true\n  until:"
    )
    Path("own", "draws.yaml").write_text(draws)
    rolling = re.sub(r"generation_kwargs:\n.*\n.*\n(?s:.*?)(?=metric_list)", "", task)
    rolling = rolling.replace("generate_until", "loglikelihood_rolling")
    rolling = rolling.replace("task: letters", "task: rolling").replace("exact_match", "acc")
    Path("own", "rolling.yaml").write_text(rolling)
    Path("own", "broken.yaml").write_text("task: broken\n  a: [")
    assert call(monkeypatch, "eval", place / "student", *words) == 1
    error = capsys.readouterr().err.strip()
    assert named in error and "\n" not in error
    assert not Path("OUT", RESULTS).exists()


def test_an_engine_writes_the_answers_where_it_is_asked(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    """Our own sampler stands in for vLLM, which has a model of its own: ours is gone by then."""
    gone, closed = [], []

    class Engine(VllmSampler):
        def __init__(self, source: str, dtype: str, batch: Batch) -> None:
            assert dtype == "float32"
            gc.collect()
            gone.append([one for one in opened_models if one() is not None])
            self._sampler = open_sampler(load_model(source, device="cpu", dtype="fp32"), batch)
            self.sample = self._sampler.sample

        def close(self) -> None:
            closed.append(self)

    opened_models = []
    real = model_module.load_model

    def watched(*given: object, **named: object) -> LanguageModel:
        model = real(*given, **named)
        opened_models.append(weakref.ref(model.model))
        return model

    monkeypatch.setattr(engine, "is_installed", lambda library: True)
    monkeypatch.setattr(model_module, "VllmSampler", Engine)
    monkeypatch.setattr(model_module, "load_model", watched)
    config = settings(place, tmp_path / "vllm", engine="vllm")
    found = judge_suite(str(place / "student"), config)
    assert gone == [[], []] and len(closed) == len(opened_models) == 2
    ours = judge_suite(str(place / "student"), settings(place, tmp_path / "ours"))
    assert found["tasks"] == ours["tasks"]
    other = settings(place, tmp_path / "vllm")
    with pytest.raises(CheckpointError, match="engine=vllm, expected qat"):
        judge_suite(str(place / "student"), other)


def test_an_engine_that_is_missing_or_opens_no_file_is_one_line(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    config = settings(place, tmp_path, engine="vllm", teacher=None)
    monkeypatch.setattr(engine, "is_installed", lambda library: library != "vllm")
    with pytest.raises(ConfigError, match=r"vllm is not installed.*pip install"):
        judge_suite(str(place / "student"), config)
    monkeypatch.setattr(engine, "is_installed", lambda library: True)
    (tmp_path / "it.gguf").touch()
    with pytest.raises(ConfigError, match=r"it\.gguf is a file, expected a directory"):
        judge_suite(str(tmp_path / "it.gguf"), config)


def test_without_the_harness_it_says_how_to_install_it(place: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(task_names, "is_installed", lambda library: False)
    with pytest.raises(ConfigError, match=r"lm-eval is not installed.*pip install"):
        judge_suite(str(place / "student"), settings(place, tmp_path))


def test_the_verb_prints_the_numbers(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    words = ["--suite", f"cloze={place / 'cloze.jsonl'}", "--limit", "2", "--out", tmp_path]
    assert call(monkeypatch, "eval", place / "student", *words, "--device", "cpu") == 0
    assert said(capsys)["tasks"]["cloze"]["questions"] == 2
