"""The student's own words on CUDA: those of the checkpoint, and steps that are recorded."""

from pathlib import Path

import pytest
import torch
from train_case import config, make_place, with_teacher

from qat.extensions.decode.rollout import RolloutSampler
from qat.extensions.decode.slots import Batch as Slotted
from qat.extensions.decode.slots import Request, Slots, in_order, open_sampler
from qat.generate.sampling import Sampling
from qat.logs import HEARTBEAT, read_json_lines
from qat.models.load import load_model
from qat.train.start import train_student

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_teacher(make_place(tmp_path_factory.mktemp("own")))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_words_are_those_of_the_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, every: int
) -> None:
    torch.compiler.reset()
    real, heard = RolloutSampler.sample, []

    def sample(sampler: RolloutSampler, requests: list[Request]) -> list[list[int]]:
        heard.append((list(requests), real(sampler, requests)))
        return heard[-1][1]

    monkeypatch.setattr(RolloutSampler, "sample", sample)
    own = {"teacher": str(place / "teacher"), "on_policy": 0.5, "rollout_every": every}
    own |= {"rollout_tokens": 8}
    often = {"max_steps": 7, "save_every": 1, "keep": 9, "eval_every": 7, "lr": 0.1}
    chosen = config(
        place, **{**own, **often, "cache_dir": place / "known", "device": "cuda", "dtype": dtype}
    )
    train_student(chosen, str(place / "student"), tmp_path / "run", resume=False)
    assert len(heard) == -(-7 // every)
    for number, (requests, said) in enumerate(heard):
        step = number * every
        source = tmp_path / f"run/checkpoints/step-{step:06d}" if step else place / "student"
        model = load_model(str(source), device="cuda", dtype=dtype)
        slotted = Slotted(2 * every, 16, 8, Sampling(1.0), frozenset({0}))
        sampler = open_sampler(model, slotted)
        assert type(sampler) is Slots
        assert in_order(sampler.sample(requests)) == said
    beat = read_json_lines(tmp_path / "run" / HEARTBEAT)[-1]
    assert beat["cuda_graph"] and beat["compiled"] and beat["fallback"] is None
    lines = read_json_lines(tmp_path / "run/metrics.jsonl")
    assert all(line["own_reverse_kl_nats"] > 0 for line in lines if line["kind"] == "train")


def test_recorded_steps_are_the_steps(place: Path, tmp_path: Path, monkeypatch) -> None:
    found = []
    for name, tokens in (("recorded", 2**16), ("plain", 0)):
        torch.compiler.reset()
        monkeypatch.setattr("qat.train.step.GRAPH_TOKENS", tokens)
        own = {"teacher": str(place / "teacher"), "on_policy": 0.5, "rollout_temperature": 0.0}
        chosen = config(
            place, **{**own, "cache_dir": place / "known", "device": "cuda", "grad_accum_steps": 2}
        )
        train_student(chosen, str(place / "student"), tmp_path / name, resume=False)
        lines = read_json_lines(tmp_path / name / "metrics.jsonl")
        found.append([line["loss_nats"] for line in lines if line["kind"] == "train"])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
