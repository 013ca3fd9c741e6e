"""Rows read one by one are those of the whole file; nothing of a large cache stays in memory."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build
from safetensors.torch import load_file, save_file

from qat.data import shard_file
from qat.data.cache import MANIFEST, Manifest, read_manifest
from qat.data.reader import TeacherCache
from qat.data.resident import Resident
from qat.data.shard_file import ShardFile, promised_rows
from qat.errors import CacheError
from qat.files import sha256_file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "c"
    build(out)
    return out


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


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


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(first_shard(directory))
    change(tensors)
    save_file(tensors, first_shard(directory))
    sealed(directory)


def everything(directory: Path) -> None:
    cache = TeacherCache.open(directory)
    cache.batch(range(cache.num_sequences("train")))


def test_rows_are_those_of_the_file(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_file, "INDEX_STEP", 4)
    manifest = read_manifest(built)
    rows = promised_rows(manifest)
    shelf = shard_file.Shelf(built, rows, Resident(1), lambda shard: None)
    for shard in manifest.shards:
        whole, opened = load_file(built / shard.file), ShardFile(shelf, shard).open()
        assert set(whole) == {*rows, "sample_ids"}
        for name, kind in rows.items():
            found = np.empty((shard.sequences - 2, *kind.shape), kind.dtype)
            opened.read(name, 2, memoryview(found.reshape(-1)).cast("B"))
            assert torch.equal(torch.from_numpy(found), whole[name][2:])
        for step in (1, 3, shard.sequences):  # the last goes beyond a known beginning
            places = [
                (row, min(step, shard.sequences - row)) for row in range(0, shard.sequences, step)
            ]
            ids = [one for place in places for one in opened.read_samples(opened.samples(*place))]
            assert [len(one) for one in ids] == whole["sample_lengths"].tolist()
            assert torch.equal(torch.from_numpy(np.concatenate(ids)), whole["sample_ids"])


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be told")
def test_rows_are_asked_for_together_before_any_is_read(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, calls = TeacherCache.open(built), []
    expected = cache.batch([25, 3, 4, 11])  # proves the shards
    read, advise = os.preadv, os.posix_fadvise

    def note_read(file: int, out: list[memoryview], begin: int) -> int:
        calls.append(("read", file, begin, len(out[0])))
        return read(file, out, begin)

    def note_advice(file: int, begin: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        calls.append(("ask", file, begin, size))
        advise(file, begin, size, advice)

    monkeypatch.setattr(os, "preadv", note_read)
    monkeypatch.setattr(os, "posix_fadvise", note_advice)
    for one, other in zip(cache.batch([25, 3, 4, 11]), expected, strict=True):
        assert torch.equal(one, other)
    runs, columns = 3, 9
    assert {what for what, *_ in calls[: runs * columns]} == {"ask"}
    asked = {tuple(place) for what, *place in calls if what == "ask"}
    read_places = [tuple(place) for what, *place in calls if what == "read"]
    assert len(asked) == runs * (columns + 1)  # and the drawn ids
    assert sum(place not in asked for place in read_places) <= runs  # lengths, of some before too


def test_only_the_shards_used_last_stay_open(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qat.data.reader.OPEN_SHARDS", 1)
    handles = len(os.listdir("/proc/self/fd"))
    cache = TeacherCache.open(built)
    expected = TeacherCache.open(built).batch([0, 25, 11, 1])
    for _ in range(3):
        for one, other in zip(cache.batch([0, 25, 11, 1]), expected, strict=True):
            assert torch.equal(one, other)
    assert len(os.listdir("/proc/self/fd")) <= handles + 1


def test_a_bounded_number_of_values_is_resident() -> None:
    kept = Resident[str, int](2)
    for value, key in enumerate("abac"):
        kept.put(key, value)
    assert len(kept) == 2 and kept.get("b") is None and kept.get("a") == 2 and kept.get("c") == 3


def test_a_shard_is_hashed_once_even_by_many_threads(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(CacheError, match="content differs from its SHA-256"):
        cache.batch([0])


def header_of(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": [7, 3]}, r"tokens has shape \[7, 3\], not"),
        ({"dtype": "F32"}, "no tensor tokens of U8"),
        ({"dtype": ["U8"]}, "no tensor tokens of U8"),
        ({"data_offsets": [0]}, "tokens is nowhere"),
        ({"data_offsets": [0, True]}, "tokens is nowhere"),
        ({"data_offsets": [-60, 0]}, "tokens reaches from -60"),
        ({"data_offsets": [10**30, 10**30 + 60]}, "which is not its size"),
    ],
)
def test_a_header_that_lies_is_one_line(copy: Path, values: dict, message: str) -> None:
    header, data = header_of(first_shard(copy))
    header["tokens"] |= values
    write(first_shard(copy), json.dumps(header).encode(), data)
    sealed(copy)
    with pytest.raises(CacheError, match=message) as caught:
        everything(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokens", "sample_ids"])
@pytest.mark.parametrize("by", [1, 2**70])
def test_a_tensor_beyond_the_end_is_one_line(copy: Path, name: str, by: int) -> None:
    header, data = header_of(first_shard(copy))
    begin, end = header[name]["data_offsets"]
    by += len(data) - end
    header[name]["data_offsets"] = [begin + by, end + by]
    write(first_shard(copy), json.dumps(header).encode(), data)
    sealed(copy)
    with pytest.raises(CacheError, match=rf"{name} reaches to {end + by}, beyond its {len(data)}"):
        everything(copy)


@pytest.mark.parametrize(
    ("header", "message"),
    [(b"[]", "not a table"), (b"{" * 5000, "not JSON"), (b"", "header has 0 bytes")],
)
def test_a_header_that_is_none_is_one_line(copy: Path, header: bytes, message: str) -> None:
    write(first_shard(copy), header, b"\0" * 4000)
    sealed(copy)
    with pytest.raises(CacheError, match=message):
        everything(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["tokens"].fill_(255), "holds token"),
        (lambda t: t["topk_ids"].fill_(255), "holds token"),
        (lambda t: t["sample_ids"].fill_(255), "holds token"),
        (lambda t: t["tail_logprob"].fill_(torch.nan), "no probability"),
        (lambda t: t["tail_logprob"].fill_(1.0), "no probability"),
        (lambda t: t["sample_marks"].fill_(255), "drawn ids take"),
        (lambda t: t["sample_lengths"].fill_(-1), "negative"),
        (lambda t: t["sample_lengths"].fill_(2**31 - 1), "sum to"),
        (lambda t: t.update(sample_ids=t["sample_ids"][:1].clone()), "sum to"),
    ],
)
def test_what_no_teacher_can_have_said_is_one_line(
    copy: Path, change: Callable, message: str
) -> None:
    rewrite(copy, change)
    with pytest.raises(CacheError, match=message):
        everything(copy)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"file": "../elsewhere"}, "expected a plain name"),
        ({"file": "/etc/passwd"}, "expected a plain name"),
        ({"sequences": 10**19}, "sequences in"),
        ({"sequences": -1}, "-1 sequences in"),
    ],
)
def test_a_manifest_that_leads_astray_is_one_line(copy: Path, values: dict, message: str) -> None:
    manifest: Manifest = read_manifest(copy)
    shards = [manifest.shards[0].model_copy(update=values), *manifest.shards[1:]]
    changed = manifest.model_copy(update={"shards": shards})
    (copy / MANIFEST).write_bytes(changed.to_bytes())
    with pytest.raises(CacheError, match=message):
        TeacherCache.open(copy)
