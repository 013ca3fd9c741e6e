"""The script that times the opening of a GGUF file records both figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import measure_gguf
import pytest
from gguf_case import write_gguf


def test_the_first_opening_is_a_figure_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: Iterator[float] = iter([40.0, 4.0, 6.0, 5.0])
    monkeypatch.setattr(
        measure_gguf, "opened", lambda *_: {"tokenizer_s": 1.0, "model_s": next(taken)}
    )
    measure_gguf.main(tmp_path / "model.gguf", figures=tmp_path / "figures.jsonl")
    lines = (tmp_path / "figures.jsonl").read_text().splitlines()
    found = {line["figure"]: line for line in map(json.loads, lines)}
    assert found["gguf_open_s"]["value"] == 41.0
    assert found["gguf_reopen_s"]["value"] == 6.0 and found["gguf_reopen_s"]["runs"] == 3
    assert found["gguf_reopen_s"]["goal"] == "<= 10"
    assert "41.0 s the first time, 6.0 s from then on" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_is_opened_with_a_cache_of_its_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    for _ in range(2):
        taken = measure_gguf.opened(path, tmp_path / "kept")
        assert taken.keys() == {"tokenizer_s", "model_s"} and min(taken.values()) > 0
    assert len([*(tmp_path / "kept").iterdir()]) == 3
