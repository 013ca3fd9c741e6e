"""A cache that still grows: the order of its sequences, what a run waits for, and how it ends."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from cache_case import build
from torchrun_case import launch
from train_case import assert_same_end, config, make_place

from qat import files
from qat.data.cache import MANIFEST, Shard, read_manifest, write_atomic
from qat.data.reader import TeacherCache
from qat.data.shard import in_order, note_shard
from qat.errors import CacheError, ConfigError
from qat.extensions.streams import arrival
from qat.extensions.streams.arrival import ArrivingCache, open_arriving, save_beginning
from qat.files import held
from qat.logs import read_json_lines
from qat.train.start import TrainReport, train_student

SHARD, WINDOW, JUDGED = 2, 3, 4  # sequences of a shard, shards of a window, held-out sequences
USUAL = arrival.WINDOW  # that of processes which the tests start


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "WINDOW", WINDOW)
    monkeypatch.setattr(files, "LOOK_S", 0.005)
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and a cache of many small shards, which no test changes."""
    place = make_place(tmp_path_factory.mktemp("place"), layers=1)
    shutil.rmtree(place / "cache")
    build(place / "cache", shard_size=SHARD)
    return place


class Writer:
    """Writes a copy of a finished cache, shard by shard as a build of it would."""

    def __init__(self, whole: Path, out: Path) -> None:
        self.whole, self.out = whole, out
        self.manifest = read_manifest(whole)
        splits = (self.manifest.of_split(split) for split in ("train", "held_out"))
        self.left = [shard for pair in zip_longest(*splits) for shard in pair if shard is not None]
        self.done: list[Shard] = []
        out.mkdir()
        self.write(0)

    def copy(self) -> Shard:
        shard = self.left.pop(0)
        shutil.copy(self.whole / shard.file, self.out)
        return shard

    def write(self, count: int) -> None:
        self.done += [self.copy() for _ in range(count)]
        shards = {"shards": in_order(self.done), "state": "building"}
        write_atomic(self.out / MANIFEST, self.manifest.model_copy(update=shards).to_bytes())

    def finish(self) -> None:
        self.write(len(self.left))
        write_atomic(self.out / MANIFEST, self.manifest.to_bytes())


@contextmanager
def writing(out: Path, write: Callable[[], None]) -> Iterator[None]:
    """Run `write` on a thread that holds the lock of `out` meanwhile, as `qat cache` does."""
    begun = threading.Event()

    def work() -> None:
        with held(out):
            begun.set()
            write()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        thread.join()


def order(cache: ArrivingCache, steps: int, count: int = 4) -> np.ndarray:
    return np.concatenate([cache.indices(7, step, count) for step in range(steps)])


def test_the_beginning_is_the_same_of_a_growing_cache_and_of_a_finished_one(
    place: Path, tmp_path: Path
) -> None:
    writer = Writer(place / "cache", tmp_path / "cache")
    with writing(tmp_path / "cache", lambda: writer.write(2 * WINDOW)):
        save_beginning(tmp_path / "cache", tmp_path / "first", JUDGED)
    opened = TeacherCache.open(tmp_path / "first")
    assert opened.num_sequences("train") == SHARD * WINDOW
    whole = TeacherCache.open(place / "cache").batch(range(SHARD * WINDOW))
    assert opened.batch(range(SHARD * WINDOW)).input_ids.equal(whole.input_ids)
    writer.finish()
    save_beginning(tmp_path / "cache", tmp_path / "again", JUDGED)
    again, first = ((tmp_path / name / MANIFEST).read_bytes() for name in ("again", "first"))
    assert again == first


def test_the_first_pass_goes_through_windows_in_their_order(place: Path) -> None:
    cache = open_arriving(place / "cache", JUDGED)
    total, size = cache.num_sequences("train"), SHARD * WINDOW
    found = order(cache, 2 * total // 4 + 1)
    assert sorted(found[:total]) == sorted(found[total : 2 * total]) == list(range(total))
    first = found[:total]
    windows = [first[begin : begin + size].tolist() for begin in range(0, total, size)]
    for number, window in enumerate(windows):
        assert sorted(window) == list(range(number * size, min(total, (number + 1) * size)))
    assert any(window != sorted(window) for window in windows)
    assert not np.array_equal(found[:size], cache.indices(8, 0, size))
    assert cache.waits == 0


def test_what_grows_has_the_order_of_what_is_finished(place: Path, tmp_path: Path) -> None:
    whole = open_arriving(place / "cache", JUDGED)
    steps = 2 * whole.num_sequences("train") // 4
    writer = Writer(place / "cache", tmp_path / "cache")

    def write() -> None:
        while writer.left:
            writer.write(1)
            time.sleep(0.01)
        writer.finish()

    with writing(writer.out, write):
        cache = open_arriving(writer.out, JUDGED)
        assert len(writer.left) > 0
        assert np.array_equal(order(cache, steps), order(whole, steps))
    assert cache.manifest == whole.manifest and cache.waits > 0 and cache.waited_s > 0
    assert cache.num_sequences("train") == whole.num_sequences("train")
    for split in ("train", "held_out"):
        places = range(whole.num_sequences(split))
        ours, theirs = (each.batch(places, split) for each in (cache, whole))
        assert np.array_equal(ours.input_ids, theirs.input_ids)
    held_out = whole.manifest.of_split("held_out")
    assert sum(shard.sequences for shard in held_out) >= JUDGED
    assert sum(shard.sequences for shard in held_out[:-1]) < JUDGED


def test_shards_of_several_ranks_count_up_to_the_first_that_is_missing(
    place: Path, tmp_path: Path
) -> None:
    writer = Writer(place / "cache", tmp_path / "cache")
    writer.write(2 * JUDGED)
    for rank, left_out in ((0, True), (1, False)):  # a rank is behind the other one
        shard = next(each for each in writer.left if each.split == "train")
        writer.left.remove(shard)
        if not left_out:
            shutil.copy(writer.whole / shard.file, writer.out)
            note_shard(writer.out, rank, shard)
    manifest, _ = arrival.awaited(writer.out, lambda manifest: manifest)
    listed = [shard.file for shard in manifest.of_split("train")]
    found = [shard.file for shard in arrival.arrived(manifest, "train")]
    assert found == listed[:-1] and len(found) == JUDGED


def test_a_cache_that_nobody_writes_is_one_line(place: Path, tmp_path: Path) -> None:
    writer = Writer(place / "cache", tmp_path / "cache")
    writer.write(2)
    with pytest.raises(CacheError, match=rf"{writer.out} has 4 sequences and nobody writes more"):
        open_arriving(writer.out, JUDGED)
    writer.write(2 * WINDOW)
    cache = open_arriving(writer.out, JUDGED)
    first = order(cache, 1)
    with pytest.raises(CacheError, match="nobody writes more"):
        order(cache, 10)
    writer.finish()
    assert np.array_equal(order(cache, 10)[:4], first)
    with pytest.raises(ConfigError, match="order=arrival, but s3://b/c is an address"):
        open_arriving("s3://b/c", JUDGED)


def test_each_source_judges_from_the_beginning(place: Path) -> None:
    manifest = read_manifest(place / "cache")
    train, held_out = manifest.of_split("train"), manifest.of_split("held_out")

    def named(shards: list[Shard], names: str) -> list[Shard]:
        pairs = zip(shards, names, strict=False)
        return [shard.model_copy(update={"source": name}) for shard, name in pairs]

    shards = [*named(train, "abab"), *named(held_out, "aaab")]
    grown = manifest.model_copy(update={"shards": shards, "state": "building"})
    kept = arrival.beginning(grown, JUDGED).of_split("held_out")
    assert [shard.source for shard in kept] == ["a", "a", "a", "b"]
    without = grown.model_copy(update={"shards": shards[:-1]})
    assert arrival.beginning(without, JUDGED) is None


def run(place: Path, out: Path, *, resume: bool = False, **values: object) -> TrainReport:
    settings = config(place, order="arrival", eval_sequences=JUDGED, max_steps=12, **values)
    return train_student(settings, str(place / "student"), out, resume=resume)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainReport]:
    """A run over the finished cache."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival, "WINDOW", WINDOW)
        return out, run(place, out)


def test_a_run_that_waited_has_the_bits_of_one_that_did_not(
    place: Path, whole, tmp_path: Path, caplog, monkeypatch
) -> None:
    caplog.set_level("INFO")
    starved = threading.Event()

    def awaiting(directory: Path) -> Iterator[bool]:
        for number, may_come in enumerate(files.awaiting(directory)):
            if number:  # the first look found too little
                starved.set()
            yield may_come

    monkeypatch.setattr(arrival, "awaiting", awaiting)
    writer = Writer(place / "cache", tmp_path / "cache")
    writer.write(4 * WINDOW)

    def write() -> None:
        starved.wait(timeout=60)
        writer.finish()

    with writing(writer.out, write):
        report = run(place, tmp_path / "run", cache_dir=writer.out)
    assert_same_end(whole, tmp_path / "run", report)
    (event,) = read_json_lines(tmp_path / "run/events.jsonl")
    assert event["kind"] == "waited" and event["times"] > 0 and event["waited_s"] > 0
    assert f"waited {event['times']} times for batches that the cache had not yet" in caplog.text


def test_a_writer_that_dies_ends_the_run_and_both_go_on(place: Path, whole, tmp_path: Path) -> None:
    writer = Writer(place / "cache", tmp_path / "cache")
    out = tmp_path / "run"
    with writing(writer.out, lambda: writer.write(4 * WINDOW)):
        pass
    with pytest.raises(CacheError, match="nobody writes more"):
        run(place, out, cache_dir=writer.out)
    assert (out / "latest").is_file()
    writer.finish()
    report = run(place, out, cache_dir=writer.out, resume=True)
    assert_same_end(whole, out, report)


@pytest.mark.slow
def test_ranks_wait_together(place: Path, tmp_path: Path) -> None:
    """Later steps need what is written only once training has begun."""
    metrics = []
    for name, grows in (("whole", False), ("growing", True)):
        own = tmp_path / name
        shutil.copytree(place / "student", own / "student")
        writer = Writer(place / "cache", own / "cache")
        writer.write(2 * USUAL if grows else 0)
        out = own / "run"

        def write(writer: Writer = writer, out: Path = out) -> None:
            while not (out / "metrics.jsonl").exists():
                time.sleep(0.05)
            time.sleep(1)
            writer.finish()

        settings = config(own, order="arrival", eval_sequences=JUDGED, max_steps=8)
        with writing(writer.out, write) if grows else nullcontext(writer.finish()):
            ended = launch(own, settings)
        assert ended.returncode == 0, ended.stderr
        metrics.append((out / "metrics.jsonl").read_bytes())
        assert ("waited" in ended.stderr) == grows
    assert metrics[0] == metrics[1]
