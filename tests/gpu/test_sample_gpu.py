"""Sampling of many rows on a GPU: the kernels, then whole batches. Run with `-m gpu`."""

from itertools import product

import pytest
import torch
from covering import covering
from gpu_case import with_kv
from quantized import tiny_quantized
from three_way import assert_no_worse_than_eager
from tiny import tiny_model
from torch import Tensor
from torch.nn import functional as F

from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.student import quantize_at_random_, random_model
from qat.extensions.decode import slots as slots_module
from qat.extensions.decode.kernels.add_norm import add_norm_
from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.draw_next import draw_next
from qat.extensions.decode.kernels.slot_attention import place_heads, slot_attention
from qat.extensions.decode.slots import Batch, Request, SlotStep, Waves, in_order, open_sampler
from qat.generate.sampling import Sampling
from qat.kernels.dispatch import computing_by
from qat.models.language_model import LanguageModel
from qat.nn.step import form_weights
from qat.quant.spec import PRESETS, LutSpec

pytestmark = pytest.mark.gpu

HEADS = [(16, 8, 128), (9, 3, 64), (32, 8, 64), (4, 4, 256), (3, 1, 32)]
"""Query heads, key heads, width."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PACKED = LutSpec(bits=2, group_size=16, scale_bits=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 1000, 1024, 5120])
def test_sum_and_norm(D: int, dtype: torch.dtype) -> None:
    residual, gain = torch.randn(33, D, device="cuda"), torch.rand(D, device="cuda") + 0.5
    delta = torch.randn(33, D, device="cuda").to(dtype)
    total = residual + delta
    exact = F.rms_norm(total.double(), (D,), gain.double(), 1e-6)
    found = add_norm_(residual, delta, gain, 1e-6, dtype)
    assert torch.equal(residual, total)
    eager = F.rms_norm(total, (D,), gain, 1e-6).to(dtype)
    assert_no_worse_than_eager(found, eager, exact, slack=2e-6)


@pytest.mark.parametrize(
    ("heads", "dtype", "has_norms"), covering(HEADS * 2, DTYPES, [False, True])
)
def test_heads_find_their_places(
    heads: tuple[int, int, int], dtype: torch.dtype, has_norms: bool
) -> None:
    (H, J, D), B, N, T = heads, 5, 48, 37
    qkv = torch.randn(T, (H + 2 * J) * D, device="cuda").to(dtype)
    places = torch.randperm(B * N, device="cuda")[:T]
    slots, positions = places // N, places % N
    angle = torch.rand(N, D, device="cuda") * 6
    angles = Angles(angle.cos(), angle.sin())
    gains = tuple(torch.rand(D, device="cuda") + 0.5 for _ in "qk") if has_norms else (None, None)
    found = []
    for is_kernel in (False, True):
        cache = Cache(*(torch.zeros(B, J, N, D, device="cuda", dtype=dtype) for _ in "kv"))
        with computing_by(kernel=is_kernel):
            query = place_heads(qkv, cache, slots, positions, angles, Scoring(1.0, *gains, 1e-6))
        found.append((query, *cache))
    eps = torch.finfo(dtype).eps
    for ours, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=2 * eps, atol=2e-6)
    assert torch.equal(found[1][2], found[0][2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_each_slot_attends_to_what_it_holds(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    (H, J, D), B, N = heads, 7, 300
    query = torch.randn(B, H, D, device="cuda").to(dtype)
    cache = Cache(*(torch.randn(B, J, N, D, device="cuda").to(dtype) for _ in "kv"))
    positions = torch.tensor([0, 1, 63, 64, 127, 200, 299], device="cuda")
    with computing_by(kernel=False):
        eager = slot_attention(query, cache, positions, D**-0.5)
        wide = Cache(*(part.double() for part in cache))
        exact = slot_attention(query.double(), wide, positions, D**-0.5)
    for part in cache:  # what is not in use is never read
        for b, at in enumerate(positions.tolist()):
            part[b, :, at + 1 :] = torch.nan
    found = slot_attention(query, cache, positions, D**-0.5)
    slack = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_no_worse_than_eager(found, eager, exact, slack=slack)


@pytest.mark.parametrize(
    ("case", "dtype"),
    covering(product([*((7, heads) for heads in HEADS), (420, HEADS[0])], [8, 4]), DTYPES),
)
def test_packed_slots_hold_and_say_what_plain_pytorch_does(
    case: tuple[tuple[int, tuple[int, int, int]], int], dtype: torch.dtype
) -> None:
    """Several warps share a head of few slots; of many slots a warp has a head."""
    (B, (H, J, D)), bits = case
    N = 300 if B == 7 else 70
    angle = torch.zeros(N, D, device="cuda")  # no rotation: keys are then equal to the bit
    angles, scoring = Angles(angle.cos(), angle.sin()), Scoring(D**-0.5)
    qkv = torch.randn(B * N, (H + 2 * J) * D, device="cuda").to(dtype)
    query = torch.randn(B, H, D, device="cuda").to(dtype)
    slots = torch.arange(B, device="cuda").repeat_interleave(N)
    places = torch.arange(N, device="cuda").repeat(B)
    ends = torch.tensor([0, 1, 63, 64, 127, 200, 299], device="cuda")
    positions = ends.repeat(B // 7) % N
    found = []
    for is_kernel in (False, True):
        cache = Cache.empty((B, J, N, D), dtype, qkv.device, bits)
        with computing_by(kernel=is_kernel):
            place_heads(qkv, cache, slots, places, angles, scoring)
            said = slot_attention(query, cache, positions, scoring.scaling)
        found.append((said, cache))
    (plain, expected), (ours, cache) = found
    for part, other in zip(cache, expected, strict=True):
        assert torch.equal(part.codes, other.codes) and torch.equal(part.steps, other.steps)
    wide = Cache(*(part.double() for part in cache.at(EVERY, EVERY, EVERY)))
    with computing_by(kernel=False):
        exact = slot_attention(query.double(), wide, positions, scoring.scaling)
    slack = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert_no_worse_than_eager(ours, plain, exact, slack=slack)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (1.5, 0.5), (1, 1e-3)])
@pytest.mark.parametrize("V", [300, 151_936])
def test_draws_are_those_of_a_sort(V: int, temperature: float, top_p: float) -> None:
    logits = 3 * torch.randn(64, V, device="cuda")
    uniforms = torch.rand(64, device="cuda")
    settings = {"temperature": temperature, "top_p": top_p}
    found = draw_next(logits, uniforms, **settings)
    with computing_by(kernel=False):
        plain = draw_next(logits, uniforms, **settings)
    # sums in float32 differ in their last bits, and some number falls between two of them
    assert (found == plain).float().mean() >= 0.9
    probs = (logits.double() / temperature).softmax(-1)
    ordered, order = probs.sort(-1, descending=True)
    held = ordered.cumsum(-1) - ordered
    rank = (order == found[:, None]).int().argmax(-1, keepdim=True)
    assert (held.gather(-1, rank) < top_p + 1e-4).all()


def requests() -> list[Request]:
    lengths = [(1, 40), (5, 3), (90, 33), (2, 1), (17, 20), (60, 8), (3, 64), (5, 3), (33, 16)]
    return [
        Request([(7 * row + 3 * n) % 320 for n in range(length)], limit, (7, row))
        for row, (length, limit) in enumerate(lengths)
    ]


@pytest.mark.parametrize("build", [
    lambda: tiny_model("llama", initializer_range=0.3, attention_bias=True, mlp_bias=True),
    lambda: tiny_quantized("qwen3", PACKED, initializer_range=0.3),
    lambda: with_kv(tiny_quantized("qwen3", PACKED, initializer_range=0.3), 8),
])  # fmt: skip
def test_recorded_slots_say_what_the_models_own_loop_says(build: object) -> None:
    batch = Batch(4, 128, 64, Sampling(1.0, 0.9), {5, 9})
    plain = LanguageModel(build().cuda())
    form_weights(plain.model, torch.float32)
    expected = in_order(Waves(plain, batch).sample(requests()))
    sampler = open_sampler(LanguageModel(build().cuda()), batch)
    assert in_order(sampler.sample(requests())) == expected
    assert in_order(sampler.sample(requests())) == expected


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_same_rows_again_in_bf16(bits: int | None) -> None:
    def model() -> LanguageModel:
        whole = tiny_model("qwen3", initializer_range=0.3, head_dim=64)
        return LanguageModel(with_kv(whole, bits).cuda().bfloat16())

    batch = Batch(4, 128, 64, Sampling(1.0), ())
    sampler = open_sampler(model(), batch)
    first = in_order(sampler.sample(requests()))
    assert [len(row) for row in first] == [request.limit for request in requests()]
    assert in_order(sampler.sample(requests())) == first
    assert in_order(open_sampler(model(), batch).sample(requests())) == first


@pytest.mark.parametrize("bits", [None, 8, 4])
@torch.no_grad()
def test_logits_of_a_whole_model_in_bf16(bits: int | None) -> None:
    """They are no further from float32 than the model's own in bf16."""
    config = MeasureConfig(device="cuda", layers=6)
    whole = with_kv(random_model("qwen3-0.6b", config), bits)
    ids = torch.randint(0, 150_000, (3, 70), device="cuda")
    eager = whole(ids).logits[:, -1].float()
    exact = whole.float()(ids).logits[:, -1]
    step = SlotStep(LanguageModel(whole.bfloat16()), 210)  # so many that a program has many heads
    caches = step.new_caches(96)
    slots = torch.tensor([204, 0, 2], device="cuda")
    step.prefill(ids[:, :-1], slots, caches)
    token, positions = ids.new_zeros(210), ids.new_zeros(210)
    token[slots], positions[slots] = ids[:, -1], 69
    found = step.logits(token, positions, caches)[slots]

    def off(logits: Tensor) -> float:
        return (logits - exact).square().mean().sqrt().item()

    assert off(found) <= 1.1 * off(eager)


@torch.no_grad()
def test_logits_of_few_slots_whose_weights_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no further from float32 than those over formed weights."""

    def logits(dtype: torch.dtype, most: int) -> tuple[Tensor, int]:
        monkeypatch.setattr(slots_module, "MOST_SLOTS", most)
        monkeypatch.setattr(slots_module, "LEAST_WEIGHTS", 1)
        monkeypatch.setattr(slots_module, "WEIGHTS_A_SLOT", 1)
        model = random_model("qwen3-0.6b", MeasureConfig(device="cuda", layers=6))
        quantize_at_random_(model, PRESETS["q2a2"])
        step = SlotStep(LanguageModel(model.to(dtype)), 12)
        caches, token = step.new_caches(32), torch.arange(12, device="cuda")
        for at in range(3):
            found = step.logits(token + at, torch.full_like(token, at), caches)
        return found, step.read_bytes()

    exact, _ = logits(torch.float32, 0)
    formed, whole = logits(torch.bfloat16, 0)
    packed, part = logits(torch.bfloat16, 64)
    assert part < whole

    def off(logits: Tensor) -> float:
        return (logits - exact).square().mean().sqrt().item()

    assert off(packed) <= 1.1 * off(formed)
