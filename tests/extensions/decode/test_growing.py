"""A corpus that is still being sampled reads like its finished file."""

import threading
from pathlib import Path

import pytest
from cache_case import build, contents
from crash import stopped_at

from qat import files
from qat.data.sources import Sourced, check_source, open_source
from qat.errors import DataError
from qat.extensions.decode import corpus as module
from qat.extensions.decode.config import SampleConfig
from qat.extensions.decode.corpus import open_corpus, write_corpus
from qat.extensions.decode.growing import growing_rows

ROWS, SHARD = 40, 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_S", 0.005)


def sample(teacher: Path, out: Path) -> None:
    sizes = {"max_new_tokens": 12, "batch_size": SHARD, "shard_size": SHARD}
    config = SampleConfig(rows=ROWS, device="cpu", **sizes)
    write_corpus(*open_corpus(str(teacher), config), out)


@pytest.fixture(scope="module")
def whole(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "c.jsonl"
    sample(teacher, out)
    return out


@pytest.fixture
def begun(teacher: Path, tmp_path: Path) -> Path:
    """A corpus whose sampler died after two shards."""
    out = tmp_path / "c.jsonl"
    with stopped_at(module, "write_atomically", 3):
        sample(teacher, out)
    return out


def sourced(data: Path) -> list[Sourced]:
    return list(open_source(str(data)).rows)


def test_a_sampler_that_died_is_one_line_behind_its_rows(
    begun: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.02)
    check_source(str(begun))
    rows, found = growing_rows(begun), []
    with pytest.raises(DataError, match=f"{begun} has 2 shards in .* and nobody samples more"):
        found.extend(row for _, row in rows)
    finished = [row for _, row in growing_rows(whole)]
    assert found == finished[: len(found)] and 0 < len(found) <= 2 * SHARD < len(finished)


def test_rows_come_as_they_are_sampled(begun: Path, whole: Path, teacher: Path) -> None:
    sampler = threading.Thread(target=sample, args=(teacher, begun))
    rows = growing_rows(begun)
    place, _ = next(rows)
    assert place.file == str(begun) and place.row == 1
    sampler.start()
    assert [row for _, row in rows] == [row for _, row in growing_rows(whole)][1:]
    sampler.join()
    assert begun.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("read", [0, 1, SHARD + 1])
def test_the_file_takes_the_place_of_its_shards(begun: Path, whole, teacher, read: int) -> None:
    rows = iter(open_source(str(begun)).rows)
    first = [next(rows) for _ in range(read)]
    sample(teacher, begun)
    assert [*first, *rows] == sourced(whole)


def test_a_cache_has_the_bytes_of_one_of_the_file(
    begun: Path, whole: Path, teacher: Path, tmp_path: Path
) -> None:
    build(tmp_path / "expected", documents=sourced(whole))
    sampler = threading.Thread(target=sample, args=(teacher, begun))
    rows = open_source(str(begun)).rows
    sampler.start()
    build(tmp_path / "cache", documents=rows)
    sampler.join()
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")
