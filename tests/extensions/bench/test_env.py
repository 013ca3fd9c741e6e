"""`qat env`: the same facts as a table and as JSON; an extra adds what is not there."""

from pathlib import Path

import pytest
from cli_case import call, said

import qat
from qat.extensions.bench.env import lacking

METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Provides-Extra: fast
Provides-Extra: all
Requires-Dist: {needs}; extra == "fast"
Requires-Dist: {name}[fast]; extra == "all"
"""


def test_an_extra_adds_what_is_absent_too_old_or_asked_for_by_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version, needs in (("a-b", "1", "a-c>=2"), ("a-c", "1.5", "a-d[fast]")):
        place = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        text = METADATA.format(name=name, version=version, needs=needs)
        (place / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert lacking("fast", "a-b") == ["a-c>=2"] == lacking("all", "a-b")
    assert lacking("fast", "a-c") == ["a-d[fast]"] == lacking("all", "a-c")
    (tmp_path / "a_c-1.5.dist-info" / "METADATA").write_text(
        METADATA.format(name="a-c", version="2", needs="a-b>=0.5")
    )
    assert lacking("all", "a-b") == [] == lacking("all", "a-c")


def test_the_page_and_the_line_say_the_same(monkeypatch, capsys) -> None:
    assert call(monkeypatch, "env", "--json") == 0
    found = said(capsys)
    assert found["qat"] == qat.__version__ and found["free_disk_gib"] > 0
    assert found["device_gib"] is None or len(str(found["device_gib"]).partition(".")[2]) == 1
    assert found["place"] == str(Path(qat.__file__).parents[1]) and "tensorboard" in found["extras"]
    assert call(monkeypatch, "env") == 0
    page = capsys.readouterr().out
    assert all(name in page for name in (*found["extras"], found["torch"], found["place"]))
    adds = next(filter(None, found["extras"].values()), [""])
    assert adds[0] in page
