"""Rows of data sets of a hub, and of Parquet files."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from qat.data.sources import check_source, open_source
from qat.errors import DataError, HubError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def documents(data: Path) -> list:
    return list(open_source(str(data)).documents)


def test_parquet_is_read_by_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": CHAT}] * 3
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert documents(tmp_path / "a.parquet") == [CHAT] * 3
    (tmp_path / "b.parquet").write_text("no table")
    with pytest.raises(DataError, match="b.parquet is not Parquet"):
        documents(tmp_path / "b.parquet")


def test_parquet_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_text("PAR1")
    with pytest.raises(DataError, match=r"needs the 'pyarrow' package; .* or run: .*\[datasets\]"):
        documents(tmp_path / "a.parquet")


def test_an_id_needs_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"no/such is no file .* or run: .*\[datasets\]"):
        open_source("no/such")


def hub(monkeypatch: pytest.MonkeyPatch, answer: object) -> list:
    """A stand-in for the optional `datasets` package that records how it was called."""
    calls = []

    class DatasetsError(Exception):
        pass

    def load_dataset(*args: object, **kwargs: object) -> object:
        calls.append((args, kwargs))
        if isinstance(answer, str):
            raise DatasetsError(answer)
        return answer

    module = types.ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None, origin="a test")
    monkeypatch.setattr("qat.extensions.datasets.rows.is_online", lambda name, kind: True)
    module.load_dataset = load_dataset
    module.exceptions = types.SimpleNamespace(DatasetsError=DatasetsError)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_hub_ids_carry_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, [{"text": "a"}, {"text": "b"}])
    source = open_source("owner/wiki:raw-v1@test")
    assert (list(source.documents), source.name) == (["a", "b"], "wiki")
    open_source("owner/wiki")
    assert calls == [
        (("owner/wiki", "raw-v1"), {"split": "test", "streaming": True}),
        (("owner/wiki", None), {"split": "train", "streaming": True}),
    ]


def test_an_unknown_hub_id_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, "not found")
    with pytest.raises(DataError, match="datasets cannot load it: not found"):
        open_source("owner/none")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, [])

    def silent(name: str, kind: str) -> bool:
        raise HubError(f"{name} cannot be asked for")

    monkeypatch.setattr("qat.extensions.datasets.rows.is_online", silent)
    with pytest.raises(HubError, match="owner/wiki cannot be asked for"):
        check_source("owner/wiki:raw@test")
    assert calls == []
