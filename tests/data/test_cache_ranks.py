"""A cache built by several ranks: the bytes of one process, whoever fails or is killed."""

import os
import signal
from pathlib import Path

import pytest
import torch
from cache_case import build, contents, info, teacher, texts
from engine_case import NAME, SERVED, Stage, played
from ranks_case import run_ranks
from tiny import VOCAB

from qat.data.build import open_shared
from qat.data.cache import read_manifest
from qat.data.config import CacheConfig
from qat.data.shard import LOGS, in_order, merged, note_shard
from qat.errors import CacheError, ConfigError, DataError
from qat.extensions.served.teacher import ServedTeacher
from qat.files import held
from qat.models.teacher_cache import cache_teacher
from qat.ranks import ALONE, Ranks

SMALL = {"shard_size": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cache") / "whole"
    build(out, **SMALL)
    return out


def build_on(ranks: Ranks, out: Path, **values: object) -> dict:
    """A build of which only the first rank sees the documents."""
    values = {"documents": texts(), **values}
    if not ranks.is_first:
        values["documents"] = None
    manifest = build(out, ranks=ranks, **SMALL, **values)
    return {"state": manifest.state, "shards": len(manifest.shards)}


def test_ranks_build_the_bytes_of_one_process(whole: Path, tmp_path: Path) -> None:
    size = 3
    out = tmp_path / "c"
    found = run_ranks(size, lambda ranks: build_on(ranks, out), tmp_path)
    assert found[0] == {"state": "complete", "shards": len(read_manifest(whole).shards)}
    assert contents(out) == contents(whole)
    again = run_ranks(size, lambda ranks: build_on(ranks, out, teacher=dying(1)), tmp_path)
    assert again == [found[0]] * size


def test_ranks_ask_a_server_each_for_its_own(tmp_path: Path) -> None:
    about = {"draws": 0, "info": info(identity=SERVED, dtype="unknown")}
    with played(Stage()) as address:
        asked = ServedTeacher(address, NAME, VOCAB)
        build(tmp_path / "whole", **SMALL, teacher=asked, **about)
        out = tmp_path / "c"
        run_ranks(2, lambda ranks: build_on(ranks, out, teacher=asked, **about), tmp_path)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_build_goes_on_with_another_number_of_ranks(whole, tmp_path, size: int) -> None:
    out = tmp_path / "c"

    def killed(ranks: Ranks) -> dict:
        return build_on(ranks, out, teacher=dying(3) if ranks.rank == 1 else teacher())

    first, second, _ = run_ranks(3, killed, tmp_path)
    assert second is None and first["kind"] == "RuntimeError"
    assert list(out.glob(LOGS)) and read_manifest(out).state == "building"
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    noted = {shard.file for shard in merged(read_manifest(out), out).shards}
    assert len(noted) > 2
    if size == 1:
        build(out, **SMALL)
    else:
        run_ranks(size, lambda ranks: build_on(ranks, out), tmp_path)
    assert contents(out) == contents(whole)
    assert all(path.stat().st_mtime_ns == kept[path] for path in kept if path.name in noted)


def dying(call: int) -> object:
    """A teacher whose process is killed at a call."""
    model, left = teacher(), call
    inner = model.hidden

    def hidden(*args: object, **named: object) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*args, **named)

    model.hidden = hidden
    return model


@pytest.mark.parametrize("count", [8, 45])
def test_a_rank_whose_teacher_fails_stops_all(tmp_path: Path, count: int) -> None:
    """The teacher fails in the middle, and after the last round of blocks."""
    model = teacher()
    model.model.lm_head.weight.data.fill_(torch.nan)

    def failing(ranks: Ranks) -> dict:
        mine = model if ranks.rank == 1 else teacher()
        return build_on(ranks, tmp_path / "c", teacher=mine, documents=texts(count))

    found = run_ranks(2, failing, tmp_path)
    assert found[0] == found[1] and found[0]["kind"] == "CacheError"
    assert found[0]["error"].startswith("rank 1: the teacher gave a logit that is NaN")


def test_bad_data_on_the_first_rank_stops_all(tmp_path: Path) -> None:
    def failing(ranks: Ranks) -> dict:
        return build_on(ranks, tmp_path / "c", documents=broken())

    def broken() -> object:
        yield from texts(30)
        raise DataError("row 31 lacks its text")

    found = run_ranks(2, failing, tmp_path)
    assert [one["kind"] for one in found] == ["DataError"] * 2
    assert found[1]["error"] == "rank 0: row 31 lacks its text"


def test_no_text_leaves_nothing(tmp_path: Path) -> None:
    found = run_ranks(2, lambda ranks: build_on(ranks, tmp_path / "c", documents=[]), tmp_path)
    assert "holds no text" in found[1]["error"] and not (tmp_path / "c").exists()


def test_ranks_that_do_not_see_one_directory_are_told(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> dict:
        (tmp_path / f"{ranks.rank}").mkdir()
        (tmp_path / f"{ranks.rank}" / "c").mkdir()
        return build_on(ranks, tmp_path / f"{ranks.rank}" / "c")

    found = run_ranks(2, act, tmp_path)
    assert found[0] == found[1]
    assert "expected one directory that all of them see; choose such an --out" in found[0]["error"]


def test_two_builds_in_one_directory_are_refused(tmp_path: Path) -> None:
    with held(tmp_path / "c"), pytest.raises(ConfigError, match="is in use by process"):
        build(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_one_teacher_over_all_devices_is_for_one_process() -> None:
    config = CacheConfig(teacher="nobody", data="stdlib", device_map="auto")
    two = Ranks(0, 2, torch.device("cpu"))
    message = "device_map=auto spreads one teacher over the devices, but 2 ranks run one each; drop"
    with pytest.raises(ConfigError, match=message):
        cache_teacher(config, two)


def test_only_the_first_rank_reads_the_data(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n')

    def act(ranks: Ranks) -> list:
        data = tmp_path / ("rows.jsonl" if ranks.is_first else "none.jsonl")
        source = open_shared(CacheConfig(teacher="t", data=str(data)), ranks)
        return [source.format, source.name, list(source.documents)]

    assert run_ranks(2, act, tmp_path) == [
        ["plain", "rows", ["the cat sat"]],
        ["plain", "rows", []],
    ]
    missing = CacheConfig(teacher="t", data=str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is no file or directory"):
        open_shared(missing, ALONE)


def test_what_a_killed_rank_wrote_of_a_line_is_no_shard(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "c"
    build(out, **SMALL)
    manifest = read_manifest(out)
    shards = manifest.shards
    empty = manifest.model_copy(update={"shards": []})
    for shard in reversed(shards[:3]):
        note_shard(out, 1, shard)
    (out / shards[0].file).unlink()
    path = out / LOGS.replace("*", "1")
    path.write_text(path.read_text() + shards[3].model_dump_json()[:40])
    assert merged(empty, out).shards == shards[1:3]
    assert in_order(reversed(shards)) == shards
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheError, match="Is a directory; finished shards are kept"):
        note_shard(out, 1, shards[0])
