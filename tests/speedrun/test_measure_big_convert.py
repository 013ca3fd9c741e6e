"""The memory of converting what does not fit, on a model that does."""

import json
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_peak_is_measured_and_the_scratch_is_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import measure_big_convert

    small = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    small |= {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setitem(measure_big_convert.SHAPES, "8b", small)
    monkeypatch.setattr(measure_big_convert, "VOCAB", 1024)
    monkeypatch.chdir(tmp_path)
    figures = Path("figures.jsonl")
    measure_big_convert.measure(
        scratch=Path("not", "there"), shape="8b", calibrate=True, figures=figures
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["is_calibrated"] and found["layers"] == 2
    (row,) = map(json.loads, figures.read_text().splitlines())
    assert row["figure"] == "convert_8b_host_gib"
    assert row["value"] == found["peak_private_gib"] and 0.1 < row["value"] < 3
    assert not [*Path("not", "there").iterdir()]


def test_a_conversion_that_fails_gives_no_figure() -> None:
    import subprocess
    import sys

    import measure_big_convert

    with pytest.raises(SystemExit):
        measure_big_convert.watched(subprocess.Popen([sys.executable, "-c", "exit(3)"]))
