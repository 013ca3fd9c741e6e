"""The prediction of two steps on CUDA, against the run itself. Run with `-m gpu`."""

from pathlib import Path

import pytest
from train_case import config, make_place

from qat.data.reader import TeacherCache
from qat.logs import read_json_lines
from qat.train.preflight import examine, predict
from qat.train.start import train_student

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]


def test_a_run_takes_what_was_predicted(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    settings = config(place, device="cuda", dtype="bf16", max_steps=60, log_every=20)
    settings = settings.model_copy(update={"eval_every": 60, "save_every": 60})
    student = str(place / "student")
    predicted = predict(settings, student, TeacherCache.open(place / "cache"))
    assert predicted.attention == "tile" and predicted.fallback is None
    train_student(settings, student, tmp_path / "run", resume=False)
    last = read_json_lines(tmp_path / "run" / "heartbeat-rank0.jsonl")[-1]
    assert predicted.step_s / 3 < last["step_s_p50"] < predicted.step_s * 3
    # libraries' workspaces, 60 MiB, are taken by whichever comes first
    assert predicted.peak_gib == pytest.approx(last["peak_gib"], rel=0.25, abs=0.07)
    # what the prediction compiled takes nothing from the run
    assert last["compiled"] and last["cuda_graph"] and last["fallback"] is None
    assert last["recompiles"] == 0 and 0 < last["mfu_frac"] < 1


def test_fp32_is_a_finding_here(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    settings = config(place, device="cuda", dtype="fp32")
    checked = examine(settings, str(place / "student"), tmp_path / "run")
    assert "dtype" in {each.code for each in checked.findings}
    assert checked.prediction is None  # six steps take no hour
