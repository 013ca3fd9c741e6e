"""Many rows at once say what each says alone, whoever their neighbours are."""

import numpy as np
import pytest
import torch
from covering import covering
from quantized import tiny_adapted, tiny_quantized, with_kv, with_rounded_inputs
from tiny import LONGROPE, tiny_model
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.backend.cpu import CpuBackend
from qat.extensions.decode import slots as module
from qat.extensions.decode.slots import (
    Batch,
    Request,
    Slots,
    SlotStep,
    Waves,
    in_order,
    open_sampler,
)
from qat.generate.sampling import Sampling
from qat.kernels.dispatch import computing_by
from qat.models.language_model import LanguageModel
from qat.nn.step import form_weights
from qat.quant.spec import LutSpec

PACKED = LutSpec(bits=2, group_size=16, scale_bits=8)
RANGE = {"initializer_range": 0.3}


MODELS = {
    "qwen3": lambda: tiny_model("qwen3", **RANGE),
    "llama with biases": lambda: tiny_model("llama", **RANGE, attention_bias=True, mlp_bias=True),
    "packed": lambda: tiny_quantized("qwen3", PACKED, **RANGE),
    "adapters": lambda: tiny_adapted("qwen3", PACKED, **RANGE),
    "rounded inputs": lambda: with_rounded_inputs(
        tiny_quantized("qwen3", PACKED, **RANGE), "int8-static"
    ),
    "another family": lambda: tiny_model("gemma3", **RANGE),
    "keys and values of 4 bits": lambda: with_kv(tiny_model("qwen3", **RANGE), 4),
    "another family of 8 bits": lambda: with_kv(tiny_model("gemma3", **RANGE), 8),
}
LENGTHS = [(1, 9), (5, 3), (30, 12), (2, 1), (17, 20), (40, 8), (3, 5), (5, 3)]
"""Tokens of prompts, and most new tokens."""


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    return [
        Request(torch.randint(1, 320, (length,), generator=generator).tolist(), limit, (7, row))
        for row, (length, limit) in enumerate(LENGTHS)
    ]


def one_by_one(model: PreTrainedModel, sampling: Sampling, ends: set[int]) -> list[list[int]]:
    """Generate each row alone by whole forwards in float64, as the textbook does."""
    said = []
    for request in requests():
        ids, row = request.ids, []
        for u in request.uniforms():
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *row]])).logits[0, -1]
            probs = F.softmax(logits.double() / sampling.temperature, -1)
            order = probs.argsort(descending=True)
            held = probs[order].cumsum(0) - probs[order]
            probs[order[held >= sampling.top_p]] = 0
            sums = probs.cumsum(0)
            row.append(int((sums <= float(u) * sums[-1]).sum()))
            if row[-1] in ends:
                break
        said.append(row)
    return said


@pytest.mark.parametrize(("name", "top_p"), covering(MODELS, [1.0, 0.8]))
def test_rows_are_those_of_whole_forwards(name: str, top_p: float) -> None:
    model = LanguageModel(MODELS[name]())
    form_weights(model.model, torch.float32)
    sampling = Sampling(0.9, top_p)
    plain = one_by_one(model.model, sampling, set())
    ends = {plain[2][4], plain[4][9]}  # which end these rows, and perhaps others
    expected = one_by_one(model.model, sampling, ends)
    assert len(expected[2]) <= 5 and len(expected[4]) <= 10
    sampler = open_sampler(model, Batch(3, 60, 20, sampling, ends))
    assert in_order(sampler.sample(requests())) == expected
    # nothing of a batch is left to the next one
    assert in_order(sampler.sample(requests())) == expected


def test_known_families_have_slots_and_others_their_own_loop() -> None:
    batch = Batch(2, 60, 20, Sampling(1.0), ())
    kinds = {name: open_sampler(LanguageModel(MODELS[name]()), batch) for name in MODELS}
    waves = {name for name, kind in kinds.items() if isinstance(kind, Waves)}
    assert waves == {"another family", "another family of 8 bits"}


@pytest.mark.parametrize("is_kernel", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("bits", [8, 4])
@torch.no_grad()
def test_logits_over_a_packed_cache_are_the_models_own(bits: int, is_kernel: bool) -> None:
    """The float16 logits are as far from float64 as the model's own.

    Their codes differ as often, and a few codes decide how far a row is off, so many rows are
    compared.
    """
    if is_kernel:
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("tests/gpu runs the kernels themselves")

    def student(dtype: torch.dtype) -> LanguageModel:
        heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = tiny_model("qwen3", num_hidden_layers=1, **heads, **RANGE)
        return LanguageModel(with_kv(model.to(dtype), bits))

    rows, worse = (8, 1.5) if is_kernel else (48, 1.2)
    ids, slots = torch.randint(1, 320, (rows, 9)), torch.randperm(rows + 1)[:rows]
    exact = student(torch.float64).model(ids).logits[:, -1]
    eager = student(torch.float16).model(ids).logits[:, -1]
    token, positions = ids.new_zeros(rows + 1), ids.new_zeros(rows + 1)
    token[slots], positions[slots] = ids[:, -1], 8
    with computing_by(kernel=is_kernel):
        step = SlotStep(student(torch.float16), rows + 1)
        caches = step.new_caches(16)
        step.prefill(ids[:, :-1], slots, caches)
        found = step.logits(token, positions, caches)[slots]

    def off(logits: Tensor) -> float:
        return (logits - exact).square().mean().sqrt().item()

    assert off(found) <= worse * off(eager)


def test_rows_of_one_shape_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new shape would be compiled here, as on a TPU."""
    batch = Batch(3, 60, 20, Sampling(1.0, 0.9), {5, 6, 7})
    expected = in_order(open_sampler(LanguageModel(MODELS["qwen3"]()), batch).sample(requests()))
    monkeypatch.setattr(CpuBackend, "is_traced", True)
    monkeypatch.setattr(module, "ROWS_AHEAD", 4)
    sampler = open_sampler(LanguageModel(MODELS["qwen3"]()), batch)
    assert isinstance(sampler, Waves)
    assert in_order(sampler.sample(requests())) == expected


def test_a_wave_is_the_oldest_row_and_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AHEAD", 5)
    sampler = Waves(LanguageModel(MODELS["qwen3"]()), Batch(2, 60, 20, Sampling(1.0), ()))
    monkeypatch.setattr(sampler, "_wave", lambda rows, limit: [[limit]] * len(rows))
    lengths = (1, 2, 1, 1, 2, 1, 3)
    rows = (Request([1] * length, 9, (0, 0)) for length in lengths)
    assert [place for place, _ in sampler.sample(rows)] == [0, 2, 1, 4, 3, 5, 6]


def test_what_is_still_to_come_makes_no_text_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shape for all steps must not give a text of 8 tokens the angles of a long one."""
    batch = Batch(1, 60, 24, Sampling(0.0), ())
    rows = [Request([1, 2, 3, 4, 5, 6], 24, (0, 0))]
    model = tiny_model("llama", **RANGE, **LONGROPE)
    expected = in_order(open_sampler(LanguageModel(model), batch).sample(rows))
    monkeypatch.setattr(CpuBackend, "is_traced", True)
    found = in_order(open_sampler(LanguageModel(model), batch).sample(rows))
    assert found[0][:10] == expected[0][:10] and len(set(found[0])) > 3


def test_the_most_likely_tokens_need_no_numbers() -> None:
    model = LanguageModel(tiny_model("qwen3", **RANGE))
    sampler = open_sampler(model, Batch(4, 60, 20, Sampling(0.0), ()))
    first = in_order(sampler.sample(requests()))
    other = [request._replace(key=(8, 99)) for request in requests()]
    assert in_order(sampler.sample(other)) == first


def test_a_rows_numbers_follow_its_key_alone() -> None:
    request = Request([1], 8, (5, 3))
    numbers = request.uniforms()
    assert numbers.dtype == np.float32 and ((numbers >= 0) & (numbers < 1)).all()
    assert (request._replace(limit=5).uniforms() == numbers[:5]).all()
    for key in ((5, 4), (4, 3), (3, 5), (2**63 - 1, 0)):
        assert not (request._replace(key=key).uniforms() == numbers).any()


@pytest.mark.parametrize("build", [MODELS["qwen3"], MODELS["packed"]])
def test_a_host_that_looks_later_sees_the_same_rows(
    build: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads results one round late, as on a GPU, or after more steps, as in a large batch."""
    batch = Batch(3, 60, 20, Sampling(1.0), {5, 6, 7})
    sampler = open_sampler(LanguageModel(build()), batch)
    expected = in_order(sampler.sample(requests()))
    sampler._lag = 1
    assert in_order(sampler.sample(requests())) == expected
    monkeypatch.setattr(module, "MANY_SLOTS", 3)
    sampler = open_sampler(LanguageModel(build()), batch)
    assert in_order(sampler.sample(requests())) == expected


@pytest.mark.parametrize(("many", "expected"), [(3, 36), (2, 48)])
def test_a_row_that_ends_makes_room(
    many: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots: a long row, and beside it three short ones, which take whole rounds."""
    monkeypatch.setattr(module, "MANY_SLOTS", many)
    model = LanguageModel(tiny_model("qwen3", **RANGE))
    sampler = Slots(SlotStep(model, 2), Batch(2, 64, 40, Sampling(1.0), ()))
    steps, advance = [], sampler._advance
    monkeypatch.setattr(sampler, "_advance", lambda: steps.append(advance()))
    rows = [Request([1, 2], limit, (0, n)) for n, limit in enumerate((33, 9, 9, 9))]
    assert [len(row) for row in in_order(sampler.sample(rows))] == [33, 9, 9, 9]
    assert len(steps) == expected


def test_no_prefill_waits_for_a_plan_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, planned = F.scaled_dot_product_attention, []

    def attend(*args: object, **kwargs: object) -> Tensor:
        planned.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*args, **kwargs)

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", attend)
    step = SlotStep(LanguageModel(tiny_model("qwen3", num_hidden_layers=1)), 2)
    step.prefill(torch.ones(1, 3, dtype=torch.int64), torch.tensor([1]), step.new_caches(8))
    assert planned == [False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_prompts_of_like_lengths_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_TOKENS", 64)
    prompts = [[1] * length for length in (0, 3, 40, 16, 17, 1, 100)]
    found = [(ids.shape, rows.tolist()) for ids, rows in module._filled(prompts)]
    assert found == [((3, 16), [5, 1, 3]), ((1, 32), [4]), ((1, 48), [2]), ((1, 112), [6])]
