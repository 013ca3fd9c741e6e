"""Several texts with shares: how they are written, what is refused, and whose turn it is."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import TOKENIZER, build, contents, info, settings, teacher, texts
from cli_case import call
from quantized import SPECS, tiny_quantized
from ranks_case import run_ranks
from train_case import config, trainer_of

from qat.cli.train import _before_and_after
from qat.data.cache import read_manifest
from qat.data.reader import TeacherCache
from qat.data.sources import Sourced, check_source, open_source
from qat.data.stream import divided
from qat.errors import DataError
from qat.evaluate.divergence import cached_divergence, sequences_by_source
from qat.extensions.mixtures.mixture import counts_of, in_turns, parts_of
from qat.models.checkpoint import save_checkpoint
from qat.models.load import model_identity
from qat.nn.step import form_weights
from qat.observe.page import _run_view
from qat.observe.runs import read_directory
from qat.train.judge import Judged
from qat.train.start import train_student


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two texts of the same words and one of chats, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("a.jsonl", 1), ("b.jsonl", 2)):
        write(Path(name), [{"text": text} for text in texts(60, seed)])
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on it"}]
    write(Path("chats.jsonl"), [{"messages": chat}] * 4)
    return tmp_path


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("a.jsonl:0.5,b.jsonl:0.5", {"a.jsonl": 0.5, "b.jsonl": 0.5}),
        ("a.jsonl:1,b.jsonl:3", {"a.jsonl": 0.25, "b.jsonl": 0.75}),
        ("a.jsonl:2e0, b.jsonl:2,", {"a.jsonl": 0.5, "b.jsonl": 0.5}),
        (r"C:\texts\a.jsonl:1,D:\b.jsonl:1", {r"C:\texts\a.jsonl": 0.5, r"D:\b.jsonl": 0.5}),
        ("me/it:config@split:1,2024:1/b:1", {"me/it:config@split": 0.5, "2024:1/b": 0.5}),
        ("one.txt:7", {"one.txt": 1.0}),
    ],
)
def test_shares_are_weights_behind_the_last_colon(mixture: str, expected: dict) -> None:
    found = {part.place: part.share for part in parts_of(mixture, setting="data")}
    assert found == pytest.approx(expected)


def test_a_path_may_hold_a_comma(here: Path) -> None:
    Path("a, b.txt").write_text("the cat\n\nthe dog")
    assert [part.place for part in parts_of("a, b.txt:1,a.jsonl:1", setting="data")] == [
        "a, b.txt",
        "a.jsonl",
    ]
    assert len([*open_source("a, b.txt").documents]) == 2  # alone it needs no share


@pytest.mark.parametrize(
    ("mixture", "found"),
    [
        ("a.jsonl:0.5,b.jsonl:0", "the share 0,"),
        ("a.jsonl:0.5,b.jsonl:-1", "the share -1,"),
        ("a.jsonl:0.5,b.jsonl:nan", "the share nan,"),
        ("a.jsonl:0.5,b.jsonl:inf", "the share inf,"),
        ("a.jsonl:half,b.jsonl:0.5", "the share half,"),
        ("a.jsonl:,b.jsonl:1", "the share nothing,"),
        ("a.jsonl,b.jsonl", "without its share"),
        ("a.jsonl:0.5,b.jsonl", "without its share"),
        ("a.jsonl,b.jsonl:0.5", "no share of each in a.jsonl,b.jsonl"),
        ("a.jsonl:0.5,a.jsonl:0.5", "a.jsonl twice"),
        ("a.jsonl:0.5,missing.jsonl:0.5", "data=missing.jsonl is no file"),
    ],
)
def test_clumsy_shares_are_one_line(here: Path, mixture: str, found: str) -> None:
    with pytest.raises(DataError) as caught:
        check_source(mixture)
    assert found in str(caught.value) and "expected" in str(caught.value)


@pytest.mark.parametrize("total", [0, 1, 7, 100, 1001])
def test_counts_are_exact(total: int) -> None:
    for shares in ([0.5, 0.5], [1 / 3] * 3, [0.7, 0.2, 0.1], [0.999, 0.001]):
        counts = counts_of(total, shares)
        assert sum(counts) == total
        assert all(abs(n - total * share) < 1 for n, share in zip(counts, shares, strict=True))


def test_turns_are_even() -> None:
    turns = np.array(in_turns([300, 100, 1]))
    assert np.bincount(turns).tolist() == [300, 100, 1]
    for end in range(1, len(turns)):
        seen = np.bincount(turns[:end], minlength=3)
        assert np.abs(seen - end * np.array([300, 100, 1]) / 401).max() <= 1.5


def test_documents_come_in_their_shares_of_characters(here: Path) -> None:
    source = open_source("a.jsonl:1,b.jsonl:3")
    assert source.format == "plain" and source.name == "a-b"
    sizes, longest = {"a": 0, "b": 0}, max(map(len, texts(60, 1) + texts(60, 2)))
    rows = [*source.rows]
    for row in rows:
        sizes[row.source] += len(row.document)
        assert row.share == {"a": 0.25, "b": 0.75}[row.source]
        assert abs(sizes["a"] * 3 - sizes["b"]) <= 3 * longest
    # it ends with b; of a no more is read than its share
    assert [row.document for row in rows if row.source == "b"] == texts(60, 2)
    assert [row.document for row in rows if row.source == "a"] == texts(60, 1)[: len(rows) - 60]


def test_sources_of_one_name_keep_their_places_and_formats_may_differ(here: Path) -> None:
    Path("x").mkdir()
    write(Path("x/a.jsonl"), [{"text": "the dog"}])
    assert {row.source for row in open_source("a.jsonl:1,x/a.jsonl:1").rows} == {
        "a.jsonl",
        "x/a.jsonl",
    }
    assert open_source("a.jsonl:1,chats.jsonl:1").format == "messages"
    assert open_source("chats.jsonl:1").format == "messages"


def test_a_cache_has_the_shares_and_says_the_source_of_each_row(here: Path) -> None:
    for name, swap in (("a", "dog"), ("b", "cat")):  # each text lacks a word of the other
        write(Path(f"{name}.jsonl"), [{"text": t.replace(swap, "sat")} for t in texts(60)])
    rows = open_source("a.jsonl:0.25,b.jsonl:0.75").rows
    manifest = build(here / "c", documents=rows, num_sequences=22, shard_size=4)
    cache = TeacherCache.open(here / "c")
    found = sequences_by_source(cache, "train")
    assert {name: len(places) for name, places in found.items()} == {"a": 6, "b": 16}
    assert sorted(itertools.chain.from_iterable(found.values())) == [*range(22)]
    for split in ("train", "held_out"):
        said = {
            name: cache.batch(r, split).input_ids
            for name, r in sequences_by_source(cache, split).items()
        }
        words = {name: set(TOKENIZER.decode(ids.flatten()).split()) for name, ids in said.items()}
        assert "cat" in words["a"] - words["b"] and "dog" in words["b"] - words["a"]
    assert {shard.source for shard in manifest.shards} == {"a", "b"}
    assert read_manifest(here / "c") == manifest


def test_an_interrupted_mixture_ends_in_the_same_bytes(here: Path) -> None:
    def documents() -> list[Sourced]:
        return [*open_source("a.jsonl:1,b.jsonl:1").rows]

    build(here / "whole", documents=documents())
    build(here / "again", documents=documents())
    (here / "again" / "train-00001.safetensors").unlink()  # of the other source
    build(here / "again", documents=documents())
    assert contents(here / "again") == contents(here / "whole")


def test_two_ranks_build_the_bytes_of_one(here: Path) -> None:
    build(here / "alone", documents=mixed(here))
    ours = {"documents": mixed(here)}
    run_ranks(2, lambda ranks: build(here / "c", ranks=ranks, **ours), here)
    assert contents(here / "c") == contents(here / "alone")


def test_each_source_is_held_out(here: Path) -> None:
    rows = [Sourced(text, "a", 0.9) for text in texts(50)]
    few = [Sourced("a text that nobody else has", "b", 0.1)]
    with pytest.raises(DataError, match="b in data=words is one document"):
        [*divided(rows + few, settings())]
    found = {(row.source, side) for row, side in divided(mixed(here), settings(held_out=0.1))}
    assert found == set(itertools.product("ab", ("train", "held_out")))


def mixed(here: Path) -> list[Sourced]:
    return [*open_source("a.jsonl:0.8,b.jsonl:0.2").rows]


def test_rows_of_qat_sample_keep_their_sources_in_one_file(here: Path) -> None:
    rows = [
        {"text": text, "sampled": {"source": "code" if i % 3 else "prose"}}
        for i, text in enumerate(texts(60, 1))
    ]
    write(Path("own.jsonl"), rows)
    source = open_source("own.jsonl")
    manifest = build(here / "c", documents=source.rows, num_sequences=20)
    cache = TeacherCache.open(here / "c")
    assert (
        set(sequences_by_source(cache, "train")) == {"code", "prose"}
        and cache.num_sequences("train") == 20
    )
    assert manifest.total("sequences") == 20 + cache.num_sequences("held_out")


def test_the_first_rows_are_a_share_of_each_source(here: Path) -> None:
    build(here / "c", documents=mixed(here), num_sequences=30)
    cache = TeacherCache.open(here / "c")
    whole, some = sequences_by_source(cache, "train"), sequences_by_source(cache, "train", 10)
    assert {name: len(places) for name, places in some.items()} == {"a": 8, "b": 2}
    assert all((whole[name][: len(some[name])] == some[name]).all() for name in some)
    assert len(sequences_by_source(cache, "train", 1)["b"]) == 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, its teacher, and a cache of two sources of which one is rare."""
    place = tmp_path_factory.mktemp("place")
    rows = [Sourced(text, "code", 0.8) for text in texts(60, 1)]
    rows += [Sourced(text, "prose", 0.2) for text in texts(20, 2)]
    model = teacher()
    model.model.save_pretrained(place / "teacher")
    TOKENIZER.save_pretrained(place / "teacher")
    known = info(name="teacher", identity=model_identity(str(place / "teacher")))
    build(place / "cache", documents=rows, info=known, teacher=model, held_out=0.3)
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut2"]), TOKENIZER, place / "student")
    return place


def test_train_judges_each_source(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path / "run", eval_sequences=12, batch_size=8)
    form_weights(trainer.student.model, torch.float32)
    verdict = trainer.judge.verdict(torch.float32)
    cache = trainer.judge.cache
    chosen = Judged.first(cache, 12)
    sources = sequences_by_source(cache, "held_out")
    sums = {}
    for name in ("code", "prose"):
        own = [place for place in chosen.places if place in sources[name]]
        alone = cached_divergence(trainer.student, [cache.batch(own, "held_out")])
        assert verdict[f"kl_tail_nats/{name}"] == pytest.approx(alone.kl_tail_nats, rel=1e-6)
        sums[name] = alone.kl_tail_nats * alone.num_tokens, alone.num_tokens
    kl, tokens = map(sum, zip(*sums.values(), strict=True))
    assert verdict["kl_tail_nats"] == pytest.approx(kl / tokens, rel=1e-6)
    assert verdict["num_tokens"] == tokens and len(chosen.places) <= 12


def test_a_run_its_report_and_eval_show_each_source(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    out = tmp_path / "run"
    train_student(config(place, max_steps=3), str(place / "student"), out, resume=None)
    run = read_directory(out)
    assert all({"kl_tail_nats/code", "kl_tail_nats/prose"} <= row.keys() for row in run.evals)
    assert "kl_tail_nats/prose" in (out / "val.csv").read_text().splitlines()[0]
    tiles = [label for label, _ in _run_view(run)["tiles"]]
    assert "the same of code" in tiles and "the same of prose" in tiles
    shown = [str(cell) for cell in _before_and_after(run.evals[0], run.best()).columns[0].cells]
    assert "KL, nats (top-K and tail): prose" in shown
    capsys.readouterr()
    words = ("eval", place / "student", "--cache-dir", place / "cache", "--device", "cpu")
    assert call(monkeypatch, *words) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found["kl_tail_nats/code"] > 0 and found["kl_tail_nats/prose"] > 0
    assert "kl tail nats: prose" in printed
    assert call(monkeypatch, "cache", "info", place / "cache") == 0
    assert "tokens of prose" in capsys.readouterr().out
