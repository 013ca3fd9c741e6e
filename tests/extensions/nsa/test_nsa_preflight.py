"""Findings of preflight about a run with sparse attention."""

from pathlib import Path

import pytest
from nsa_model_case import SMALL, sparse_model

from qat.backend.device import select
from qat.extensions.nsa import hook
from qat.extensions.nsa.kernels.router import Route
from qat.extensions.nsa.preflight import SparsePlan, findings, plan_of
from qat.train.config import TrainConfig
from qat.train.preflight import Preflight, RunPlan

CONFIG = TrainConfig(cache_dir=Path("cache"))
FAST = SparsePlan(2048, 1024, True, Route("auto", "flex", "CUDA"), "NVIDIA H200")
SLOW = Route("auto", "reference", "width 20 is no power of two")


@pytest.mark.parametrize(
    ("plan", "values", "expected"),
    [
        (FAST, {}, {"nsa_gates": "note", "nsa_backend": "note"}),
        (FAST, {"learn": "scales,gates"}, {"nsa_backend": "note"}),
        (FAST._replace(has_gates=False), {}, {"nsa_backend": "note"}),
        (
            FAST._replace(sequence_length=1024, has_gates=False),
            {},
            {"nsa_dense": "warning", "nsa_backend": "note"},
        ),
        (FAST._replace(has_gates=False, route=SLOW), {}, {"nsa_backend": "warning"}),
        (FAST._replace(has_gates=False, route=SLOW, device="cpu"), {}, {"nsa_backend": "note"}),
    ],
)
def test_findings_and_their_severity(plan: SparsePlan, values: dict, expected: dict) -> None:
    found = [*findings(CONFIG.model_copy(update=values).learn, plan)]
    assert {each.code: each.severity for each in found} == expected
    assert all(each.reason and each.mend for each in found)


def test_a_student_is_looked_at_as_it_is_trained() -> None:
    backend, config = select("cpu"), sparse_model().config
    plan = plan_of(config, 128, backend)
    assert plan[:3] == (128, SMALL.reach, True)
    assert plan.route.backend == "reference" and plan.device == "cpu"
    found = tuple(hook.findings(CONFIG.learn, config, 60, backend))
    run = RunPlan("cpu", False, None, 2**40, 10**6, 1000, 60, 1024, attention=found)
    assert set(found) <= set(Preflight(CONFIG, run).findings())
    assert {each.code for each in found} == {"nsa_dense", "nsa_gates", "nsa_backend"}
