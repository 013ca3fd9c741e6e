"""A followed run on CUDA: the heartbeat knows the share of the peak, and trackers are told it."""

from pathlib import Path

import pytest
from train_case import config, make_place

from qat.logs import read_json_lines
from qat.observe.config import TrackConfig
from qat.observe.follow import follow
from qat.train.start import train_student

pytestmark = pytest.mark.gpu


def test_a_followed_run_tells_its_share_of_the_peak(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place, out = make_place(tmp_path), tmp_path / "run"
    settings = config(place, device="cuda", dtype="bf16", max_steps=4)
    with follow(out, TrackConfig(tensorboard=True)):
        train_student(settings, str(place / "student"), out, resume=False)
    shares = [line["mfu_frac"] for line in read_json_lines(out / "heartbeat-rank0.jsonl")]
    assert len(shares) == 4 and all(0 < share < 1 for share in shares)
    events = EventAccumulator(str(out / "tracking" / "tensorboard")).Reload()
    told = [point.value for point in events.Scalars("device/mfu_frac")]
    assert told == pytest.approx(shares)
