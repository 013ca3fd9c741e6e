"""Nothing in qat removes or overwrites what it did not write."""

import json
import shutil
from pathlib import Path

import pytest
from cache_case import TOKENIZER, build
from quantized import SPECS, tiny_quantized

from qat.data.cache import MANIFEST
from qat.errors import CacheError, CheckpointError, ConfigError, HubError
from qat.extensions.streams.remote import LocalShards
from qat.files import held, whole_directory
from qat.hub.files import RECEIPT
from qat.hub.files import atomic_directory as hub_directory
from qat.hub.pull import pull
from qat.hub.registry import HubEntry
from qat.models.checkpoint import save_checkpoint
from qat.models.directory import resolve
from qat.observe.page import check_replaceable
from qat.train.run import MANIFEST as PROOF
from qat.train.run import RunDirectory, is_all_ours
from qat.train.saver import problem

THESIS = "ten years of work"


def thesis(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(THESIS)
    return path


def test_a_replaced_directory_keeps_them(tmp_path: Path) -> None:
    mine = [thesis(tmp_path / "out" / name) for name in ("thesis.txt", "a/b/thesis.txt", ".hidden")]
    thesis(tmp_path / "out" / "shard-1")
    thesis(tmp_path / "out" / "shard-2")
    out = tmp_path / "out"
    with whole_directory(out, replace=True, written=lambda out: {"shard-2"}) as partial:
        (partial / "shard-1").write_text("new")
    assert [path.read_text() for path in mine] == [THESIS] * 3
    assert (tmp_path / "out" / "shard-1").read_text() == "new"
    assert not (tmp_path / "out" / "shard-2").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_replaced_checkpoint_keeps_them(tmp_path: Path) -> None:
    model, out = tiny_quantized("qwen3", SPECS["lut2"]), tmp_path / "student"
    save_checkpoint(model, TOKENIZER, out)
    mine, report = thesis(out / "thesis.txt"), thesis(out / "convert_report.json")
    save_checkpoint(model, None, out, replace=True)
    assert mine.read_text() == THESIS and not report.exists()
    assert not (out / "tokenizer.json").exists()  # of the checkpoint before, which listed it


def test_what_was_pulled_is_replaced_and_no_more(tmp_path: Path) -> None:
    out = tmp_path / "pulled"
    mine, theirs = thesis(out / "thesis.txt"), thesis(out / "old.bin")
    (out / RECEIPT).write_text(json.dumps({"files": {"old.bin": 1}}))
    with hub_directory(out, replace=True) as partial:
        (partial / "new.bin").write_text("new")
        (partial / "new.json").write_text("{}")
    assert mine.read_text() == THESIS and not theirs.exists() and (out / "new.bin").exists()


def test_a_folder_called_as_a_place_for_downloads_stays(tmp_path: Path) -> None:
    mine = thesis(tmp_path / ".x.pull" / "thesis.txt")
    with pytest.raises(HubError, match="is in the way"):
        pull("x", HubEntry(kind="cache", mirrors=(str(tmp_path / "nothing"),)), tmp_path / "x")
    assert mine.exists()


def checkpoint(run: Path, step: int, *extra: str) -> Path:
    path = run / "checkpoints" / f"step-{step:06d}"
    thesis(path / "trainer" / "state.json")
    (path / PROOF).write_text(json.dumps({"files": {"trainer/state.json": {}}}))
    for name in extra:
        thesis(path / name)
    return path


def test_checkpoints_with_files_of_others_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    kept = [checkpoint(tmp_path, 1, "thesis.txt"), tmp_path / "checkpoints" / "step-000002"]
    thesis(kept[1] / "thesis.txt")
    gone, last = checkpoint(tmp_path, 3), checkpoint(tmp_path, 4)
    assert [is_all_ours(path) for path in (*kept, gone)] == [False, False, True]
    run.point("latest", last)
    run.remove_old(keep=1)
    assert run.checkpoints() == [*kept, last]


def test_links_among_checkpoints_stay_and_lead_nowhere(tmp_path: Path) -> None:
    run, private = RunDirectory(tmp_path / "run"), checkpoint(tmp_path / "private", 1)
    linked, gone, last = (checkpoint(run.path, step) for step in (2, 3, 4))
    (linked / "more").symlink_to(private / "trainer")
    alias = run.path / "checkpoints" / "step-000001"
    alias.symlink_to(private)
    assert not is_all_ours(linked) and "symbolic link" in problem(linked)
    run.point("latest", last)
    run.remove_old(keep=1)
    assert run.checkpoints() == [linked, last] and not gone.exists()
    assert alias.is_symlink() and (private / "trainer" / "state.json").exists()
    run.point("best", alias)
    (private / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no checkpoint of this run"):
        resolve(str(run.path))


def test_leavings_are_those_of_the_run(tmp_path: Path) -> None:
    names = [".thesis.partial", ".my.partial-notes/thesis", "checkpoints/.draft.old-one/thesis"]
    mine = [thesis(tmp_path / name) for name in names]
    thesis(tmp_path / "checkpoints" / ".step-000002.partial-abcd_123" / "x")
    thesis(tmp_path / "checkpoints" / ".step-000002.old-" / "x")
    thesis(tmp_path / ".run.json.partial")
    RunDirectory(tmp_path).remove_leavings()
    left = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert left == sorted(mine)


def test_a_cache_takes_only_its_own_temporary_files_for_its_own(tmp_path: Path) -> None:
    mine = thesis(tmp_path / "out" / "thesis.tmp")
    with pytest.raises(CacheError, match="expected an empty directory"):
        build(tmp_path / "out")
    build(tmp_path / "cache")
    left = thesis(tmp_path / "cache" / f"{MANIFEST}.tmp")
    own = thesis(tmp_path / "cache" / "thesis.tmp")
    build(tmp_path / "cache")
    assert mine.exists() and own.exists() and not left.exists()


def test_shards_make_room_and_nothing_else(tmp_path: Path) -> None:
    shards = build(tmp_path / "cache", shard_size=1).shards
    (tmp_path / "local").mkdir()
    mine = thesis(tmp_path / "local" / "my-model.safetensors")
    source = tmp_path / "cache"
    kept = LocalShards(mine.parent, lambda shard, to: shutil.copy(source / shard.file, to), 1)
    for shard in shards:
        kept.ensure_local(shard)
    left = {path.name for path in mine.parent.iterdir()} - {mine.name}
    assert mine.exists() and shards[-1].file in left and len(left) < len(shards)


def test_a_file_called_as_the_lock_stays(tmp_path: Path) -> None:
    mine = thesis(tmp_path / ".run.lock")
    with pytest.raises(ConfigError, match="is in the way"), held(tmp_path / "run"):
        pass
    assert mine.read_text() == THESIS
    mine.write_text("process 1 on x since y\n")  # of a process that was killed
    with held(tmp_path / "run"):
        pass
    assert not mine.exists()


def test_a_page_replaces_pages_only(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new.html")
    for name in ("thesis.html", "thesis.png"):
        with pytest.raises(ConfigError, match="is there and no report of qat's"):
            check_replaceable(thesis(tmp_path / name))
    with pytest.raises(ConfigError, match="is a directory"):
        check_replaceable(tmp_path)
