"""The builder: what it writes, how it goes on, and what it refuses."""

import errno
import logging
import math
import os
import random
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import cache_case
import pytest
import torch
import torch.nn.functional as F
from cache_case import build, contents, info, max_error, settings, teacher, texts
from tiny import VOCAB

from qat import logs
from qat.backend.base import Backend
from qat.data.cache import read_manifest
from qat.data.config import CacheConfig, CacheSettings
from qat.data.packing import NO_LABEL, labels, position_ids
from qat.data.reader import TeacherCache
from qat.data.stream import blocks, divided, split_of
from qat.errors import CacheError, ConfigError, DataError


class Interrupted(KeyboardInterrupt):
    """Stands for a crash, or for Ctrl-C."""


class FailingTeacher:
    """Passes everything on and crashes at its `fail_at`-th call."""

    def __init__(self, fail_at: int) -> None:
        self._inner = teacher()
        self._left = fail_at

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def hidden_of(self, batches: Iterable) -> Iterator[torch.Tensor]:
        for batch in batches:
            self._left -= 1
            if self._left == 0:
                raise Interrupted
            yield self._inner.hidden(*batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._inner.logits(hidden)


def sequences_of(split: str, **overrides: object) -> list[list[int]]:
    found = blocks(texts(), cache_case.TOKENIZER, settings(**overrides))
    return [row for b in found if b.split == split for row in b.packed.tokens.tolist()]


def test_cache_holds_the_teachers_own_distribution(built: Path) -> None:
    cache, model = TeacherCache.open(built), teacher()
    for split in ("train", "held_out"):
        batch = cache.batch(range(cache.num_sequences(split)), split)
        assert batch.input_ids.tolist() == sequences_of(split)
        logits = model.logits(model.hidden(batch.input_ids, batch.position_ids)).detach()
        exact = torch.log_softmax(logits.double(), -1)
        chosen = exact.gather(-1, batch.topk_ids)
        top, ids = exact.topk(5, dim=-1)
        torch.testing.assert_close(chosen, top, rtol=0, atol=1e-4)
        assert (batch.topk_logprobs - chosen).abs().max() < max_error(20.0, 5)
        tail = torch.log1p(-top.exp().sum(-1))
        torch.testing.assert_close(batch.tail_logprob.double(), tail, rtol=0, atol=1e-3)
        lse = cache.log_sum_exp(range(cache.num_sequences(split)), split)
        torch.testing.assert_close(lse, torch.logsumexp(logits, -1), rtol=0, atol=1e-4)
        assert torch.equal(batch.sample_counts.sum(-1), 6.0 * batch.mask)


def test_logits_are_formed_in_chunks_without_changing_a_byte(built, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Backend, "logits_at_once", lambda self: 15 * VOCAB)
    widths = []
    model = teacher()
    inner = model.logits
    model.logits = lambda hidden: widths.append(len(hidden)) or inner(hidden)
    build(tmp_path / "chunked", teacher=model)
    assert max(widths) == 8
    chunked, unchunked = TeacherCache.open(tmp_path / "chunked"), TeacherCache.open(built)
    for a, b in zip(chunked.batch(range(9)), unchunked.batch(range(9)), strict=True):
        torch.testing.assert_close(a, b)


def test_no_token_is_lost(built: Path) -> None:
    manifest = read_manifest(built)
    tokenizer = cache_case.TOKENIZER
    sizes = [len(tokenizer(text)["input_ids"]) + 1 for text in texts()]
    assert manifest.total("counted") == sum(sizes) - len(sizes)
    # a piece of 16 that goes on with a document repeats 4 tokens of it
    repeated = sum(4 * -(-max(0, size - 16) // 12) for size in sizes)
    assert manifest.total("tokens") == sum(sizes) + repeated


def test_limit_keeps_the_first_training_sequences(tmp_path: Path) -> None:
    full = sequences_of("train")
    for limit in (1, 9, 10, 17, len(full), len(full) + 5):
        limited = sequences_of("train", num_sequences=limit)
        assert limited == full[:limit]
    build(tmp_path / "c", num_sequences=17)
    cache = TeacherCache.open(tmp_path / "c")
    assert cache.num_sequences("train") == 17
    assert 0 < cache.num_sequences("held_out")


@pytest.mark.parametrize("kind", ["top_k", "draws"])
def test_a_cache_may_hold_only_one_kind(tmp_path: Path, kind: str) -> None:
    build(tmp_path / "c", **{kind: 0})
    batch = TeacherCache.open(tmp_path / "c").batch([3, 1])
    assert batch.topk_ids.shape == batch.topk_logprobs.shape == (2, 16, 0 if kind == "top_k" else 5)
    assert batch.sample_ids.shape[-1] == batch.sample_counts.shape[-1]
    assert (batch.sample_ids.shape[-1] == 0) == (kind == "draws")
    assert batch.tail_logprob.shape == (2, 16)


@pytest.mark.parametrize("k", [1, 320])
def test_one_token_and_the_whole_vocabulary_can_be_kept(tmp_path: Path, k: int) -> None:
    build(tmp_path / "c", top_k=k, documents=texts(8), held_out=0.0)
    batch = TeacherCache.open(tmp_path / "c").batch([0])
    mass = batch.topk_logprobs.double().exp().sum(-1) + batch.tail_logprob.double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)
    assert not batch.topk_logprobs.isnan().any()


@pytest.mark.parametrize("fail_at", [1, 3, 4, 7, 9, 12])
def test_an_interrupted_build_ends_in_the_same_bytes(built: Path, tmp_path, fail_at: int) -> None:
    out, threads = tmp_path / "c", threading.active_count()
    with pytest.raises(Interrupted):
        build(out, teacher=FailingTeacher(fail_at))
    assert threading.active_count() == threads
    done = read_manifest(out)
    assert done.state == "building"
    if fail_at > 3:
        with pytest.raises(CacheError, match="is an unfinished cache of [1-9]"):
            TeacherCache.open(out)
    build(out)
    assert contents(out) == contents(built)


@pytest.mark.parametrize("left", [2, 5, 8, 11, 13, 15, 19, 20])
def test_a_crash_between_any_two_file_operations_is_harmless(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    out = tmp_path / "c"
    calls = {"open": Path.open, "replace": Path.replace}

    def crashing(name: str) -> object:
        def call(self: Path, *args: object) -> object:
            nonlocal left
            if self.parent == out:
                left -= 1
                if left == 0:
                    raise Interrupted
            return calls[name](self, *args)

        return call

    for name in calls:
        monkeypatch.setattr(Path, name, crashing(name))
    with pytest.raises(Interrupted):
        build(out)
    monkeypatch.undo()
    build(out)
    assert contents(out) == contents(built)


def test_a_finished_cache_is_left_alone_and_a_lost_shard_rebuilt(built, tmp_path, caplog) -> None:
    out = tmp_path / "c"
    build(out)
    with caplog.at_level(logging.INFO, "qat"):
        build(out, teacher=FailingTeacher(1))
    assert "complete already" in caplog.text
    next(out.glob("train-00001*")).unlink()
    build(out)
    assert contents(out) == contents(built)


def test_a_full_disk_keeps_finished_shards(built: Path, tmp_path: Path, monkeypatch) -> None:
    out, calls, fsync = tmp_path / "c", [], os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left on device; finished shards are kept"):
        build(out)
    monkeypatch.undo()
    assert not list(out.glob("*.tmp"))
    assert len(read_manifest(out).shards) == 1
    build(out)
    assert contents(out) == contents(built)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "was built with top_k=5, now asked for top_k=7"),
        ({"seed": 1, "draws": 9}, "draws=6, now asked for draws=9; seed=0, now asked for seed=1"),
        ({"info": info(identity="e" * 32)}, "teacher=abc.*, now asked for teacher=e{32}"),
        ({"info": info(dtype="bfloat16")}, "dtype=float32, now asked for dtype=bfloat16"),
        ({"tokenizer": cache_case.tiny_tokenizer(270)}, "tokenizer=.*, now asked for tokenizer="),
    ],
)
def test_other_settings_in_the_same_directory_are_refused(built, change, message) -> None:
    before = contents(built)
    with pytest.raises(CacheError, match=message):
        build(built, **change)
    assert contents(built) == before


def test_data_that_changed_under_a_build_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "c"
    with pytest.raises(Interrupted):
        build(out, teacher=FailingTeacher(6))
    with pytest.raises(CacheError, match="train-00000.safetensors was built from other text"):
        build(out, documents=texts(seed=4))


def test_directories_that_are_no_cache_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear to me")
    with pytest.raises(CacheError, match="expected an empty directory or a teacher cache"):
        build(tmp_path)
    with pytest.raises(CacheError, match="is a file, expected a directory"):
        build(tmp_path / "thesis.txt")
    (tmp_path / "empty").mkdir()
    build(tmp_path / "empty", documents=texts(5))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": 321}, ConfigError, "top_k=321 is more than the teacher's vocabulary of 320"),
        ({"sequence_length": 129}, ConfigError, "sequence_length=129, but tiny reads at most 128"),
        ({"documents": []}, DataError, "data=words holds no text"),
        ({"documents": ["", ""]}, DataError, "data=words holds no text"),
        ({"info": info(vocab_size=100), "top_k": 3}, ConfigError, "vocabulary has 100"),
    ],
)
def test_what_cannot_work_is_refused_before_a_shard_is_written(
    tmp_path: Path, change: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        build(tmp_path / "c", **change)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_teacher_of_unknown_length_reads_anything(tmp_path: Path) -> None:
    build(tmp_path / "c", info=info(max_positions=None), documents=texts(3))


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = teacher()
    model.model.lm_head.weight.data[3] = torch.nan
    with pytest.raises(CacheError, match="the teacher gave a logit that is NaN"):
        build(tmp_path / "c", teacher=model)


@pytest.mark.parametrize(
    ("count", "held_out", "message"),
    [
        (2, 0.01, "held_out=0.01 keeps none of the 2 documents of data=words .* --held-out 0.24"),
        (2, 0.99, "held_out=0.99 keeps all 2 documents of data=words away from training"),
        (1, 0.5, "data=words is one document, and held_out=0.5 keeps whole documents away"),
    ],
)
def test_an_empty_split_is_refused_before_the_teacher_is_asked(
    tmp_path: Path, count: int, held_out: float, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path / "c", documents=texts(count), held_out=held_out, teacher=FailingTeacher(1))
    assert "--held-out 0 " not in f"{caught.value} "  # no student could be trained on such a cache
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("held_out", [0.01, 0.99])
def test_copies_are_one_document_which_no_share_divides(tmp_path: Path, held_out: float) -> None:
    with pytest.raises(DataError, match="is 5 documents of one prompt or nearly one text"):
        build(tmp_path / "c", documents=texts(1) * 5, held_out=held_out, teacher=FailingTeacher(1))


def test_reading_goes_on_until_something_is_held_out(tmp_path: Path) -> None:
    build(tmp_path / "c", num_sequences=1, held_out=0.05)
    cache = TeacherCache.open(tmp_path / "c")
    assert cache.num_sequences("train") == 1 and cache.num_sequences("held_out") >= 1


def test_near_identical_documents_never_straddle_the_split() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=5)) for _ in range(3000)]
    originals = [" ".join(rng.choices(words, k=rng.randrange(20, 200))) for _ in range(400)]
    documents = list(originals)
    for text in originals:
        changed = text.split()
        changed[rng.randrange(len(changed))] = "another"
        documents += [" ".join(changed), text.upper() + ".", text.replace(" ", "\n")]
    found = divided(documents, settings(held_out=0.3))
    sides = dict.fromkeys(documents)
    for row, side in found:
        sides[row.document] = side
    apart = sum(
        sides[document] != sides[originals[i % 400]] for i, document in enumerate(originals)
    )
    for i in range(400):
        copies = documents[400 + 3 * i : 403 + 3 * i]
        apart += sum(sides[copy] != sides[documents[i]] for copy in copies)
    assert apart <= 2
    # the others go where they always went
    assert [sides[text] for text in originals] == [split_of(text, 0, 0.3) for text in originals]
    assert 80 < sum(sides[text] == "held_out" for text in originals) < 160
    assert [sides[text] for text in originals] != [split_of(text, 1, 0.3) for text in originals]


def test_answers_to_one_prompt_are_held_out_together() -> None:
    answers = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} {n * k}"}]
        for n in range(100)
        for k in range(1, 4)
    ]
    sides = [side for _, side in divided(answers, settings(held_out=0.3))]
    assert sides[::3] == sides[1::3] == sides[2::3]
    assert sides[::3] == [split_of(first, 0, 0.3) for first in answers[::3]]
    with pytest.raises(DataError, match="is 3 documents of one prompt .* to other prompts too"):
        list(divided(answers[:3], settings(held_out=0.3)))
    assert 15 < sides[::3].count("held_out") < 45


def test_settings_keep_something_and_leave_the_device_out() -> None:
    with pytest.raises(ConfigError, match="top_k=0 and draws=0 keep nothing"):
        CacheSettings(data="x", top_k=0, sequence_length=8)
    config = CacheConfig(data="x", teacher="t", device="cpu", top_k=3, sequence_length=8)
    expected = CacheSettings(data="x", top_k=3, format="plain", sequence_length=8)
    assert config.settings("plain") == expected


def test_the_teachers_perplexity_is_that_of_whole_forwards(built: Path) -> None:
    manifest, model, nats, count = read_manifest(built), teacher(), 0.0, 0
    for block in blocks(texts(), cache_case.TOKENIZER, manifest.settings):
        ids, starts, mask = map(torch.from_numpy, block.packed[:3])
        following = labels(ids.long(), starts, mask)
        logits = model.logits(model.hidden(ids.long(), position_ids(starts))).detach().flatten(0, 1)
        nats += F.cross_entropy(logits.double(), following.flatten(), reduction="sum").item()
        count += int((following != NO_LABEL).sum())
    assert count == manifest.total("counted")
    assert manifest.teacher_ppl == pytest.approx(math.exp(nats / count), rel=1e-3)


def test_a_teacher_that_knows_the_text_is_no_cause_to_warn(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO", logger="qat")
    chats_of = {"documents": chats(), "format": "messages"}
    model = teacher()
    model.model.lm_head.weight.data *= 0.0  # uniform: what guessing has
    build(tmp_path / "c", teacher=model, targets="assistant", **chats_of)
    assert caplog.messages[-2].startswith("what assistants say counts, prompts, system and users")
    assert "on what counts is 320" in caplog.messages[-1]
    knowing = info(vocab_size=320 * 11)
    caplog.clear()
    build(tmp_path / "d", teacher=model, info=knowing, **chats_of)
    assert caplog.messages[-1].startswith("all tokens count, also those of prompts, system and")
    assert "the teacher's perplexity on what counts is 320 (" in caplog.messages[-1]


def test_a_cache_that_was_cut_anywhere_is_read_and_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "c"
    manifest = build(out)
    shards = [shard.model_copy(update={"surprise": None}) for shard in manifest.shards]
    old = manifest.model_copy(update={"rows": "stream", "shards": shards})
    (out / "manifest.json").write_bytes(old.to_bytes())
    raw = (out / "manifest.json").read_text()
    assert "rows" not in raw and "surprise" not in raw
    opened = TeacherCache.open(out).manifest
    assert opened == old and opened.teacher_ppl is None
    with pytest.raises(CacheError, match="was built with rows=stream, now asked for rows=document"):
        build(out)


def test_a_build_that_goes_on_counts_what_is_there(tmp_path: Path, monkeypatch, caplog) -> None:
    manifest = build(tmp_path / "cache")
    (tmp_path / "cache" / manifest.shards[-1].file).unlink()
    monkeypatch.setattr(logs, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(logs, "LINE_EVERY_S", 0.0)
    caplog.set_level("INFO", logger="qat")
    caplog.clear()
    build(tmp_path / "cache")
    total, last = manifest.total("sequences"), manifest.shards[-1].sequences
    assert f"asking the teacher: {total - last + min(4, last)} of" in caplog.messages[1]


def chats(count: int = 30) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(texts(count), texts(count, seed=4), strict=True)
    ]


def test_assistants_alone_count_in_chats(tmp_path: Path) -> None:
    build(tmp_path / "said", documents=chats(), targets="assistant", format="messages")
    build(tmp_path / "all", documents=chats(), format="messages")
    said, everything = TeacherCache.open(tmp_path / "said"), TeacherCache.open(tmp_path / "all")
    assert said.manifest.settings.targets == "assistant"
    assert said.manifest.fingerprint != everything.manifest.fingerprint
    some = said.batch(range(said.num_sequences("train")))
    counted, labelled = int(some.mask.sum()), some.labels != -100
    assert counted == sum(shard.counted for shard in said.manifest.of_split("train"))
    assert (labelled <= some.mask).all() and some.mask.any(1).all()
    assert 0.2 < counted / said.manifest.total("tokens") < 0.6
    assert said.manifest.total("counted") < everything.manifest.total("counted")
    # nothing is drawn for what is not learned
    assert (some.sample_counts.sum(-1)[~some.mask] == 0).all()


def test_a_cache_from_before_there_were_targets_counts_all(tmp_path: Path) -> None:
    build(tmp_path / "c")
    raw = (tmp_path / "c" / "manifest.json").read_text()
    assert "targets" not in raw
    assert TeacherCache.open(tmp_path / "c").manifest.settings.targets == "all"
    with pytest.raises(CacheError, match="targets=all, now asked for targets=assistant"):
        build(tmp_path / "c", targets="assistant")
