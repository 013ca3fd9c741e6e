"""Threads of the cache's builder: order, bounds, and whose error comes where."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from cache_case import build, contents, teacher, texts

from qat.backend.base import Backend
from qat.data.cache import read_manifest
from qat.data.pipeline import computed_ahead, prefetched
from qat.data.reader import TeacherCache
from qat.errors import ConfigError, DataError


class Broken(Exception):
    """Stands for a failure on some thread."""


def counting(stop: int, made: list[int], fail_at: int = -1) -> Iterator[int]:
    for i in range(stop):
        if i == fail_at:
            raise Broken
        made.append(i)
        yield i


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetched_items_come_in_order_and_not_too_far_ahead(depth: int) -> None:
    made: list[int] = []
    for taken, item in enumerate(prefetched(counting(9, made), depth)):
        assert item == taken
        time.sleep(0.002)
        assert len(made) <= taken + 1 + depth
    assert made == list(range(9))


def test_items_are_made_on_another_thread() -> None:
    threads = set(prefetched((threading.get_ident() for _ in range(3)), 2))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_an_error_comes_in_its_items_place() -> None:
    found = []
    with pytest.raises(Broken):
        found.extend(prefetched(counting(9, [], fail_at=4), 3))
    items = prefetched(counting(9, [], fail_at=2), 3)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(Broken):
        next(items)


def test_closing_leaves_no_thread_and_makes_no_more() -> None:
    made: list[int] = []
    before = threading.active_count()
    with closing(prefetched(counting(10_000, made), 2)) as items:
        next(items)
    count = len(made)
    time.sleep(0.01)
    assert len(made) == count <= 4
    assert threading.active_count() == before


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_what_is_computed_ahead_comes_in_order(depth: int) -> None:
    begun: list[int] = []

    def late(place: int) -> int:
        begun.append(place)
        time.sleep(0.003 if place % 2 == 0 else 0.0)
        return place

    for taken, item in enumerate(computed_ahead(late, range(9), depth)):
        assert item == taken
        assert len(begun) <= taken + 1 + depth
    assert sorted(begun) == list(range(9))


def test_while_an_item_is_used_as_many_as_asked_for_are_under_way() -> None:
    begun = threading.Semaphore(0)
    with closing(computed_ahead(lambda _: begun.release(), range(9), 2)) as items:
        next(items)
        assert all(begun.acquire(timeout=5) for _ in range(3))


def test_an_error_of_a_place_comes_there_and_no_other_begins() -> None:
    begun: list[int] = []

    def fails(place: int) -> int:
        begun.append(place)
        if place == 2:
            raise Broken
        return place

    before, items = threading.active_count(), computed_ahead(fails, range(1000), 2)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(Broken):
        next(items)
    assert len(begun) <= 6 and threading.active_count() == before


def rows_with_an_error(good: int) -> Iterator[str]:
    yield from texts()[:good]
    raise DataError("row 31 is not JSON, expected one value; mend it")


def test_a_bad_row_keeps_the_shards_before_it(built: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 31"):
        build(tmp_path / "c", documents=rows_with_an_error(30))
    assert len(read_manifest(tmp_path / "c").shards) > 1
    build(tmp_path / "c")
    assert contents(tmp_path / "c") == contents(built)


def test_a_bad_row_behind_the_limit_is_never_read(tmp_path: Path) -> None:
    build(tmp_path / "c", documents=rows_with_an_error(40), num_sequences=5)
    assert TeacherCache.open(tmp_path / "c").num_sequences("train") == 5


def test_a_batch_beyond_the_memory_is_told_in_one_line(tmp_path: Path) -> None:
    model = teacher()

    def full(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.hidden = full
    with pytest.raises(ConfigError, match="batch_size=4 sequences of 16 tokens are more than"):
        build(tmp_path / "c", teacher=model)


def check_same(one: Path, other: Path) -> None:
    """Both caches hold the same, but for the last bits of the teacher's words."""
    mine, theirs = TeacherCache.open(one), TeacherCache.open(other)
    assert mine.manifest.fingerprint == theirs.manifest.fingerprint
    for split in ("train", "held_out"):
        rows = range(theirs.num_sequences(split))
        assert mine.num_sequences(split) == len(rows)
        for a, b in zip(mine.batch(rows, split), theirs.batch(rows, split), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("batch_size", [3, 0])
def test_the_batch_size_changes_no_token_and_no_draw(
    built: Path, tmp_path: Path, batch_size: int
) -> None:
    build(tmp_path / "c", batch_size=batch_size)
    check_same(tmp_path / "c", built)


def test_filled_up_batches_have_one_shape_and_change_nothing(
    built: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Backend, "compiles", True)
    model, shapes = teacher(), set()
    hidden = model.hidden
    model.hidden = lambda ids, positions: shapes.add(ids.shape) or hidden(ids, positions)
    build(tmp_path / "c", teacher=model)
    assert shapes == {(4, 16)}
    check_same(tmp_path / "c", built)
