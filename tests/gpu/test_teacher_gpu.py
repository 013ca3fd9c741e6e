"""A step with the teacher beside it on CUDA: compiled, recorded, without waiting."""

from pathlib import Path

import pytest
from gpu_case import no_synchronisation
from test_step_gpu import batch, course, step_of
from tiny import tiny_model

from qat.backend.device import select
from qat.models.language_model import LanguageModel
from qat.train.step import EAGER_STEPS, TrainingStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]


def taught(place: Path, **values: object) -> TrainingStep:
    """The step of `step_of` with a float teacher of its own, wider than the student."""
    plain = step_of(place, **{"loss": "kl:1,hard_ce:0.1", **values})
    dtype = select("cuda").dtype(plain.config.dtype)
    model = tiny_model(hidden_size=96, initializer_range=0.2).to("cuda", dtype)
    model.requires_grad_(False)
    plain.close()
    return TrainingStep(plain.student, plain.optimizer, plain.config, LanguageModel(model))


@pytest.mark.parametrize(
    "values", [{}, {"loss": "cakld"}, {"gradient_checkpointing": True}, {"dtype": "fp16"}], ids=str
)
def test_a_step_never_waits_for_the_device(tmp_path: Path, values: dict) -> None:
    step, batches = taught(tmp_path, **values), [batch(1)]
    for number in range(EAGER_STEPS + 1):
        step(batches, number)
    with no_synchronisation():
        step(batches, EAGER_STEPS + 1)
    facts = step.compile_facts()
    assert facts["cuda_graph"] and facts["fallback"] is None


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_recorded_step_is_the_step(tmp_path: Path, monkeypatch, accumulate: int) -> None:
    recorded = taught(tmp_path)
    found = course(recorded, 6, accumulate)
    assert recorded.compile_facts()["cuda_graph"]
    monkeypatch.setattr("qat.train.step.GRAPH_TOKENS", 0)
    expected = course(taught(tmp_path), 6, accumulate)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32"])
def test_compiled_layers_compute_what_is_written(tmp_path: Path, dtype: str) -> None:
    compiled = course(taught(tmp_path, dtype=dtype), 4)
    written = course(taught(tmp_path, dtype=dtype, compile="off"), 4)
    assert compiled == pytest.approx(written, rel=1e-2)
