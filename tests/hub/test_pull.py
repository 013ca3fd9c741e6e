"""Pulling: mirror by mirror, checked, once, whole or not at all."""

import fcntl
import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import gdown
import pytest
from hub_case import checkpoint, contents, legacy_cache, named, serving, write_archive

from qat.cli import main
from qat.errors import ConfigError, HubError
from qat.files import sha256_file
from qat.hub import web
from qat.hub.files import RECEIPT, sha256_tree
from qat.hub.pull import Pulled, pull
from qat.hub.push import pack
from qat.hub.registry import HubEntry, load_registry, verify

WRONG = "0" * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "drive" / "runs" / "model")


@pytest.fixture
def archive(model: Path) -> Path:
    """The same checkpoint as a file in another place."""
    path = model.parents[2] / "elsewhere" / "model.tar.lz4"
    pack(model, path)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "model"


def get(out: Path, *mirrors: object, **values: object) -> Pulled:
    options = {name: values.pop(name) for name in ("drive", "replace") if name in values}
    fields = {"kind": "checkpoint", **values, "mirrors": list(map(str, mirrors))}
    return pull("model", HubEntry.model_validate(fields), out, **options)


def fail(out: Path, message: str, *mirrors: object, **values: object) -> None:
    with pytest.raises(HubError, match=message) as caught:
        get(out, *mirrors, **values)
    assert "\n" not in str(caught.value)
    assert not out.exists() and (not out.parent.exists() or os.listdir(out.parent) == [])


def test_an_archive_with_its_hash(out: Path, model: Path, archive: Path) -> None:
    size, sha256 = archive.stat().st_size, sha256_file(archive)
    pulled = get(out, archive, size=size, sha256=sha256)
    assert contents(out) == contents(model)
    assert pulled == Pulled(out, "qat", str(archive), sha256, sha256_tree(model), True, True)
    assert os.listdir(out.parent) == ["model"]


def test_what_is_there_is_not_fetched_again(out: Path, model: Path, archive: Path) -> None:
    pulled = get(out, archive)
    archive.unlink()
    assert get(out, archive) == pulled._replace(is_new=False)
    with pytest.raises(HubError, match="no mirror works"):
        get(out, archive, replace=True)
    assert contents(out) == contents(model)
    (model / "config.json").write_text("{}")
    assert get(out, model, replace=True).is_new
    assert contents(out) == contents(model)


def test_what_is_there_in_part_is_not_taken(out: Path, archive: Path) -> None:
    get(out, archive)
    (out / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(HubError, match="model.safetensors .* --force"):
        get(out, archive)
    get(out, archive, replace=True)
    (out / "config.json").unlink()
    with pytest.raises(HubError, match="config.json is missing, .*--force"):
        get(out, archive)
    with pytest.raises(HubError, match="it is 'model'; replace it with --force"):
        pull("other", HubEntry(kind="checkpoint", mirrors=(str(archive),)), out)
    (out / ".qat-hub.json").write_text("{")
    with pytest.raises(HubError, match="qat-hub.json is damaged"):
        get(out, archive)


def test_rot_of_equal_size_is_found(out: Path, model: Path, archive: Path) -> None:
    get(out, archive, sha256=sha256_file(archive))
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[1000] ^= 1
    (out / "model.safetensors").write_bytes(weights)
    with pytest.raises(HubError, match="model.safetensors differs from its SHA-256"):
        get(out, archive, sha256=sha256_file(archive))
    with pytest.raises(HubError, match="model.safetensors differs from its SHA-256"):
        verify(out, {})
    assert get(out, archive, sha256=sha256_file(archive), replace=True).is_verified
    assert contents(out) == contents(model)


def test_a_file_that_nobody_pulled_is_no_part_of_what_is_verified(
    out: Path, model: Path, archive: Path, caplog
) -> None:
    known = {"tree_sha256": sha256_tree(model)}
    get(out, archive, **known)
    (out / "modeling_evil.py").write_text("import os")
    assert not get(out, archive, **known).is_verified
    assert "holds 1 files that were not pulled (modeling_evil.py), so it is not" in caplog.text
    assert not get(out, archive, **known, replace=True).is_verified
    with pytest.raises(HubError, match="1 files .*modeling_evil"):
        verify(out, {})


def test_what_the_registry_says_now_counts(out: Path, model: Path, archive: Path) -> None:
    assert get(out, archive, sha256=sha256_file(archive)).is_verified
    assert not get(out, archive).is_verified
    assert get(out, archive, tree_sha256=sha256_tree(model)).is_verified
    for known in ({"sha256": WRONG}, {"tree_sha256": WRONG}):
        with pytest.raises(HubError, match=f"{WRONG}; .*--force"):
            get(out, archive, **known)
        entry = HubEntry(kind="checkpoint", mirrors=("drive:a",), **known)
        with pytest.raises(HubError, match=f"registered is {WRONG}"):
            verify(out, {"model": entry})
    entry = HubEntry(kind="checkpoint", mirrors=("drive:a",), tree_sha256=sha256_tree(model))
    assert verify(out, {"model": entry}).is_verified and not verify(out, {}).is_verified


def test_a_receipt_that_came_beside_the_files_verifies_nothing(out, archive, caplog) -> None:
    known = {"sha256": sha256_file(archive)}
    assert get(out, archive, **known).is_verified  # unpacked just now
    evil = shutil.copytree(out, out.with_name("evil"))  # as tar, git or rsync bring it
    (evil / "model.safetensors").write_bytes(b"evil")
    receipt = json.loads((evil / RECEIPT).read_text())
    receipt["files"]["model.safetensors"] = sha256_file(evil / "model.safetensors")
    (evil / RECEIPT).write_text(json.dumps(receipt))
    entry = HubEntry(kind="checkpoint", mirrors=(str(archive),), **known)
    for place in (evil, out):  # nothing here tells which is the sound one
        caplog.clear()
        assert not pull("model", entry, place).is_verified
        assert not verify(place, {"model": entry}).is_verified
        assert caplog.text.count("says a receipt that anybody could have written") == 2
    with pytest.raises(HubError, match="SHA-256 of the files is"):
        learned = entry.model_copy(update={"tree_sha256": sha256_tree(out)})
        verify(evil, {"model": learned})
    assert verify(out, {"model": learned}).is_verified


@pytest.mark.parametrize("name", ["._config.json", ".DS_Store", f"more/{RECEIPT}", "more/._x"])
def test_what_is_never_packed_is_told_too(out, model, archive, caplog, name: str) -> None:
    known = {"tree_sha256": sha256_tree(model)}
    get(out, archive, **known)
    (out / name).write_text("x")
    assert not get(out, archive, **known).is_verified
    assert f"1 files that were not pulled ({name}), so it is not verified" in caplog.text
    with pytest.raises(HubError, match="1 files that did not come from"):
        verify(out, {})
    (out / RECEIPT).unlink()
    assert not get(out, archive, **known).is_verified  # as if placed there by hand
    (out / name).unlink()
    assert get(out, archive, **known).is_verified


def test_a_receipt_cannot_come_from_elsewhere(out: Path, model: Path, archive: Path) -> None:
    get(out, archive)
    forged = (out / RECEIPT).read_bytes().replace(sha256_file(archive).encode(), b"0" * 64)
    for name in (f"model/{RECEIPT}", f"{RECEIPT}/x", RECEIPT, RECEIPT.upper()):
        members = (named("model/model.safetensors"), b"evil"), (named(name), forged)
        evil = write_archive(archive.with_name("evil.tar.lz4"), *members)
        with pytest.raises(HubError, match=f"{RECEIPT}, .*do not trust this archive"):
            get(out.with_name("other"), evil, sha256=sha256_file(evil))
        assert not out.with_name("other").exists()
    (model / RECEIPT).write_bytes(forged)
    assert not get(out.with_name("other"), model, sha256=WRONG).is_verified
    assert WRONG not in (out.with_name("other") / RECEIPT).read_text()


def test_force_replaces_what_was_brought_and_nothing_else(out: Path, archive: Path) -> None:
    out.mkdir(parents=True)
    (out / "config.json").write_text("my own")
    (out / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="config.json would be replaced"):
        get(out, archive, replace=True)
    assert contents(out) == {"config.json": b"my own", "notes": b"mine"}
    (out / "config.json").unlink()
    get(out, archive, replace=True)
    assert contents(out)["notes"] == b"mine"
    get(out, archive, replace=True)
    assert os.listdir(out.parent) == ["model"]


def test_what_was_placed_by_hand_is_taken(out: Path, caplog) -> None:
    caplog.set_level("INFO")
    checkpoint(out)
    pulled = get(out, "drive:nowhere")
    assert pulled == Pulled(out, "qat", None, None, None, False, False)
    assert "was not pulled by qat; it is taken as it is" in caplog.text


def test_a_directory_on_a_drive_is_copied(out: Path, model: Path, tmp_path: Path) -> None:
    tree = sha256_tree(model)
    pulled = get(out, "drive:runs/model", drive=tmp_path / "drive", tree_sha256=tree)
    assert contents(out) == contents(model) and pulled.is_verified and pulled.sha256 is None
    assert pulled.tree_sha256 == tree


def test_mirrors_are_tried_in_order(out: Path, archive: Path, caplog) -> None:
    gone = archive.with_name("gone")
    pulled = get(out, "drive:runs/x", gone, archive, archive.with_name("never"))
    assert pulled.mirror == str(archive)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(lines) == 3 and "add --drive DIR" in lines[0] and "gone is not there" in lines[1]
    assert f"SHA-256 {sha256_file(archive)}; no hash of it is registered" in lines[2]
    assert not pulled.is_verified


def test_wrong_hashes_and_sizes(out: Path, model: Path, archive: Path, tmp_path: Path) -> None:
    fail(out, f"registered is {WRONG}.*by other means", archive, sha256=WRONG)
    fail(out, "5 were registered", archive, size=5)
    fail(out, f"SHA-256 of the files is .*, registered is {WRONG}", archive, tree_sha256=WRONG)
    fail(out, f"registered is {WRONG}", model, tree_sha256=WRONG)
    (tmp_path / "drive" / "a.tgz").write_bytes(archive.read_bytes())
    fail(out, f"registered is {WRONG}", "drive:a", drive=tmp_path / "drive", sha256=WRONG)
    pulled = get(out, "drive:a", archive, drive=tmp_path / "drive", sha256=sha256_file(archive))
    assert pulled.mirror == "drive:a"


def test_a_wrong_kind(out: Path, archive: Path, tmp_path: Path) -> None:
    fail(out, "holds no manifest.json, or meta.json of qwen_kd_topk", archive, kind="cache")
    legacy_cache(tmp_path / "legacy")
    (tmp_path / "legacy" / "shard_00000.pt").unlink()
    fail(out, "holds no weights", tmp_path / "legacy")


def test_the_reference_systems_files(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    legacy_cache(drive / "qwen3_caches" / "L" / "L")
    cache = HubEntry(kind="cache", mirrors=("drive:qwen3_caches/L",))
    assert pull("L", cache, tmp_path / "L", drive=drive).format == "anemll"
    assert sorted(contents(tmp_path / "L")) == ["meta.json", "shard_00000.pt"]
    run = drive / "qwen3_runs" / "Q2"
    run.mkdir(parents=True)
    (run / "best_state_dict.pt").write_bytes(b"PK\3\4" + bytes(99))
    (run / "config.json").write_text("{}")
    (run / "unwanted.pt").write_bytes(b"PK")
    one = HubEntry(kind="checkpoint", mirrors=("drive:qwen3_runs/Q2/best_state_dict.pt",))
    assert pull("q2", one, tmp_path / "q2", drive=drive).format == "anemll"
    assert sorted(contents(tmp_path / "q2")) == ["best_state_dict.pt", "config.json"]
    assert json.loads((tmp_path / "q2" / ".qat-hub.json").read_text())["name"] == "q2"


def test_a_broken_download_waits_for_the_next_pull(out: Path, archive: Path, monkeypatch) -> None:
    monkeypatch.setattr(web, "PAUSE_S", 0.001)
    with serving(archive.read_bytes()) as server:
        server.break_after = [1000, 0, 0, 0]
        sha256 = sha256_file(archive)
        with pytest.raises(HubError, match="1,000 bytes kept"):
            get(out, server.url, sha256=sha256)
        assert os.listdir(out.parent) == [".model.pull"]
        server.asked.clear()
        assert get(out, server.url, sha256=sha256).is_verified
        assert server.asked == ["bytes=1000-"]
    assert os.listdir(out.parent) == ["model"]


def test_a_wrong_download_is_not_kept(out: Path, archive: Path, monkeypatch) -> None:
    monkeypatch.setattr(web, "PAUSE_S", 0.001)
    with serving(archive.read_bytes()) as server:
        fail(out, "registered is", server.url, sha256=WRONG)
        server.data = gzip.compress(b"not a tar file")
        fail(out, "is damaged", server.url, sha256=hashlib.sha256(server.data).hexdigest())


def test_a_quota_page_in_place_of_a_file(out: Path, monkeypatch) -> None:
    def send(*, output: str, **_: object) -> str:
        path = Path(output, "uc")
        path.write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
        return str(path)

    monkeypatch.setattr(gdown, "download", send)
    fail(out, "gdrive:ID: a web page came instead of a file", "gdrive:ID")


def test_what_a_killed_pull_left_is_cleared(out: Path, archive: Path) -> None:
    left = out.parent / ".model.pull" / ".model.partial-abcd1234"
    left.mkdir(parents=True)
    (left.parent / "lock").touch()
    (left / "half.part").write_text("half")
    assert get(out, archive).is_new
    assert os.listdir(out.parent) == ["model"]


def test_one_at_a_time(out: Path, archive: Path) -> None:
    stage = out.parent / ".model.pull"
    stage.mkdir(parents=True)
    with (stage / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HubError, match="another process is pulling"):
            get(out, archive)
    assert get(out, archive).is_new


def test_an_unwritable_place(tmp_path: Path, archive: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="that you may write to"):
        get(tmp_path / "file" / "model", archive)
    with pytest.raises(ConfigError, match="is a file, expected a directory"):
        get(tmp_path / "file", archive)


def test_a_receipt_holds_no_secret(out: Path, archive: Path, monkeypatch, capsys) -> None:
    secret = "value-of-a-token"
    place = archive.parent.rename(archive.parent.with_name(secret))
    monkeypatch.setenv("HF_TOKEN", secret)
    registry = place / "hub.toml"
    mirrors = [str(place / "none.tgz"), str(place / archive.name)]
    registry.write_text(f'[model]\nkind = "checkpoint"\nmirrors = {json.dumps(mirrors)}\n')
    pull("model", load_registry(registry)["model"], out)
    assert b"[hidden]" in (out / RECEIPT).read_bytes()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    monkeypatch.setattr("sys.argv", ["qat", "hub", "unpack", mirrors[0], "--out", f"{out}2"])
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert "[hidden]" in printed.err and secret not in printed.err + printed.out
