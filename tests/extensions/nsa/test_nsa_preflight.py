"""Findings of preflight about a run with sparse attention."""

from pathlib import Path

import pytest

from qat.extensions.nsa.kernels.router import Route
from qat.extensions.nsa.preflight import SparsePlan, findings
from qat.train.config import TrainConfig

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
