"""A corpus is the same bytes however often it was stopped and by how many ranks it was sampled.

That holds in float32 on a CPU: the last bits of a row's logits, which change with its neighbours,
hardly ever decide a draw.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from crash import stopped_at
from ranks_case import run_ranks

from qat.data.sources import open_source
from qat.errors import ConfigError, DataError
from qat.extensions.decode import corpus as module
from qat.extensions.decode.config import SampleConfig
from qat.extensions.decode.corpus import Corpus, Sampled, open_corpus, variety, write_corpus
from qat.extensions.decode.slots import Request, SlotStep
from qat.logs import Ticker
from qat.models.language_model import LanguageModel
from qat.ranks import ALONE, Ranks

SMALL = {"max_new_tokens": 12, "batch_size": 3, "shard_size": 4, "device": "cpu"}
NOTHING = {"rows": 22, **SMALL}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Questions with answers, of which a prompt has none, and a longer chat."""
    rows = [
        {"messages": [user("the cat"), answer("sat")]},
        {"messages": [user("the dog"), answer("<think>a cat</think>saw"), user("what")]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def sample(teacher: Path, out: Path, ranks: Ranks = ALONE, **settings: object) -> Sampled:
    model, corpus = opened(teacher, ranks, **settings)
    return write_corpus(model, corpus, out, ranks)


def opened(teacher: Path, ranks: Ranks = ALONE, **settings: object) -> tuple[LanguageModel, Corpus]:
    config = SampleConfig(**{**SMALL, **settings})
    config.check_asked()
    return open_corpus(str(teacher), config, ranks)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("whole") / "c.jsonl"
    sample(teacher, out, **NOTHING)
    return out.read_bytes()


def test_rows_say_their_teacher_and_settings(teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    found = sample(teacher, out, **NOTHING, temperature=0.9, top_p=0.8, seed=4)
    rows = rows_of(out)
    assert found.rows == len(rows) and found.rows + found.left_out == 22
    about = [row["sampled"] for row in rows]
    assert {(a["teacher"], a["dtype"], a["seed"], a["top_p"]) for a in about} == {
        (str(teacher), "float32", 4, 0.8)
    }
    assert [a["row"] for a in about] == sorted({a["row"] for a in about})
    assert sum(a["tokens"] for a in about) == found.tokens
    for a in about:
        assert a["ended"] or a["tokens"] == 12
    assert any(a["ended"] for a in about) and not all(a["ended"] for a in about)
    # the tokenizer adds no token in front, so that the text holds the one it began with
    assert all(row["text"].startswith("<|end|>") for row in rows)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    documents = list(open_source(str(out)).documents)
    assert documents == [row["text"] for row in rows]


def test_a_seed_is_another_corpus(whole: bytes, teacher: Path, tmp_path: Path) -> None:
    sample(teacher, tmp_path / "c.jsonl", **NOTHING, seed=1)
    texts = [row["text"] for row in rows_of(tmp_path / "c.jsonl")]
    assert texts[0] not in whole.decode()


@pytest.mark.parametrize("call", [0, 1, 3, 6])
def test_a_corpus_that_was_stopped_goes_on(whole: bytes, teacher, tmp_path, call: int) -> None:
    """The run stops when it writes its settings, and at each of its shards."""
    out = tmp_path / "c.jsonl"
    with stopped_at(module, "write_atomically", call):
        sample(teacher, out, **NOTHING)
    assert not out.exists()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(".c.jsonl.shards/0*")}
    assert len(kept) == max(0, call - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_join", lambda *_: None)
        patch.setattr(module, "_summary", lambda *_: None)
        sample(teacher, out, **NOTHING)
    assert all(path.stat().st_mtime_ns == kept[path] for path in kept)
    assert sample(teacher, out, **NOTHING).tokens_per_s is None
    assert out.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl"]


def patch_sampling(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    """Let samplers of corpora sample by `change(sample)`."""
    real = module.open_sampler

    def opened_sampler(*given: object) -> object:
        sampler = real(*given)
        sampler.sample = change(sampler.sample)
        return sampler

    monkeypatch.setattr(module, "open_sampler", opened_sampler)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the rows that a sampler is asked for, added when it reads them."""
    found = []

    def noted(requests: Iterable[Request]) -> Iterator[Request]:
        for request in requests:
            found.append(request.key[1])
            yield request

    patch_sampling(monkeypatch, lambda sample: lambda requests: sample(noted(requests)))
    return found


def sample_endless(teacher: Path, out: Path) -> Sampled:
    """Sample rows of 12 tokens each."""
    model, corpus = opened(teacher, **NOTHING)
    return write_corpus(model, corpus._replace(ends=frozenset()), out)


def test_a_batch_is_full_until_the_last_rows(teacher, tmp_path, asked, monkeypatch) -> None:
    read, real = [], SlotStep.logits
    monkeypatch.setattr(SlotStep, "logits", lambda *given: read.append(len(asked)) or real(*given))
    found = sample_endless(teacher, tmp_path / "c.jsonl")
    assert found.tokens == 22 * 12 and found.tokens_per_s > 0
    # 3 slots; shards of 4 rows, each sampled to its end, would take 132 steps
    assert len(read) == 8 * 12 and asked == [*range(22)]
    assert read[::12] == [3, 6, 9, 12, 15, 18, 21, 22]  # no row is prepared before it begins


def test_a_stop_costs_the_unfinished_shards(teacher: Path, tmp_path: Path, asked: list) -> None:
    """The run stops in the second of six shards, when the first is written."""
    out = tmp_path / "c.jsonl"
    with stopped_at(Ticker, "advance", 6):
        sample_endless(teacher, out)
    assert asked == [*range(9)] and not out.exists()
    (kept,) = tmp_path.glob(".c.jsonl.shards/0*")
    assert kept.name == "000000.jsonl" and len(kept.read_bytes().splitlines()) == 1 + 4
    asked.clear()
    sample_endless(teacher, out)
    assert asked == [*range(4, 22)]
    sample_endless(teacher, tmp_path / "whole.jsonl")
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_shards_may_end_in_any_order(whole, teacher, tmp_path, monkeypatch) -> None:
    written, real = [], module._write_shard

    def write(*given: object, path: Path, run: str) -> None:
        written.append(path.stem)
        real(*given, path=path, run=run)

    patch_sampling(monkeypatch, lambda sample: lambda requests: reversed([*sample(requests)]))
    monkeypatch.setattr(module, "_write_shard", write)
    sample(teacher, tmp_path / "c.jsonl", **NOTHING)
    assert written == [f"{number:06d}" for number in reversed(range(6))]
    assert (tmp_path / "c.jsonl").read_bytes() == whole


def test_ranks_write_the_bytes_of_one_process(whole: bytes, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    run_ranks(3, lambda ranks: sample(teacher, out, ranks, **NOTHING), tmp_path)
    assert out.read_bytes() == whole


def killed_at(call: int) -> Callable[..., None]:
    """Kill this process when it writes for the time number `call`."""
    real, left = module.write_atomically, call

    def counted(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*arguments)

    return counted


def test_a_killed_rank_costs_its_shard(whole: bytes, teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"

    def killed(ranks: Ranks) -> object:
        if ranks.rank == 1:
            module.write_atomically = killed_at(2)
        return sample(teacher, out, ranks, **NOTHING)

    first, second = run_ranks(2, killed, tmp_path)
    assert second is None and first["kind"] == "RuntimeError" and not out.exists()
    assert len(list(tmp_path.glob(".c.jsonl.shards/0*"))) == 4  # three of one, one of the other
    sample(teacher, out, **NOTHING)
    assert out.read_bytes() == whole


@pytest.mark.parametrize("harm", ["cut", "edited", "another", "empty"])
def test_a_shard_that_changed_is_sampled_again(whole, teacher, tmp_path, harm, caplog) -> None:
    out, parts = tmp_path / "c.jsonl", tmp_path / ".c.jsonl.shards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_join", lambda *_: None)
        patch.setattr(module, "_summary", lambda *_: None)
        sample(teacher, out, **NOTHING)
    shard = parts / "000001.jsonl"
    data = shard.read_bytes()
    other = (parts / "000000.jsonl").read_bytes()
    changed = {"cut": data[:-9], "edited": data.replace(b"text", b"tixt"), "another": other}
    shard.write_bytes(changed.get(harm, b""))
    (parts / "thesis.txt").write_text("mine")
    sample(teacher, out, **NOTHING)
    assert out.read_bytes() == whole and f"{shard} was changed" in caplog.text
    assert [path.name for path in parts.iterdir()] == ["thesis.txt"]


def test_a_finished_corpus_is_left_as_it_is(teacher: Path, tmp_path: Path, caplog) -> None:
    out = tmp_path / "c.jsonl"
    first = sample(teacher, out, **NOTHING)
    with (
        caplog.at_level("INFO", logger="qat.extensions.decode.corpus"),
        pytest.MonkeyPatch.context() as p,
    ):
        p.setattr(module, "open_sampler", None)
        again = sample(teacher, out, **NOTHING)
    assert again == first._replace(tokens_per_s=None)
    assert "is complete already: nothing to do" in caplog.text


def test_other_settings_are_refused_and_named(teacher: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.jsonl"
    with stopped_at(module, "write_atomically", 2):
        sample(teacher, out, **NOTHING)
    with pytest.raises(ConfigError, match=r"begun with other settings \(seed=0, now asked for see"):
        sample(teacher, out, **NOTHING, seed=1)
    with pytest.raises(ConfigError, match=r"rows=22, now asked for rows=9"):
        sample(teacher, out, **{**NOTHING, "rows": 9})
    sample(teacher, out, **NOTHING)
    kept = out.read_bytes()
    with pytest.raises(ConfigError, match=r"or settings \(temperature=1.0, now .*2.0\);"):
        sample(teacher, out, **NOTHING, temperature=2.0)
    # a row's version is no format of the prompts, and its mode may be one of several asked for
    with pytest.raises(ConfigError, match=r"other prompts or settings; choose another --out or"):
        sample(teacher, out, **NOTHING, format="plain")
    assert out.read_bytes() == kept
    out.write_text('{"text": "of somebody else"}\n')
    with pytest.raises(ConfigError, match="was not written by 'qat sample'"):
        sample(teacher, out, **NOTHING)


@pytest.mark.parametrize(("thinking", "prompt"), [
    ("false", "<|user|>the cat<|end|><|assistant|><think></think>"),
    ("true", "<|user|>the cat<|end|><|assistant|>"),
    ("none", "the cat\n\n"),
])  # fmt: skip
def test_chats_are_put_as_the_template_says(teacher, chats, tmp_path, thinking, prompt) -> None:
    settings = {"prompts": str(chats), "thinking": thinking, "samples": 3}
    model, corpus = opened(teacher, **settings)
    assert corpus.num_rows == 6
    assert corpus.tokenizer.decode(corpus.prompt(2).ids) == prompt
    assert corpus.prompt(3).said[-1] == user("what")
    # what was thought before is left out, unless thinking is asked for
    is_kept = "a cat" in corpus.tokenizer.decode(corpus.prompt(3).ids)
    assert is_kept == (thinking != "false")
    out = tmp_path / "c.jsonl"
    write_corpus(model, corpus, out)
    rows = rows_of(out)
    assert {row["sampled"]["thinking"] for row in rows} == {thinking}
    for row in rows:
        assert row["messages"][:-1] == corpus.prompt(row["sampled"]["row"]).said
        assert row["messages"][-1]["role"] == "assistant" and row["messages"][-1]["content"]
    assert open_source(str(out)).format == "messages"


def test_all_modes_are_rows_of_their_own(teacher: Path, chats: Path) -> None:
    _, corpus = opened(teacher, prompts=str(chats), thinking="all", samples=2, rows=9)
    modes = [corpus.prompt(row).mode for row in range(corpus.num_rows)]
    assert modes == [m for m in ("true", "false", "none", "true", "false") for _ in range(2)][:9]


def test_a_thought_that_the_template_begins_is_part_of_the_answer(teacher, chats, tmp_path) -> None:
    model, corpus = opened(teacher, prompts=str(chats), thinking="true", rows=1)
    corpus.tokenizer.chat_template = "{{ messages[-1].content }}<think>\n"
    config = SampleConfig(**SMALL, prompts=str(chats), thinking="true", rows=1)
    prompts, order = module.open_prompts(config.settings(), model, corpus.tokenizer)
    again = corpus._replace(prompts=prompts, order=order)
    write_corpus(model, again, tmp_path / "c.jsonl")
    (row,) = rows_of(tmp_path / "c.jsonl")
    assert row["messages"][-1]["content"].startswith("<think>\n")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ten prompts and three with equal shares, in the directory in which the test runs."""
    monkeypatch.chdir(tmp_path)
    for name, count in (("many.txt", 10), ("few.txt", 3)):
        Path(name).write_text("\n\n".join(f"the {name[0]} cat {n}" for n in range(count)))
    return "many.txt:0.5,few.txt:0.5"


def test_sources_have_exact_shares_and_rows_say_theirs(teacher: Path, sources: str) -> None:
    found = {}
    for out in (Path("one.jsonl"), Path("two.jsonl")):
        sample(teacher, out, prompts=sources, rows=9, seed=3)
        found[out] = out.read_bytes()
    assert len({*found.values()}) == 1
    _, corpus = opened(teacher, prompts=sources, rows=9)
    said = [corpus.prompt(row) for row in range(9)]
    assert Counter(prompt.source for prompt in said) == {"many": 5, "few": 4}
    assert [prompt.source for prompt in said[:4]] == ["many", "few", "many", "few"]
    # the fourth of the few is the first again, with its own draws
    few = [row for row in range(9) if said[row].source == "few"]
    assert said[few[3]].said == said[few[0]].said != said[few[1]].said
    assert corpus.request(few[3]).key != corpus.request(few[0]).key
    for row in rows_of(Path("one.jsonl")):
        about = row["sampled"]
        assert about["source"] == said[about["row"]].source
        assert row["messages"][:1] == said[about["row"]].said
    assert {row.source for row in open_source("one.jsonl").rows} == {"many", "few"}


def test_without_a_number_of_rows_no_prompt_comes_again(teacher: Path, sources: str) -> None:
    for asked, expected in (
        (sources, {"many": 3, "few": 3}),
        ("many.txt:3,few.txt:1", {"many": 9, "few": 3}),
        ("many.txt:9,few.txt:1", {"many": 10, "few": 1}),
    ):
        _, corpus = opened(teacher, prompts=asked)
        said = [corpus.prompt(row) for row in range(corpus.num_rows)]
        assert Counter(prompt.source for prompt in said) == expected
        assert len({str(prompt.said) for prompt in said}) == len(said)
    _, corpus = opened(teacher, prompts=sources, samples=2)
    assert Counter(corpus.order) == {0: 2, 1: 2, 2: 2, 10: 2, 11: 2, 12: 2}


def test_prompts_do_not_come_again_without_a_draw(teacher: Path, sources: str) -> None:
    opened(teacher, prompts=sources, rows=6, temperature=0)
    with pytest.raises(ConfigError, match=r"few.txt has 3 prompts for its share of 4 rows"):
        opened(teacher, prompts=sources, rows=8, temperature=0)


def test_other_shares_are_another_corpus(teacher: Path, sources: str) -> None:
    out = Path("c.jsonl")
    sample(teacher, out, prompts=sources, rows=4)
    with pytest.raises(ConfigError, match="other prompts or settings"):
        sample(teacher, out, prompts="many.txt:3,few.txt:1", rows=4)
    assert sample(teacher, out, prompts="many.txt:1,few.txt:1", rows=4).tokens_per_s is None


@pytest.mark.parametrize("raw", [False, True])
def test_plain_prompts_are_questions_or_beginnings(teacher: Path, tmp_path, raw: bool) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("the cat\n\nthe dog saw")
    out = tmp_path / "c.jsonl"
    sample(teacher, out, prompts=str(path), raw=raw)
    for row, text in zip(rows_of(out), ("the cat", "the dog saw"), strict=True):
        if raw:
            assert row["text"].startswith(text) and len(row["text"]) > len(text)
        else:
            assert row["messages"][0] == user(text)


def test_rows_that_repeat_themselves_are_left_out(teacher: Path, tmp_path: Path) -> None:
    assert variety("the the " * 50) < 0.1 < 0.8 < variety("A sentence that says one thing.")
    out = tmp_path / "c.jsonl"
    found = sample(teacher, out, **{**NOTHING, "max_new_tokens": 100}, least_variety=0.9)
    kept = [row["text"].removeprefix("<|end|>") for row in rows_of(out)]
    assert 0 < found.rows < 22 and found.left_out == 22 - found.rows
    assert all(variety(text) >= 0.85 for text in kept)


def test_prompts_that_leave_no_room_are_refused(teacher: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("short\n\n" + "the cat " * 100)
    said = r"prompt 2 \('the cat .*\) has \d+ tokens, but the model's window has 128"
    with pytest.raises(ConfigError, match=said):
        opened(teacher, prompts=str(path), raw=True)
    path.write_text("the cat " * 100 + "\n\nshort\n\n" + "the cat " * 200)
    with pytest.raises(ConfigError, match=r"prompt 1 \(.* it out, and 1 more that are too long"):
        opened(teacher, prompts=str(path), raw=True)
    path.write_text("the cat " * 60)  # which leaves a little
    model, corpus = opened(teacher, prompts=str(path), raw=True, max_new_tokens=100)
    request = corpus.request(0)
    assert 0 < request.limit < 100 and len(request.ids) + request.limit == 128


def test_chats_want_a_template_and_a_question(teacher: Path, chats: Path, tmp_path: Path) -> None:
    model, corpus = opened(teacher, rows=1)
    corpus.tokenizer.chat_template = None
    settings = SampleConfig(prompts=str(chats)).settings()
    with pytest.raises(ConfigError, match="needs a chat template, but the tokenizer has none"):
        module.open_prompts(settings, model, corpus.tokenizer)
    corpus.tokenizer.chat_template = '{{ "" }}'
    with pytest.raises(DataError, match="holds no token"):
        module.open_prompts(settings, model, corpus.tokenizer)
    chats.write_text(json.dumps({"messages": [answer("sat")]}) + "\n")
    with pytest.raises(DataError, match="holds answers alone"):
        opened(teacher, prompts=str(chats))


def test_a_model_that_says_nothing_is_one_line(teacher: Path, tmp_path: Path) -> None:
    model, corpus = opened(teacher, **NOTHING)
    every = corpus._replace(ends=frozenset(range(320)))
    with pytest.raises(DataError, match="none of 22 rows holds a text"):
        write_corpus(model, every, tmp_path / "c.jsonl")
    assert [*tmp_path.iterdir()] == []
