"""Runs of students with sparse attention: what learns, what is said of it, and how they go on."""

import csv
from pathlib import Path

import pytest
import torch
from crash import stopped_at
from nsa_train_case import SPARSE, make_sparse_place
from train_case import assert_same_end, config

from qat.errors import ConfigError
from qat.extensions.nsa.swap import nsa_config
from qat.logs import read_json_lines
from qat.models.load import load_model
from qat.observe.health import health
from qat.observe.runs import read_directory
from qat.train.optim import Optimizer
from qat.train.preflight import examine
from qat.train.start import TrainReport, train_student


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_place(tmp_path_factory.mktemp("sparse"))


def run(
    place: Path, out: Path, *, student: str = "student", resume: bool = False, **values: object
) -> TrainReport:
    chosen = {"learn": "scales,gates", "lr_gates": 3e-2, **values}
    return train_student(config(place, **chosen), str(place / student), out, resume=resume)


@pytest.mark.parametrize(
    ("student", "values"),
    [
        ("student", {"learn": "scales,gates"}),
        ("student", {"learn": "weights,gates", "mlp_only": True}),
        ("float", {"learn": "gates,norms"}),
    ],
)
def test_gates_and_pools_learn(place: Path, tmp_path: Path, student: str, values: dict) -> None:
    report = run(place, tmp_path / "run", student=student, max_steps=8, eval_every=8, **values)
    before = dict(load_model(str(place / student), device="cpu").model.named_parameters())
    after = load_model(str(report.final), device="cpu").model
    assert nsa_config(after) == SPARSE
    moved = {n for n, p in after.named_parameters() if not torch.equal(p, before[n])}
    new = {name for name in before if ".nsa." in name}
    assert len(new) == 2 * 4 and new <= moved
    kinds = {"scales": ".scales", "norms": "norm.weight", "weights": "nothing that is kept"}
    learning = [kinds[kind] for kind in values["learn"].split(",") if kind != "gates"]
    assert all(name.endswith(tuple(learning)) for name in moved - new)


def test_evaluations_say_how_sparse_attention_fares(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "run")
    evals = [
        line
        for line in read_json_lines(tmp_path / "run" / "metrics.jsonl")
        if line["kind"] == "eval"
    ]
    first, last = evals[0], evals[-1]
    assert first["nsa_selected_frac"] == 1.0 and last["nsa_selected_frac"] < 1.0
    assert last["kl_tail_nats"] < first["kl_tail_nats"]
    assert [layer["layer"] for layer in last["nsa_layers"]] == [0, 1]
    assert 0 < last["nsa_limit_frac"] < 1 and 0 < last["nsa_recall_least_frac"] < 1
    with (tmp_path / "run" / "val.csv").open() as file:
        header = next(csv.reader(file))
    assert "nsa_recall_frac" in header and "nsa_layers" not in header
    names = {check.name for check in health(read_directory(tmp_path / "run"))}
    assert {"block recall", "selected branch", "attention fallbacks"} <= names


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(place: Path, tmp_path: Path) -> None:
    values = {"learn": "scales,codebook,gates", "max_steps": 5, "save_every": 1}
    whole = run(place, tmp_path / "whole", **values)
    with stopped_at(Optimizer, "step", 3):
        run(place, tmp_path / "stopped", **values)
    report = run(place, tmp_path / "stopped", resume=True, **values)
    assert_same_end((tmp_path / "whole", whole), tmp_path / "stopped", report)


def test_the_preflight_knows_sparse_attention(place: Path, tmp_path: Path) -> None:
    found = examine(
        config(place, learn="scales"), str(place / "student"), tmp_path / "run"
    ).findings
    codes = {finding.code: finding for finding in found}
    assert "nsa_dense" not in codes and "nsa_gates" in codes
    assert codes["nsa_backend"].found == "sparse attention runs as reference"


def test_a_float_student_has_no_scales(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no quantized linears in scope e2e"):
        run(place, tmp_path / "run", student="float", learn="scales,gates")
