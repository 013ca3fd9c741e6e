"""Rows read one by one are those of the whole file; nothing of a large cache stays in memory."""

import json
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build
from safetensors.torch import load_file, save_file

from qat.data import shard_file
from qat.data.cache import MANIFEST, Manifest, read_manifest
from qat.data.codec import id_bits, pack_bits, packed_bytes
from qat.data.reader import TeacherCache
from qat.data.shard_file import (
    BRIDGE,
    MOST_BUFFERS,
    Read,
    check_shards,
    promised_layout,
    raise_if_any_damaged,
    reads,
)
from qat.errors import CacheError
from qat.files import sha256_file


def sealed(directory: Path, **changes: object) -> None:
    """Make hashes and sizes right again, as whoever sends an evil cache would."""
    manifest = read_manifest(directory)
    shards = []
    for shard in manifest.shards:
        path = directory / shard.file
        size, digest = path.stat().st_size, sha256_file(path)
        shards.append(shard.model_copy(update={"bytes": size, "sha256": digest}))
    changed = manifest.model_copy(update={"shards": shards, **changes})
    (directory / MANIFEST).write_bytes(changed.to_bytes())


def first_shard(directory: Path) -> Path:
    return directory / "train-00000.safetensors"


def everything(directory: Path) -> None:
    cache = TeacherCache.open(directory)
    every = range(cache.num_sequences("train"))
    cache.batch(every)
    cache.log_sum_exp(every)


def verify(directory: Path) -> None:
    raise_if_any_damaged(directory, check_shards(directory)[1])


def rows_of(directory: Path) -> list[torch.Tensor]:
    tensors = load_file(first_shard(directory))
    return [*tensors["rows"].split(tensors["row_begins"].diff().tolist())]


def test_a_row_holds_all_of_a_sequence(built: Path) -> None:
    layout = promised_layout(read_manifest(built))
    cache, seen = TeacherCache.open(built), []
    assert [*layout.fields][0] == "log_sum_exp" and layout.has_draws
    for place, row in enumerate(rows_of(built)):
        field = layout.offsets["log_sum_exp"], layout.fields["log_sum_exp"].stride
        lse = row[field[0] : sum(field)].clone().view(torch.float32)
        assert torch.equal(lse, cache.log_sum_exp([place])[0])
        batch = cache.batch([place])
        counted = int((batch.sample_counts > 0).sum())
        bits = id_bits(cache.manifest.teacher.vocab_size)
        assert len(row) - layout.width == packed_bytes(counted, bits)
        seen.append(len(row))
    assert len(set(seen)) > 1


@pytest.mark.parametrize("targets", [(), ("topk",), ("draws",), ("topk", "draws")])
def test_rows_side_by_side_and_scattered_are_the_same(built: Path, targets: tuple) -> None:
    cache = TeacherCache.open(built)
    count = cache.num_sequences("train")
    together = cache.batch(range(count), targets=targets)
    order = np.random.default_rng(0).permutation(count)
    for one, other in zip(together, cache.batch(order, targets=targets), strict=True):
        width = one.shape[-1] if one.ndim < 3 else min(one.shape[-1], other.shape[-1])
        assert torch.equal(one[order][..., :width], other[..., :width])


def test_reads_jump_over_long_gaps_and_fill_few_buffers() -> None:
    out = memoryview(bytearray(10))
    near, far = [(0, out), (10, out), (25, out)], (25 + 10 + BRIDGE + 1, out)
    first, second = reads([*near, far])
    assert (first.begin, first.size, [len(each) for each in first.outs]) == (0, 35, [10, 10, 5, 10])
    assert (second.begin, second.size, len(second.outs)) == (far[0], 10, 1)
    many = list(reads((20 * place, out) for place in range(3000)))
    assert sum(read.size for read in many) < 20 * 3000
    assert all(len(read.outs) <= MOST_BUFFERS for read in many) and len(many) == 6
    assert list(reads([])) == []


def test_a_read_that_stops_half_way_goes_on(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, real = TeacherCache.open(built), os.preadv
    expected = cache.batch([25, 3, 4, 11])

    def short(file: int, outs: list[memoryview], begin: int) -> int:
        return real(file, [outs[0][:7]], begin)

    monkeypatch.setattr(os, "preadv", short)
    for one, other in zip(cache.batch([25, 3, 4, 11]), expected, strict=True):
        assert torch.equal(one, other)
    monkeypatch.setattr(os, "preadv", lambda file, outs, begin: 0)
    with pytest.raises(CacheError, match="it ends early"):
        cache.batch([25])


def test_a_read_of_nothing_asks_for_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(built)
    shard = manifest.shards[0]
    opened = shard_file.OpenShard(built / shard.file, shard, promised_layout(manifest))
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: asked.append(call[1:3]), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    for size in (0, 5):  # of no bytes the system would take: up to the end of the file
        opened.prefetch(Read(8, size, []))
    assert asked == [(8, 5)]
    monkeypatch.delattr(os, "posix_fadvise")
    opened.prefetch(Read(8, 5, []))


def test_only_the_shards_used_last_stay_open(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qat.data.reader.OPEN_SHARDS", 1)
    handles = len(os.listdir("/proc/self/fd"))
    cache = TeacherCache.open(built)
    expected = TeacherCache.open(built).batch([0, 25, 11, 1])
    for _ in range(3):
        for one, other in zip(cache.batch([0, 25, 11, 1]), expected, strict=True):
            assert torch.equal(one, other)
    assert len(os.listdir("/proc/self/fd")) <= handles + 1


def test_a_shard_is_hashed_once_even_by_many_threads(built: Path, monkeypatch) -> None:
    hashed, real = [], shard_file.raise_if_damaged

    def count(directory: Path, shard: object, *, deep: bool) -> None:
        hashed.append(shard)
        real(directory, shard, deep=deep)

    monkeypatch.setattr(shard_file, "raise_if_damaged", count)
    cache = TeacherCache.open(built)
    threads = [threading.Thread(target=cache.batch, args=([0, 1],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashed) == 1


def test_a_shard_that_changed_is_proven_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qat.data.reader.OPEN_SHARDS", 1)
    cache = TeacherCache.open(copy)
    cache.batch([0])
    cache.batch([25])  # another shard, so the first is closed
    raw = bytearray(first_shard(copy).read_bytes())
    raw[-1] ^= 1
    first_shard(copy).write_bytes(raw)
    with pytest.raises(CacheError, match="SHA-256 differs"):
        cache.batch([0])


def with_header(path: Path, change: Callable[[dict], object]) -> None:
    """Write what `change` makes of the header, or returns in its place, before the same data."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header = change(header) or json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[end:])


def moved(entry: dict, by: int) -> None:
    entry["data_offsets"] = [place + by for place in entry["data_offsets"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors["rows"].update(shape=[7, 3]),
        lambda tensors: tensors["rows"].update(shape=[1, *tensors["rows"]["shape"]]),
        lambda tensors: tensors["rows"].update(dtype="F32"),
        lambda tensors: tensors["rows"].update(dtype=["U8"]),
        lambda tensors: tensors["rows"].update(data_offsets=[0]),
        lambda tensors: moved(tensors["rows"], 1),
        lambda tensors: moved(tensors["rows"], 2**70),
        lambda tensors: tensors["rows"].update(data_offsets=[-60, 0], shape=[60]),
        lambda tensors: tensors["row_begins"].update(dtype="F64"),
        lambda tensors: tensors.update(more=tensors["rows"] | {"shape": [0]}),
        lambda tensors: tensors.pop("row_begins") and None,
        lambda tensors: b"[]",
        lambda tensors: b"{" * 5000,
        lambda tensors: b" ",
    ],
)
def test_a_header_that_lies_or_is_none_is_one_line(copy: Path, change: Callable) -> None:
    with_header(first_shard(copy), change)
    sealed(copy)
    for reading in (everything, verify):
        with pytest.raises(CacheError, match="train-00000.safetensors: .*; restore") as caught:
            reading(copy)
        assert "\n" not in str(caught.value)


def said(directory: Path, name: str, value: torch.Tensor) -> None:
    """Fill a field of the first row, or its drawn ids, with a value."""
    layout = promised_layout(read_manifest(directory))
    tensors = load_file(first_shard(directory))
    begin, end = layout.width, int(tensors["row_begins"][1])
    if name in layout.fields:
        begin = layout.offsets[name]
        end = begin + layout.fields[name].stride
    octets = value.reshape(-1).view(torch.uint8)
    tensors["rows"][begin:end] = octets.repeat((end - begin) // len(octets))
    save_file(tensors, first_shard(directory))
    sealed(directory)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.tensor(255, dtype=torch.uint8), "holds token"),
        ("topk_ids", torch.tensor(255, dtype=torch.uint8), "holds token"),
        ("drawn ids", torch.tensor(255, dtype=torch.uint8), "holds token"),
        ("tail_logprob", torch.tensor(torch.nan), "no probability"),
        ("tail_logprob", torch.tensor(0.0), "no probability"),
        ("log_sum_exp", torch.tensor(torch.inf), "a log-sum-exp that is NaN or infinite"),
        ("sample_marks", torch.tensor(255, dtype=torch.uint8), "drawn ids take"),
    ],
)
def test_what_no_teacher_can_have_said_is_one_line(copy, name, value, message) -> None:
    said(copy, name, value)
    with pytest.raises(CacheError, match=message):
        everything(copy)


def test_the_vocabulary_ends_before_its_size(copy: Path) -> None:
    manifest = read_manifest(copy)
    vocabulary, length = manifest.teacher.vocab_size, manifest.settings.sequence_length
    for token in (vocabulary - 1, vocabulary):
        ids = torch.full((1, length), token)
        said(copy, "tokens", pack_bits(ids, id_bits(vocabulary))[0])
        if token < vocabulary:
            assert (TeacherCache.open(copy).batch([0]).input_ids == token).all()
    with pytest.raises(CacheError, match=f"holds token {vocabulary}, expected"):
        everything(copy)


@pytest.mark.parametrize(
    ("place", "by"), [(0, 1), (1, -(2**40)), (1, 2**62), (2, -440), (-1, 1), (-1, -1)]
)
def test_rows_that_lie_nowhere_are_one_line(copy: Path, place: int, by: int) -> None:
    tensors = load_file(first_shard(copy))
    tensors["row_begins"][place] += by
    refuse_rows(copy, tensors)


def refuse_rows(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The first shard with these tensors is refused for where its rows begin."""
    save_file(tensors, first_shard(directory))
    sealed(directory)
    for reading in (everything, verify):
        with pytest.raises(CacheError, match="row_begins does not cut"):
            reading(directory)


def test_rows_whose_lengths_wrap_around_are_one_line(copy: Path) -> None:
    tensors = load_file(first_shard(copy))
    begins = tensors["row_begins"]
    begins[2:4] = torch.tensor([-(2**63) + 500, 0])
    begins[1] = 1000
    lengths = begins.numpy()[1:4] - begins.numpy()[:3]
    assert (lengths > 0).all()  # as int64 has them
    refuse_rows(copy, tensors)


def test_without_draws_all_rows_are_equally_long(tmp_path: Path) -> None:
    build(tmp_path, draws=0)
    everything(tmp_path)
    tensors = load_file(first_shard(tmp_path))
    assert len(set(tensors["row_begins"].diff().tolist())) == 1
    tensors["rows"] = torch.cat([tensors["rows"], tensors["rows"][:3]])
    tensors["row_begins"][-1] += 3
    refuse_rows(tmp_path, tensors)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"file": "../elsewhere"}, r"shards.0.file='../elsewhere': .*match pattern"),
        ({"file": "/etc/passwd"}, "shards.0.file="),
        ({"sha256": "../" + "0" * 61}, "shards.0.sha256="),
        ({"content": ""}, "shards.0.content="),
        ({"sequences": 10**19}, "sequences in"),
        ({"sequences": 10**29, "bytes": 10**30}, "shards.0.bytes="),
        ({"sequences": -1}, "-1 sequences in"),
        ({"tokens": -1}, "shards.0.tokens=-1"),
        ({"counted": -3417}, "shards.0.counted=-3417"),
        ({"counted": 161}, "161 of [0-9]+ tokens count"),
        ({"tokens": 161}, "161 tokens in 160 positions"),
        ({"split": "held_out"}, "train-00000.safetensors is in the split held_out"),
        ({"file": "train-00001.safetensors"}, "train-00001.safetensors is listed twice"),
    ],
)
def test_a_manifest_that_leads_astray_is_one_line(copy: Path, values: dict, message: str) -> None:
    manifest: Manifest = read_manifest(copy)
    shards = [manifest.shards[0].model_copy(update=values), *manifest.shards[1:]]
    changed = manifest.model_copy(update={"shards": shards})
    (copy / MANIFEST).write_bytes(changed.to_bytes())
    for read in (TeacherCache.open, check_shards):
        with pytest.raises(CacheError, match=message) as caught:
            read(copy)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        (None, "tokenizer", "../../x"),
        (None, "tokenizer", "0" * 15),
        (None, "negatives", -1),
        ("teacher", "identity", "../../x"),
        ("teacher", "identity", "abc\n"),
        ("teacher", "identity", "unknown, imported as ../x"),
        ("teacher", "dtype", "\x1b[31mred"),
        ("teacher", "vocab_size", 0),
        ("teacher", "vocab_size", 2**70),
    ],
)
def test_every_identifier_and_size_of_a_manifest_has_a_form(copy, part, name, value) -> None:
    manifest = read_manifest(copy)
    changes = {name: value}
    if part:
        changes = {part: getattr(manifest, part).model_copy(update=changes)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, which never lets such a one be made
        raw = manifest.model_copy(update=changes).to_bytes()
    (copy / MANIFEST).write_bytes(raw)
    field = f"{part}.{name}" if part else name
    for read in (TeacherCache.open, check_shards):
        with pytest.raises(CacheError, match=f"is damaged: {field}=.*: .* should ") as caught:
            read(copy)
        assert "\n" not in str(caught.value)


def test_a_count_that_its_shard_does_not_have_is_found(copy: Path) -> None:
    manifest = read_manifest(copy)
    first = manifest.shards[0]
    shards = [first.model_copy(update={"counted": 1}), *manifest.shards[1:]]
    (copy / MANIFEST).write_bytes(manifest.model_copy(update={"shards": shards}).to_bytes())
    problems = [finding.problem for finding in check_shards(copy)[1]]
    assert problems[0] == f"{first.counted} of its tokens count instead of 1"
    assert not any(problems[1:])
