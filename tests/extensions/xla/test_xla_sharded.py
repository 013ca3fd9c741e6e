"""Four devices share latent weights and moments, and a run that was cut goes on alike."""

from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

import xla_sharded_case
from xla_case import STEPS, Course, course, largest_difference, make_short_place, told_by

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
]


def test_devices_share_latent_weights(tmp_path: Path) -> None:
    place = make_short_place(tmp_path / "place")
    told = told_by(Path(xla_sharded_case.__file__), place, tmp_path, devices=4)
    ours = Course(*told["course"])
    assert (ours.compiles, ours.executions, ours.fallbacks) == (2, STEPS, {})
    assert largest_difference(ours, course(place, tmp_path, "cpu")) <= 1e-6
    rows_held, compiles = told["held"]
    assert len(rows_held) == 3 * 7  # a weight and two moments of each linear
    for name, (rows, *held) in rows_held.items():
        assert held == [rows // 4] * 4, name
    assert compiles == [1, 0]
    whole, cut = told["runs"]
    assert cut == whole
