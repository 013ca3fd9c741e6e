"""`qat eval` and `qat generate` on tiny models, a real cache and a text."""

import json
from pathlib import Path

import pytest
from cache_case import texts
from quantized import SPECS, tiny_quantized
from tiny import VOCAB, tiny_model, tiny_tokenizer
from train_case import config as train_config
from train_case import make_place

from qat.backend.base import DTYPES
from qat.cli.cache import cache
from qat.cli.eval import evaluate
from qat.cli.generate import generate
from qat.data.config import CacheConfig
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError, DataError
from qat.evaluate.config import EvalConfig, GenerateConfig
from qat.evaluate.divergence import cached_divergence
from qat.evaluate.judge import judge, open_student, split_batches
from qat.logs import printable
from qat.models.checkpoint import save_checkpoint
from qat.nn.quant_linear import quant_linears
from qat.nn.step import release_weights
from qat.train.start import train_student

TEXT = "the cat sat on the mat and the dog saw the cat. "


def saved_model(directory: Path, **overrides: object) -> str:
    tiny_model(initializer_range=0.3, **overrides).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a teacher, a student, a text, and a cache of the teacher's word on it."""
    place = tmp_path_factory.mktemp("eval")
    saved_model(place / "teacher", seed=2)
    saved_model(place / "student", seed=1)
    (place / "text.txt").write_text(TEXT * 4, encoding="utf-8")
    rows = [json.dumps({"text": text}) for text in texts(60)]
    (place / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    build_cache(place, "cache", top_k=8, draws=10)
    build_cache(place, "draws", top_k=0, draws=10)
    return place


def build_cache(place: Path, name: str, **settings: float) -> None:
    config = CacheConfig(
        teacher=str(place / "teacher"),
        data=str(place / "rows.jsonl"),
        sequence_length=16,
        device="cpu",
        **{"held_out": 0.3, **settings},
    )
    cache(config=config, out=place / name)


def settings(**values: object) -> EvalConfig:
    return EvalConfig(context=32, stride=16, device="cpu", dtype="fp32", **values)


def test_the_cache_puts_its_teacher_beside_the_student(place: Path, capsys) -> None:
    config = settings(cache_dir=place / "cache")
    numbers = evaluate(str(place / "student"), config=config)
    out = capsys.readouterr().out
    assert "teacher" in out and f">= {numbers['teacher_ppl_floor']:.4f}" in out
    named = config.model_copy(update={"teacher": str(place / "teacher")})
    both = evaluate(str(place / "student"), config=named)
    assert 1 < both["teacher_ppl_floor"] < both["teacher_ppl"]
    assert f" {both['teacher_ppl']:.4f}" in capsys.readouterr().out


def test_against_cache_teacher_and_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        cache_dir=place / "cache", teacher=str(place / "teacher"), text=place / "text.txt"
    )
    numbers = evaluate(str(place / "student"), config=config)
    out = capsys.readouterr().out
    for words in ("student", "teacher", "top-1 agreement", "windows of 32, stride 16"):
        assert words in out
    assert "--teacher" not in out  # its numbers stand there
    assert 0 < numbers["kl_tail_nats"] < numbers["kl_nats"]
    assert numbers["kd_nats"] > 0 and 0 <= numbers["top1_frac"] <= 1
    assert numbers["ppl"] != numbers["teacher_ppl"]
    assert numbers["text_ppl"] != numbers["teacher_text_ppl"]
    assert numbers["student"] == str(place / "student")


def test_on_a_text_alone_the_teacher_is_met_there(place: Path) -> None:
    teacher = str(place / "teacher")
    numbers = judge(
        str(place / "student"), settings(text=place / "text.txt", teacher=teacher)
    ).numbers()
    assert numbers["kl_nats"] > 0
    assert numbers["ppl"] == pytest.approx(numbers["text_ppl"])
    assert numbers["teacher_ppl"] == pytest.approx(numbers["teacher_text_ppl"])
    assert numbers["kd_nats"] is None
    alone = judge(str(place / "student"), settings(text=place / "text.txt")).numbers()
    assert alone["text_ppl"] == numbers["text_ppl"]
    assert alone["kl_nats"] is None and set(alone) == set(numbers)


def test_a_cache_of_draws_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = evaluate(str(place / "student"), config=settings(cache_dir=place / "draws"))
    out = capsys.readouterr().out
    assert numbers["kd_nats"] is None and numbers["sampled_ce_nats"] > 0
    assert "KD, nats" not in out
    assert f"for the teacher's exact numbers beside these: --teacher {place}/teacher\n" in out


def test_split_and_number_of_sequences_matter(place: Path) -> None:
    student = str(place / "student")
    whole = judge(student, settings(cache_dir=place / "cache")).cached
    some = judge(student, settings(cache_dir=place / "cache", max_sequences=2)).cached
    train = judge(student, settings(cache_dir=place / "cache", split="train")).cached
    one = judge(student, settings(cache_dir=place / "cache", batch_size=1)).cached
    assert some.num_tokens < whole.num_tokens != train.num_tokens
    assert one.kl_tail_nats == pytest.approx(whole.kl_tail_nats)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_packed_student_is_formed_once(place: Path, tmp_path: Path, dtype: str) -> None:
    model = tiny_quantized("qwen3", SPECS["lut2"])
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "packed")
    student, _ = open_student(str(tmp_path / "packed"), device="cpu", dtype=dtype)
    linears = quant_linears(student.model).values()
    assert linears and all(linear.formed.dtype == DTYPES[dtype] for linear in linears)
    batches = [*split_batches(TeacherCache.open(place / "cache"), "held_out", 8)[""]]
    formed = cached_divergence(student, batches)
    release_weights(student.model)
    assert cached_divergence(student, batches) == formed
    config = EvalConfig(cache_dir=place / "cache", device="cpu", dtype=dtype)
    assert judge(str(tmp_path / "packed"), config).cached == formed


def test_a_row_that_is_none_is_refused_before_the_model_is_read(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("qat.evaluate.judge.judge")
    (tmp_path / "a.jsonl").write_text('{"body": "x"}')
    with pytest.raises(DataError, match=r"row 1 has the fields \['body'\].*--text-field"):
        evaluate(str(place / "student"), config=settings(text=tmp_path / "a.jsonl"))


def test_refusals(place: Path, tmp_path: Path) -> None:
    student = str(place / "student")
    with pytest.raises(ConfigError, match="give --cache-dir"):
        judge(student, settings())
    with pytest.raises(ConfigError, match="context=256, .* 128"):
        judge(student, EvalConfig(text=place / "text.txt", device="cpu"))
    wide = saved_model(tmp_path / "wide", vocab_size=VOCAB + 8)
    tiny_tokenizer(265).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match=f"has {VOCAB} words and the teacher's {VOCAB + 8}"):
        judge(student, settings(text=place / "text.txt", teacher=wide))
    build_cache(place, "all", top_k=4, held_out=0.0)
    with pytest.raises(CacheError, match="has no held_out sequences.*another --split"):
        judge(student, settings(cache_dir=place / "all"))


def test_generate_streams_and_tells_what_it_said(place: Path, capsys) -> None:
    config = GenerateConfig(prompt="the cat", max_new_tokens=8, device="cpu", raw=True)
    result = generate(str(place / "student"), config=config)
    streamed = capsys.readouterr().out
    assert streamed == "the cat" + printable(result["text"]) + "\n", (
        "a continuation follows its prompt"
    )
    assert 0 < result["num_tokens"] <= 8
    assert {"repeated_frac", "distinct_frac", "tokens_per_s"} <= set(result)
    result = generate(str(place / "student"), config=config.model_copy(update={"raw": False}))
    streamed = capsys.readouterr().out
    assert streamed == printable(result["text"]) + "\n", "an answer stands alone"


def test_a_run_s_best_score_is_what_eval_finds_on_the_same_sequences(tmp_path: Path) -> None:
    place = make_place(tmp_path, layers=1)
    report = train_student(
        train_config(place), str(place / "student"), tmp_path / "run", resume=False
    )
    same = EvalConfig(cache_dir=place / "cache", max_sequences=4, dtype="fp32", device="cpu")
    found = judge(str(report.final), same).numbers()
    assert found["kl_tail_nats"] == pytest.approx(report.best, rel=1e-5)
