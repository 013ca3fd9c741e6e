"""The steps of XLA's CPU client: the CPU's numbers, one graph each, and nothing on the host."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

import xla_sharded_case
from tiny import tiny_model
from train_case import config
from xla_case import (
    STEPS,
    Course,
    course,
    largest_difference,
    make_short_place,
    over_devices,
    told_by,
)

from qat.backend.device import select
from qat.logs import read_json_lines
from qat.train.optim import Optimizer
from qat.train.start import train_student

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
]
XLA = select("xla")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_short_place(tmp_path_factory.mktemp("xla"))


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ({"loss": "tail", "learn": "weights,codebook,scales,norms"}, 2e-5),
        ({"loss": "candidates", "learn": "codebook,scales", "gradient_checkpointing": True}, 1e-5),
        ({"loss": "sampled", "learn": "weights", "grad_accum_steps": 2}, 1e-5),
        ({"loss": "tail", "dtype": "bf16"}, 1e-3),
    ],
)
def test_twenty_steps_are_the_cpus(
    place: Path, tmp_path: Path, values: dict[str, object], most: float
) -> None:
    ours, theirs = (course(place, tmp_path, device, **values) for device in ("xla", "cpu"))
    assert largest_difference(ours, theirs) <= most
    assert (ours.compiles, ours.executions, ours.fallbacks) == (2, STEPS, {})


def test_placing_keeps_ties() -> None:
    model = tiny_model(tie_word_embeddings=True, num_hidden_layers=1)
    names = [name for name, _ in model.named_parameters()]
    XLA.tracing.place(model, XLA.device)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.lm_head.weight is model.get_input_embeddings().weight


class Stop(Exception):
    """A crash."""


def test_a_run_and_one_that_was_resumed(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("qat.train.judge.SAMPLE_TOKENS", 3)
    values = {"max_steps": 4, "save_every": 2, "eval_every": 4, "device": "xla"}

    def run(name: str, *, resume: bool = False, **others: object) -> list[dict]:
        settings = config(place, **{**values, **others})
        student = str(place / "student")
        train_student(settings, student, tmp_path / name, resume=resume, begins_anew=resume)
        if settings.device == "xla" and name != "stopped" or resume:  # all before the clock
            (*_, beat) = read_json_lines(tmp_path / name / "heartbeat-rank0.jsonl")
            assert 0 < beat["graphs"] <= 2 and beat["recompiles"] == 0
        return read_json_lines(tmp_path / name / "metrics.jsonl")

    whole = run("whole")
    real = Optimizer.step

    def dying(self: Optimizer, number: int) -> torch.Tensor:
        if number == 3:
            raise Stop
        return real(self, number)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Optimizer, "step", dying)
        run("stopped")
    assert run("stopped", resume=True) == whole
    for ours, theirs in zip(whole, run("cpu", device="cpu"), strict=True):
        keys = ours.keys() - {"kind", "sample"}
        assert {k: ours[k] for k in keys} == pytest.approx({k: theirs[k] for k in keys}, rel=1e-4)
        assert ours.get("sample") == theirs.get("sample")


def test_four_devices_are_one(place: Path, tmp_path: Path) -> None:
    ours = over_devices(4, place, tmp_path)
    assert (ours.compiles, ours.executions, ours.fallbacks) == (2, STEPS, {})
    assert largest_difference(ours, course(place, tmp_path, "cpu")) <= 1e-6


def test_devices_share_latent_weights(place: Path, tmp_path: Path) -> None:
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
