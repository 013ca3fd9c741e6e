"""Each kind of mirror, and what it says when it does not work."""

from functools import partial
from pathlib import Path

import fsspec
import gdown
import pytest
from hub_case import Bucket, checkpoint

from qat.cli import run_verb
from qat.errors import HubError
from qat.hub import mirrors
from qat.hub.mirrors import FetchPlaces, fetch, in_bucket, lookup


@pytest.fixture
def places(tmp_path: Path) -> FetchPlaces:
    (tmp_path / "stage").mkdir()
    (tmp_path / "drive").mkdir()
    return FetchPlaces(tmp_path / "stage", tmp_path / "drive")


def fail(mirror: str, places: FetchPlaces, message: str) -> None:
    with pytest.raises(HubError, match=message) as caught:
        fetch(mirror, places)
    assert "\n" not in str(caught.value)


def test_an_archive_on_a_drive_is_copied_here_first(places: FetchPlaces) -> None:
    (places.drive / "runs").mkdir()
    (places.drive / "runs" / "q2.tar.lz4").write_bytes(b"packed")
    arrival = fetch("drive:runs/q2", places)
    assert arrival.path.parent == places.stage and arrival.path.read_bytes() == b"packed"
    assert arrival.name == "q2.tar.lz4" and arrival.is_ours


def test_the_best_form_is_taken(tmp_path: Path) -> None:
    base = tmp_path / "q2_0.53"
    with pytest.raises(HubError, match="q2_0.53 is not there, neither as .tar.lz4, .tgz, .tar.gz"):
        lookup(base)
    checkpoint(base)
    assert lookup(base) == base
    for suffix in (".tar.gz", ".tgz", ".tar.lz4"):
        Path(f"{base}{suffix}").touch()
        assert lookup(base) == Path(f"{base}{suffix}")
    assert lookup(Path(f"{base}.tgz")) == Path(f"{base}.tgz")


def test_a_drive_has_to_be_there(places: FetchPlaces) -> None:
    fail("drive:runs/q2", places._replace(drive=None), "needs .* mounted Drive; add --drive DIR")
    gone = places._replace(drive=places.drive / "gone")
    fail("drive:runs/q2", gone, "Drive is not mounted at .*gone; mount it, or mend --drive")
    fail("drive:runs/q2", places, "runs/q2 is not there")


def test_a_drive_is_not_left(places: FetchPlaces) -> None:
    for path in ("../private", "/etc/passwd", "a/../../private"):
        fail(f"drive:{path}", places, "expected a name inside")


def test_a_drive_that_goes_away(places: FetchPlaces, monkeypatch) -> None:
    (places.drive / "a.tgz").write_bytes(b"packed")

    def gone(*_: object) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(mirrors, "copy_file", gone)
    fail("drive:a", places, "drive:a: Transport endpoint is not connected")


def test_google_drive_by_id(places: FetchPlaces, monkeypatch) -> None:
    def send(*, id: str, output: str, **_: object) -> str:  # noqa: A002
        assert id == "ID1"
        path = Path(output, "cache.tgz")
        path.write_bytes(b"packed")
        return str(path)

    monkeypatch.setattr(gdown, "download", send)
    arrival = fetch("gdrive:ID1", places)
    assert arrival.name == "cache.tgz" and arrival.path.read_bytes() == b"packed"


def test_google_drive_says_no(places: FetchPlaces, monkeypatch) -> None:
    for words, message in (
        ("Failed:\n\n\tToo many users have viewed or downloaded this file", "quota of downloads"),
        ("Cannot retrieve the public link of the file.\n You may need to", "who has the link"),
    ):
        no = gdown.exceptions.FileURLRetrievalError(words)
        monkeypatch.setattr(gdown, "download", partial(refuse, no))
        fail("gdrive:ID1", places, message)


def test_storage(places: FetchPlaces, bucket: Path) -> None:
    (bucket / "a.tar.lz4").write_bytes(b"packed")
    checkpoint(bucket / "runs" / "q2")
    assert fetch("gs://bucket/a.tar.lz4", places).path.read_bytes() == b"packed"
    arrival = fetch("gs://bucket/runs/q2/", places)
    assert (arrival.path / "config.json").is_file() and arrival.name == "q2"
    (bucket / "runs" / "q2" / "config.json").unlink()  # nothing of the first time stays
    assert not (fetch("gs://bucket/runs/q2", places).path / "config.json").exists()
    fail("gs://bucket/b.tgz", places, "gs://bucket/b.tgz is not there, neither as a file")


def test_storage_needs_what_reads_it(places: FetchPlaces, bucket: Path, monkeypatch) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", partial(refuse, ImportError("Install gcsfs")))
    fail("gs://bucket/a.tgz", places, r"cannot be read .Install gcsfs.*install.*\[remote\]")


def test_a_store_that_says_no(places: FetchPlaces, bucket, monkeypatch) -> None:
    (bucket / "a.tgz").write_bytes(b"packed")
    for error in (PermissionError("Forbidden:\n no"), RuntimeError("no no")):
        monkeypatch.setattr(Bucket, "get_file", partial(refuse, error))
        fail("gs://bucket/a.tgz", places, "^gs://bucket/a.tgz: .*no")


def refuse(error: Exception, *_: object, **__: object) -> None:
    raise error


def test_a_name_in_a_store_leads_nowhere_else(places: FetchPlaces, bucket, monkeypatch) -> None:
    checkpoint(bucket / "runs" / "q2")
    found = [f"{bucket}/runs/q2/../../left"]
    monkeypatch.setattr(Bucket, "find", lambda *_: found)
    fail("gs://bucket/runs/q2", places, "expected a name inside")


def test_a_bucket_in_place_of_a_drive() -> None:
    places = in_bucket(("drive:caches/L", "drive:a.tgz", "drive:q2/best.pt", "hf:a/b"), "gs://b/x/")
    assert places == (
        "gs://b/x/caches/L.tar.lz4",
        "gs://b/x/caches/L.tgz",
        "gs://b/x/caches/L.tar.gz",
        "gs://b/x/caches/L",
        "gs://b/x/a.tgz",
        "gs://b/x/q2/best.pt",
        "hf:a/b",
    )


def test_pull_from_a_bucket(bucket: Path, tmp_path: Path) -> None:
    checkpoint(bucket / "runs" / "q2")
    own = tmp_path / "hub.toml"
    own.write_text("[q2]\nkind = 'checkpoint'\nmirrors = ['drive:runs/q2']\n")
    out = ["--out", str(tmp_path / "out"), "--registry", str(own)]
    found = run_verb(["hub", "pull", "q2", "--drive", "gs://bucket", *out])
    assert found["mirror"] == "gs://bucket/runs/q2"
    assert (tmp_path / "out" / "config.json").is_file()
