"""The cost of a step, and its share of a device's peak in the heartbeat."""

from pathlib import Path

import pytest
from tiny import SHAPE, VOCAB, tiny_model
from train_case import config, make_place, make_trainer

from qat.logs import read_json_lines
from qat.models.devices import DEVICES
from qat.models.flops import forward_flops, token_flops
from qat.models.language_model import LanguageModel
from qat.nn.swap import linear_names
from qat.train import loop


def test_a_forward_pass_is_a_third_of_a_step_that_trains_everything(tmp_path: Path) -> None:
    model = LanguageModel(tiny_model())
    settings = config(tmp_path, learn="weights")
    step = token_flops(model, linear_names(model.model), settings, S=16, K=8)
    # the head passes gradients on, yet never learns
    head = 2 * VOCAB * SHAPE["hidden_size"]
    assert forward_flops(model, 16) == pytest.approx((step.total + head) / 3)


def test_the_heartbeat_tells_the_share_of_the_peak(tmp_path: Path, monkeypatch) -> None:
    place = make_place(tmp_path)
    h200 = next(device for device in DEVICES if device.name == "H200")
    for known, out in ((None, "unknown"), (h200, "known")):
        monkeypatch.setattr(loop, "device_called", lambda _, known=known: known)
        settings = config(place, max_steps=1)
        trainer = make_trainer(settings, place / "student", tmp_path / out)
        trainer.train()
        (line,) = read_json_lines(tmp_path / out / "heartbeat-rank0.jsonl")
        if known is None:
            assert line["mfu_frac"] is None
    names = linear_names(trainer.student.model)
    flops = token_flops(
        trainer.student, names, settings, S=trainer.cache.sequence_length, K=8
    ).total
    assert line["mfu_frac"] == pytest.approx(line["tokens_per_s"] * flops / h200.peak_flops("fp32"))
