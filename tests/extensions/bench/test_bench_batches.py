"""Batches: random ones have the form of real ones, real ones come from the cache."""

from pathlib import Path

import pytest
import torch
from cache_case import build

from qat.backend import device as backend
from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.extensions.bench.batches import check_batch_sizes, open_source
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import open_student

CPU = backend.select("cpu")


def config(**values: object) -> BenchConfig:
    return BenchConfig(device="cpu", **values)


def test_a_random_batch_has_the_form_of_a_real_one(place: Path) -> None:
    student = open_student(str(place / "student"), config())
    random = open_source(config(seq_len=16, top_k=5, loss="sampled"), student)
    random, real = random.batch(4, 0, CPU), TeacherCache.open(place / "cache").batch(range(4))
    for name in random._fields:
        ours, theirs = getattr(random, name), getattr(real, name)
        assert ours.dtype == theirs.dtype and ours.dim() == theirs.dim(), name
        assert ours.shape[:2] == theirs.shape[:2], name


def test_random_targets_are_a_distribution_over_distinct_tokens() -> None:
    student = open_student("tiny", config())
    source = open_source(config(), student)
    batch, again, other = (source.batch(3, step, CPU) for step in (0, 0, 1))
    assert torch.equal(batch.input_ids, again.input_ids)
    assert not torch.equal(batch.input_ids, other.input_ids)
    assert batch.input_ids.shape == (3, 64) and batch.topk_ids.shape == (3, 64, 64)
    ids = batch.topk_ids.sort(-1).values
    assert (ids[..., 1:] > ids[..., :-1]).all() and ids.max() < 512
    whole = batch.topk_logprobs.exp().sum(-1) + batch.tail_logprob.exp()
    torch.testing.assert_close(whole, torch.ones(3, 64))
    assert (batch.topk_logprobs[..., 1:] <= batch.topk_logprobs[..., :-1]).all()
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])


def test_a_cache_gives_its_sequences_and_repeats_them_for_large_batches(place: Path) -> None:
    student = open_student(str(place / "student"), config())
    source = open_source(config(cache_dir=place / "cache"), student)
    total = source.num_sequences
    assert source.kind.startswith("cache ") and source.seq_len == 16 and source.top_k == 5
    rows = source.batch(2 * total, 0, CPU).input_ids
    assert len(rows.unique(dim=0)) <= total
    with pytest.raises(ConfigError, match=f"is more than the {total} training sequences of"):
        check_batch_sizes(source, (2, total + 1), 1)
    check_batch_sizes(source, (total,), 1)


def test_a_shape_learns_the_words_of_both(place: Path) -> None:
    tiny = open_student("tiny", config())
    source = open_source(config(cache_dir=place / "cache"), tiny)
    assert (tiny.num_words, tiny.config.vocab_size) == (320, 512)
    assert source.num_sequences > 0


def test_what_does_not_fit_is_refused(place: Path, tmp_path: Path) -> None:
    build(tmp_path / "without", draws=0)
    own, cached = str(place / "student"), {"cache_dir": place / "cache"}
    for student, values, error, message in (
        (own, {**cached, "seq_len": 32}, ConfigError, "--seq-len 32, but .* holds 16"),
        (own, {**cached, "top_k": 6}, ConfigError, "--top-k 6, but .* holds 5"),
        (own, {"cache_dir": tmp_path / "without", "loss": "sampled"}, ConfigError, "loss=sampled"),
        ("tiny", {"seq_len": 50_000}, ConfigError, "seq_len=50000, .* at most 40960"),
    ):
        with pytest.raises(error, match=message):
            open_source(config(**values), open_student(student, config()))
