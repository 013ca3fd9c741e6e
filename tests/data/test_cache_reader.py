"""Reading a cache in any order, and finding every kind of damage."""

import json
import random
from pathlib import Path

import pytest
import torch
from cache_case import build

from qat.backend.cpu import CpuBackend
from qat.data.cache import MANIFEST, read_manifest
from qat.data.reader import TeacherCache
from qat.data.shard_file import check_shards, raise_if_any_damaged
from qat.errors import CacheError


def verify(directory: Path) -> None:
    raise_if_any_damaged(directory, check_shards(directory)[1])


def test_only_the_targets_asked_for_are_unpacked(built: Path) -> None:
    cache = TeacherCache.open(built)
    everything = cache.batch(range(4))
    assert everything.topk_ids.shape[-1] > 0 and everything.sample_ids.shape[-1] > 0
    for targets in ([], ["topk"], ["draws"]):
        found = cache.batch(range(4), targets=targets)
        for name, whole in everything._asdict().items():
            kind = {"topk_ids": "topk", "topk_logprobs": "topk", "tail_logprob": "topk"}
            kind |= {"sample_ids": "draws", "sample_counts": "draws"}
            wanted, part = kind.get(name, "always"), getattr(found, name)
            if wanted in {"always", *targets}:
                assert torch.equal(part, whole)
            else:
                assert part.dtype == whole.dtype and not part.any()


def test_labels_follow_the_tokens(built: Path) -> None:
    batch = TeacherCache.open(built).batch([0, 1])
    known = batch.labels[:, :-1] >= 0
    assert torch.equal(batch.labels[:, :-1][known], batch.input_ids[:, 1:][known])
    assert batch.position_ids[:, 0].tolist() == [0, 0]


def test_a_batch_goes_to_a_device_through_pinned_memory(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, here = TeacherCache.open(built).batch([0, 1]), torch.device("cpu")
    monkeypatch.setattr(CpuBackend, "pinned", lambda _, tensor: tensor.clone())
    for old, new in zip(batch, batch.to(here), strict=True):
        assert new is not old and torch.equal(new, old)


def test_indices_outside_the_split_are_refused(built: Path) -> None:
    cache = TeacherCache.open(built)
    for bad in (-1, cache.num_sequences("held_out")):
        with pytest.raises(IndexError, match="reach outside"):
            cache.batch([0, bad], "held_out")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_found_and_named(copy: Path, every: bool) -> None:
    rng = random.Random(0)
    for path in sorted(copy.iterdir()):
        raw = path.read_bytes()
        is_whole = every and path.name == MANIFEST
        places = range(len(raw)) if is_whole else rng.sample(range(len(raw)), 60)
        for place in places:
            flipped = bytearray(raw)
            flipped[place] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            with pytest.raises(CacheError, match=path.name):
                verify(copy)
        path.write_bytes(raw)
    verify(copy)


def test_a_truncated_or_missing_shard_is_found_at_open(copy: Path) -> None:
    path = copy / "train-00000.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(CacheError, match=rf"{len(raw) - 1} bytes instead of {len(raw)}; restore"):
        TeacherCache.open(copy)
    path.unlink()
    with pytest.raises(CacheError, match="train-00000.safetensors: missing"):
        TeacherCache.open(copy)
    with pytest.raises(CacheError, match=r"1 of \d+ shards are damaged .*: missing"):
        verify(copy)


def test_missing_and_foreign_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is not there, expected a teacher cache"):
        TeacherCache.open(tmp_path / "none")
    with pytest.raises(CacheError, match="holds no manifest.json"):
        TeacherCache.open(tmp_path)
    (tmp_path / MANIFEST).write_text('{"files": []}')
    with pytest.raises(CacheError, match="not the manifest of a teacher cache"):
        TeacherCache.open(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(CacheError, match="is damaged: it is not JSON"):
        TeacherCache.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "says format=1, this version reads format=3"),
        ({"colour": "red"}, "is damaged: colour"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(copy: Path, change: dict, message: str) -> None:
    values = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**values, **change}))
    with pytest.raises(CacheError, match=message):
        TeacherCache.open(copy)


def test_students_that_do_not_fit_are_refused(built: Path) -> None:
    cache = TeacherCache.open(built)
    tokenizer = cache.manifest.tokenizer
    assert cache.check_student(tokenizer, 320, 16) == cache.check_student(tokenizer, 328, None)
    assert cache.check_student(tokenizer, 312, None) == cache.num_words == 312
    with pytest.raises(CacheError, match="the student has 0123, .*qat cache realign"):
        cache.check_student("0123", 320, 128)
    with pytest.raises(CacheError, match="sequences of 16 tokens, the student reads at most 15"):
        cache.check_student(tokenizer, 320, 15)


def test_the_fingerprint_changes_with_the_settings(built: Path, tmp_path: Path) -> None:
    build(tmp_path / "c", seed=5)
    assert read_manifest(tmp_path / "c").fingerprint != read_manifest(built).fingerprint
