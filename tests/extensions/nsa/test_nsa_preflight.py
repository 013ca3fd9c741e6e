"""Findings of preflight about a run with sparse attention."""

from pathlib import Path

from qat.extensions.nsa.kernels.router import Route
from qat.extensions.nsa.preflight import SparsePlan, findings
from qat.train.config import TrainConfig

CONFIG = TrainConfig(cache_dir=Path("cache"))
FAST = SparsePlan(2048, 1024, True, Route("auto", "flex", "CUDA"), "NVIDIA H200")
SLOW = Route("auto", "reference", "width 20 is no power of two")


def test_findings_and_their_severity() -> None:
    merged = FAST._replace(has_gates=False)
    for plan, values, expected in (
        (FAST, {}, {"nsa_gates": "note", "nsa_backend": "note"}),
        (FAST, {"learn": "scales,gates"}, {"nsa_backend": "note"}),
        (merged, {}, {"nsa_backend": "note"}),
        (
            merged._replace(sequence_length=1024),
            {},
            {"nsa_dense": "warning", "nsa_backend": "note"},
        ),
        (merged._replace(dense_until=2047), {}, {"nsa_backend": "note"}),
        (merged._replace(dense_until=2048), {}, {"nsa_slow": "note", "nsa_backend": "note"}),
        (merged._replace(route=SLOW), {}, {"nsa_backend": "warning"}),
        (merged._replace(route=SLOW, device="cpu"), {}, {"nsa_backend": "note"}),
    ):
        found = [*findings(CONFIG.model_copy(update=values).learn, plan)]
        assert {each.code: each.severity for each in found} == expected
        assert all(each.reason and each.mend for each in found)
