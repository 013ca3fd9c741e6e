"""The verb itself: build, info, verify, and what a user sees when something is wrong."""

import json
from itertools import islice
from pathlib import Path

import pytest
from cache_case import TOKENIZER, build, info, texts
from tiny import tiny_model, tiny_tokenizer

from qat.cli import run_verb
from qat.cli.cache import suggested_name
from qat.data.cache import MANIFEST
from qat.data.config import CacheConfig
from qat.data.reader import TeacherCache
from qat.data.sources import open_source
from qat.errors import CacheError, DataError
from qat.models.teacher_cache import with_length


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("teacher")
    tiny_model().save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return str(directory)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict, str]:
    """Return the result on the last line of `qat cache`, and everything that it printed."""
    found = run_verb(["cache", *words])
    return json.loads(json.dumps(found, default=str)), capsys.readouterr().out


def test_build_info_verify(teacher: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my words.txt").write_text("\n\n".join(texts()))
    flags = ["--sequence-length", "16", "--top-k", "4", "--device", "cpu"]
    built, _ = run(capsys, "--teacher", teacher, "--data", "my words.txt", *flags)
    out = Path("caches/my-words_plain_think_false_L16_K4_R0")
    assert built["out"] == str(out)
    cache = TeacherCache.open(out)
    assert built["sequences"] == cache.num_sequences("train") > 20
    size = sum(path.stat().st_size for path in out.iterdir())
    assert built["bytes_per_token"] == pytest.approx(size / built["tokens"], abs=0.01)
    assert cache.manifest.settings.format == "plain"

    shown, printed = run(capsys, "info", str(out))
    assert shown["fingerprint"] == built["fingerprint"] == cache.manifest.fingerprint
    assert "first sequence: " in printed

    checked, printed = run(capsys, "verify", str(out))
    assert checked["damaged"] == 0
    assert "train-00000.safetensors" in printed

    shard = out / "train-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2] + b"??")
    with pytest.raises(CacheError, match=r"1 of 2 shards are damaged \(train-00000"):
        run(capsys, "verify", str(out))


def test_info_says_what_a_cache_holds_whatever_its_teacher_is_called(
    teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    build(tmp_path / "c", info=info(name=str(tmp_path / "place")))
    shown, printed = run(capsys, "info", str(tmp_path / "c"))
    assert shown["sequences"] > 0 and "no text is shown: " in printed
    tiny_tokenizer(270).save_pretrained(tmp_path / "place")
    _, printed = run(capsys, "info", str(tmp_path / "c"))
    assert "no text is shown" in printed and "first sequence" not in printed


def test_info_of_a_cache_that_holds_nothing(tmp_path: Path, capsys) -> None:
    nothing = build(tmp_path).model_copy(update={"shards": []})
    (tmp_path / MANIFEST).write_bytes(nothing.to_bytes())
    shown, printed = run(capsys, "info", str(tmp_path))
    assert (shown["tokens"], shown["bytes_per_token"]) == (0, None) and "None" not in printed
    assert run(capsys, "verify", str(tmp_path))[0]["damaged"] == 0


def test_names_say_what_a_cache_holds(tmp_path: Path) -> None:
    path = tmp_path / "alpaca data.json"
    path.write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    config = CacheConfig(
        teacher="t", data=str(path), thinking="both", sequence_length=128, top_k=32, draws=50
    )
    name = suggested_name(config, open_source(config.data))
    assert name == "alpaca-data_alpaca_think_both_L128_K32_R50"


def test_the_length_follows_the_documents(teacher: str, tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", logger="qat")

    def settled(sizes: list[int], **values: object) -> tuple[int, list]:
        path = tmp_path / "rows.jsonl"
        rows = [{"prompt": "the cat", "completion": "the dog " * size} for size in sizes]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = CacheConfig(teacher=teacher, data=str(path), **values)
        found, source = with_length(config, open_source(config.data))
        documents = list(source.documents)
        assert documents == list(open_source(config.data).documents)
        return found.sequence_length, documents

    usual = settled([3] * 96 + [900] * 4)
    assert usual[0] == 64 and len(usual[1]) == 100
    assert "sequence_length=64 follows the data; --sequence-length says" in caplog.text
    assert settled([3] * 90 + [900] * 10)[0] == 128  # no more than the teacher reads
    assert settled([3], sequence_length=16)[0] == 16


def test_a_bad_row_that_the_length_is_asked_of_comes_in_its_place(teacher: str, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "the cat"}\n' * 3 + '{"no": 1}\n')
    config = CacheConfig(teacher=teacher, data=str(path))
    _, source = with_length(config, open_source(config.data))
    assert list(islice(source.documents, 3)) == ["the cat"] * 3
    with pytest.raises(DataError, match="rows.jsonl"):
        list(source.documents)
