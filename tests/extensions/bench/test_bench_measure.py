"""The clock, the fit of costs, and what counts as a FLOP."""

from itertools import repeat

import pytest
import torch

from qat.backend import device as backend
from qat.backend.base import Backend
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.measure import fit_cost, measure_roofline, time_steps
from qat.extensions.bench.student import open_student
from qat.models.flops import token_flops
from qat.train.learnable import weights_in_scope
from qat.train.step import StepResult

CPU = backend.select("cpu")


class Clockwork:
    """A subject whose steps take what it is told, on a clock of its own."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now, self.steps = seconds, 0.0, []

    def __call__(self, batches: list, step: int) -> StepResult:
        self.steps.append(step)
        self.now += self.seconds[step]
        sums = {"loss": torch.tensor(12.0)}
        return StepResult(sums, torch.tensor(1.0), torch.tensor(6), 8)

    def compile_facts(self) -> dict[str, object]:
        return {"graphs": 2}


def test_the_first_steps_stay_outside_the_clock(monkeypatch) -> None:
    subject = Clockwork([100.0, 10.0, 2.0, 4.0, 3.0])
    monkeypatch.setattr(Backend, "mark", lambda _, __=None: subject.now)
    timing = time_steps(subject, enumerate(repeat([])), CPU, warmup=2, steps=3)
    assert subject.steps == [0, 1, 2, 3, 4]
    assert timing.steps_s == (2.0, 4.0, 3.0) and timing.warmup_s == 110.0
    numbers = timing.numbers()
    assert numbers["step_s"] == 3.0 and numbers["tokens_per_s"] == 8 / 3
    assert numbers["valid_tokens_per_s"] == 2.0 and numbers["loss_nats"] == 2.0
    assert numbers["graphs"] == 2
    assert numbers["step_p10_s"] == pytest.approx(2.2) and numbers["step_p90_s"] == 3.8


def test_a_line_is_found_exactly() -> None:
    tokens = [64, 128, 512]
    fit = fit_cost(tokens, [0.25 + 1e-3 * n for n in tokens])
    assert fit.fixed_s == pytest.approx(0.25) and fit.worst_error == pytest.approx(0, abs=1e-9)
    assert fit.marginal_tokens_per_s == pytest.approx(1000)


def test_no_line_through_too_few_sizes_or_against_all_sense() -> None:
    assert fit_cost([64, 128], [1.0, 2.0]) is None
    assert fit_cost([64, 64, 128], [1.0, 1.0, 2.0]) is None
    assert fit_cost([1, 2, 3], [3.0, 2.0, 1.0]) is None


def flops(**values: object) -> tuple:
    config = BenchConfig(device="cpu", **values)
    student = open_student("tiny", config)
    names = weights_in_scope(student.model, config.scope)
    source = open_source(config, student)
    return token_flops(student, names, config, S=source.seq_len, K=source.top_k)


MLP = 2 * 3 * 64 * 128
ATTENTION = 2 * (2 * 64 * 64 + 2 * 64 * 32)
"""Weights of the tiny shape's two layers: q and o are 64 x 64, k and v 32 x 64."""


def test_what_learns_counts_six_and_what_only_passes_gradients_on_four() -> None:
    assert flops().linears == 6 * (MLP + ATTENTION)
    assert flops(mlp_only=True).linears == 6 * MLP + 4 * ATTENTION
    assert flops(attention_only=True).linears == 4 * MLP + 6 * ATTENTION
    for learn in ("norms", "lora"):  # adapters of frozen codes need no gradient of a weight
        assert flops(learn=learn).linears == 4 * (MLP + ATTENTION)


def test_the_head_counts_all_words_or_the_candidates() -> None:
    assert flops().head == 4 * 512 * 64
    assert flops(loss="candidates", top_k=8).head == 4 * 8 * 64
    assert flops(loss="candidates,hard_ce").head == 4 * 512 * 64


def test_attention_counts_the_keys_that_a_causal_query_sees() -> None:
    pairs = 3 + 2 + 1
    per_pair = 2 * 2 * 2 * 32  # scores and sums, multiply and add, two heads of 32
    assert flops(seq_len=3).attention == pytest.approx(3 * 2 * per_pair * pairs / 3)


def test_a_device_outside_the_table_has_measured_peaks_only() -> None:
    roofline = measure_roofline(CPU, "fp32")
    assert roofline.sheet_flops is None
    assert roofline.matmul_flops > 1e8 and roofline.copy_bytes > 1e8
    shares = roofline.mfu(roofline.matmul_flops / 2)
    assert shares == {"mfu_frac": None, "mfu_of_matmul_frac": 0.5}
