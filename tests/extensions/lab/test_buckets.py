"""Steps of sequences of similar length, and what they share with the order of a plain cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build, texts
from pydantic import ValidationError
from train_case import assert_same_end, config, make_place

from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.extensions.lab.buckets import WINDOW, open_buckets, used
from qat.hooks import extension
from qat.train.start import train_student


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TeacherCache:
    out = tmp_path_factory.mktemp("cache")
    build(out / "cache", documents=texts(60, seed=5), sequence_length=32)
    return TeacherCache.open(out / "cache")


def test_a_window_keeps_its_sequences_and_its_steps_are_of_one_bucket(cache: TeacherCache) -> None:
    bucketed = open_buckets(cache, "20,28,32")
    targets, count = ("topk", "draws"), 3
    steps = range(WINDOW, 2 * WINDOW)
    plain, ours = ([each.indices(7, n, count) for n in steps] for each in (cache, bucketed))
    assert sorted(np.concatenate(plain)) == sorted(np.concatenate(ours))
    lengths = []
    for indices in ours:
        whole, cut = (each.micro_batches(indices[:, None], targets) for each in (cache, bucketed))
        longest = max(int(used(batch.mask).max()) for batch in whole)
        lengths.append(cut[0].mask.shape[1])
        assert lengths[-1] == min(n for n in (20, 28, 32) if n >= longest)
        for old, new in zip(whole, cut, strict=True):
            assert all(torch.equal(a[:, : lengths[-1]], b) for a, b in zip(old, new, strict=True))
            assert not old.mask[:, lengths[-1] :].any()
    assert len({*lengths}) > 1
    # an unsorted order meets the longest in more steps
    longest = [int(used(cache.batch(indices).mask).max()) for indices in plain]
    assert sum(lengths) < sum(min(n for n in (20, 28, 32) if n >= each) for each in longest)


def test_lengths_end_with_a_sequence(cache: TeacherCache) -> None:
    assert open_buckets(cache, "auto")._buckets == (4, 8, 16, 32)
    assert open_buckets(cache, "8, 32")._buckets == (8, 32)
    for wrong in ("16", "32,16", "16,64", "0,32", "16,16,32", "a", "16,,32", "-8,32", "8.5,32"):
        with pytest.raises(ConfigError, match=f"bucket_lengths={wrong} of .*; write 4,8,16,32 or"):
            open_buckets(cache, wrong)
    for values in (
        {"bucket_lengths": "auto", "order": "arrival"},
        {"bucket_lengths": "auto", "on_policy": 0.5, "teacher": "t"},
    ):
        with pytest.raises(ValidationError):
            config(Path("place"), **values)
    assert extension("qat.caches", "buckets") is open_buckets


@pytest.mark.slow
def test_one_bucket_trains_as_without_to_the_bit(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    student = str(place / "student")
    out = {lengths: tmp_path / f"run{lengths}" for lengths in ("", "16", "8,12,16")}
    ended = {
        lengths: train_student(config(place, bucket_lengths=lengths), student, run, resume=False)
        for lengths, run in out.items()
    }
    assert_same_end((out[""], ended[""]), out["16"], ended["16"])
    losses = [(run / "training.csv").read_text() for run in out.values()]
    assert losses[0] == losses[1] != losses[2]
