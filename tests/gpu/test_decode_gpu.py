"""Generation by recorded steps on a GPU: the kernels, then whole texts. Run with `-m gpu`."""

import pytest
import torch
from covering import covering
from gpu_case import needs_hopper, recorded, with_kv
from lut_matvec_case import SPECS, rows_of
from quantized import tiny_quantized
from three_way import assert_no_worse_than_eager
from tiny import tiny_model
from torch import Tensor
from torch.nn import functional as F

from qat.backend.device import on, seeded
from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.draft import Drafted
from qat.extensions.decode.kernels.cache import EVERY, Angles, Cache, Scoring
from qat.extensions.decode.kernels.decode_attention import decode_attention
from qat.extensions.decode.kernels.launch import one_after_the_other
from qat.extensions.decode.kernels.lut_matvec import Norm, matvec, matvec_add, stream
from qat.extensions.decode.kernels.lut_rows import SPLIT, gathered, order_of, spread, stack
from qat.extensions.decode.kernels.lut_sums import SumsTile
from qat.extensions.decode.rewind import rewindable
from qat.extensions.decode.step import DecodeStep
from qat.generate.sampling import Sampling
from qat.kernels.tuned import forcing
from qat.models.language_model import LanguageModel
from qat.quant.kv import quantize_heads
from qat.quant.spec import LutSpec

pytestmark = pytest.mark.gpu

SHAPES = [(37, 192), (333, 2592), (6144, 2688), (2560, 9792)]
PACKED = LutSpec(bits=2, group_size=16, scale_bits=8)
FOURS = {
    f"fours8_g{size}_s8": LutSpec(bits=8, vector_size=4, group_size=size, scale_bits=8)
    for size in (16, 64)
}


MODELS = {
    "float": lambda: tiny_model("llama", initializer_range=0.3, attention_bias=True),
    "packed": lambda: tiny_quantized("qwen3", PACKED, initializer_range=0.3),
    "4 bits": lambda: tiny_quantized(
        "qwen3", LutSpec(bits=4, group_size=16), initializer_range=0.3
    ),
    "vectors": lambda: tiny_quantized(
        "qwen3", LutSpec(bits=8, vector_size=4, group_size=16), initializer_range=0.3
    ),
    "keys and values of 4 bits": lambda: with_kv(
        tiny_quantized("qwen3", PACKED, initializer_range=0.3), 4
    ),
    "keys and values of 8 bits": lambda: with_kv(tiny_model("llama", initializer_range=0.3), 8),
}


@pytest.mark.parametrize(("name", "shape"), covering(SPECS, SHAPES))
def test_packed_errs_no_more_than_the_formed_weight(name: str, shape: tuple[int, int]) -> None:
    spec, (O, I) = SPECS[name], shape
    bias = torch.randn(O)
    for B in (1, 3, 8):
        for is_short in (False, True):
            rows, W = rows_of(spec, O, I, device="cuda", is_short=is_short)
            x = torch.randn(B, I).bfloat16()
            exact = F.linear(x.double(), W, bias.double())
            dtype = torch.bfloat16 if is_short else torch.float32
            eager = F.linear(x.to(dtype), W.to(dtype), bias.to(dtype))
            found = matvec(spread(x.cuda(), order_of(rows)), rows, bias=bias.cuda())
            slack = 2e-6 * exact.abs().max().item()
            assert_no_worse_than_eager(found.cpu(), eager, exact, slack)


@pytest.mark.parametrize("kind", ["lut2_s8", "lut4_s8", "fours8_s8", "dense"])
@pytest.mark.parametrize("B", [1, 4])
def test_a_layer_of_linears(kind: str, B: int) -> None:
    D, width = 2624, 960
    if kind == "dense":
        pairs = [(torch.randn(O, I) * 0.1,) * 2 for O, I in ((width, D), (width, D), (D, width))]
        members = [(rows.cuda(), W.double()) for rows, W in pairs]
    else:
        shapes = ((width, D), (width, D), (D, width))
        members = [rows_of(SPECS[kind], *shape, device="cuda", is_short=True) for shape in shapes]
    (gate, W_gate), (up, W_up), (down, W_down) = members
    residual, gamma, after = torch.randn(B, D), torch.rand(D) + 0.5, torch.rand(D)
    gate_up = stack([gate, up])
    before = stream(residual.cuda(), gamma.cuda(), order_of(gate_up))
    inside = matvec(
        before.scaled, gate_up, norm=Norm(before.squares, 1e-5), is_gated=True, order=order_of(down)
    )
    found = matvec_add(inside, down, before.residual, after.cuda(), order=16)

    def expected(dtype: torch.dtype) -> Tensor:
        x = residual.to(dtype)
        normed = F.rms_norm(x, (D,), gamma.to(dtype), 1e-5)
        units = F.silu(normed @ W_gate.to(dtype).T) * (normed @ W_up.to(dtype).T)
        return x + units @ W_down.to(dtype).T

    exact = expected(torch.float64)
    assert_no_worse_than_eager(found.residual.cpu(), expected(torch.bfloat16), exact)
    scaled = gathered(found.scaled, 16)
    assert torch.allclose(scaled, found.residual * after.cuda())
    squares = found.residual.square().sum(1)
    assert torch.allclose(found.squares.sum(1), squares, rtol=1e-4)


def wanted(
    W: Tensor, residual: Tensor, gamma: Tensor, bias: Tensor, *, is_gated: bool
) -> tuple[Tensor, Tensor]:
    """Return the outputs after a norm, by eager PyTorch in float32 and in float64."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x = F.rms_norm(residual.to(dtype), residual.shape[1:], gamma.to(dtype), 1e-5)
        y = F.linear(x, W.to(dtype), bias.to(dtype))
        gate, up = y.chunk(2, 1)
        found.append(F.silu(gate) * up if is_gated else y)
    return tuple(found)


def check(found: Tensor, eager: Tensor, exact: Tensor, slack: float = 2e-6) -> None:
    """Check a product whose levels and codewords are float32, so that none is rounded."""
    slack *= exact.abs().max().item()
    assert_no_worse_than_eager(found.cpu(), eager.cpu(), exact.cpu(), slack)


SUMS = [
    SumsTile(512, 1, 8),
    SumsTile(512, 4, 8, ahead=4),
    SumsTile(512, 3, 4),
    SumsTile(256, 1, 8),
    SumsTile(256, 4, 8),
    SumsTile(256, 3, 4, ahead=3),
]


def kernel_of(spec: LutSpec) -> str:
    """Tiles of levels and those of codewords are chosen apart."""
    return "vectors_sums" if spec.vector_size > 1 else "lut_sums"


@needs_hopper
@pytest.mark.parametrize("sizes", [(48, 16, 37), (1040, 256, 333), (2624,)])
@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        *(("lut2_s8", tile) for tile in SUMS),
        *((kind, tile) for kind in ("lut2_g48", "ternary") for tile in SUMS[::3]),
        *((kind, tile) for kind in FOURS for tile in SUMS),
        ("fours8_s8", SUMS[0]),
    ],
    ids=str,
)
def test_sums_of_a_decoding_step(kind: str, sizes: tuple[int, ...], tile: SumsTile) -> None:
    I, O = 2112, sum(sizes)
    spec = (SPECS | FOURS)[kind]
    pairs = [rows_of(spec, size, I, device="cuda", is_short=True) for size in sizes]
    rows, W = stack([rows for rows, _ in pairs]), torch.cat([W for _, W in pairs]).cuda()
    gamma, bias = torch.rand(I, device="cuda") + 0.5, torch.randn(O, device="cuda")
    gain = torch.rand(O, device="cuda") + 0.5
    with forcing(kernel_of(spec), (O, I, 2), tile):
        for _ in range(3):  # programs count how many of them are done, and begin anew
            residual, old = torch.randn(1, I, device="cuda"), torch.randn(1, O, device="cuda")
            before = stream(residual, gamma, SPLIT)
            norm = Norm(before.squares, 1e-5)
            found = matvec(before.scaled, rows, norm=norm, bias=bias)
            check(found, *wanted(W, residual, gamma, bias, is_gated=False))
            if len(sizes) == 1:
                found = matvec(before.scaled, rows, norm=norm, bias=bias, is_gated=True)
                check(found, *wanted(W, residual, gamma, bias, is_gated=True))
            order = SPLIT if O % 16 == 0 else 1
            after = matvec_add(before.scaled, rows, old, gain, bias=bias, order=order)
            x = residual * gamma
            exact = old.double() + F.linear(x.double(), W, bias.double())
            check(after.residual, old + F.linear(x, W.float(), bias), exact)
            scaled = after.residual * gain
            assert torch.allclose(gathered(after.scaled, order), scaled, rtol=1e-5, atol=1e-5)
            squares = after.residual.square().sum(1)
            assert torch.allclose(after.squares.sum(1), squares, rtol=1e-4)


@needs_hopper
@pytest.mark.parametrize("tile", SUMS, ids=str)
@pytest.mark.parametrize("kind", ["lut2_s8", *FOURS])
def test_sums_of_two_layers_in_a_recorded_graph(kind: str, tile: SumsTile) -> None:
    D, width, spec = 1088, 2048, (SPECS | FOURS)[kind]
    shapes = ((width, D), (width, D), (D, width))
    layers = []
    for _ in range(2):
        pairs = [rows_of(spec, *shape, device="cuda", is_short=True) for shape in shapes]
        gate, up, down = (rows for rows, _ in pairs)
        layers.append((stack([gate, up]), down, [W.cuda() for _, W in pairs]))
    gamma = torch.rand(D, device="cuda") + 0.5
    residual = torch.zeros(1, D, device="cuda")

    def step() -> Tensor:
        flow = stream(residual, gamma, SPLIT)
        for gate_up, down, _ in layers:
            norm = Norm(flow.squares, 1e-5)
            inside = matvec(flow.scaled, gate_up, norm=norm, is_gated=True, order=SPLIT)
            flow = matvec_add(inside, down, flow.residual, gamma, order=SPLIT)
        return flow.residual

    def expected(dtype: torch.dtype) -> Tensor:
        x = residual.to(dtype)
        for _, _, weights in layers:
            gate, up, down = (W.to(dtype) for W in weights)
            normed = F.rms_norm(x, (D,), gamma.to(dtype), 1e-5)
            x = x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T
        return x

    keys = ((2 * width, D, 2), (D, width, 2))
    with forcing(kernel_of(spec), keys[0], tile), forcing(kernel_of(spec), keys[1], tile):
        graph, found = recorded(step)
        for _ in range(20):
            residual.copy_(torch.randn(1, D))
            graph.replay()
            with one_after_the_other():
                assert torch.equal(found, step())
            check(found, expected(torch.float32), expected(torch.float64), slack=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_have_the_same_codes_however_a_device_divides(dtype: torch.dtype, bits: int) -> None:
    """Some of many short numbers lie exactly between two codes, or end a scale's range."""
    x = torch.randn(64, 8, 96, 64).to(dtype)
    expected = quantize_heads(x, bits)
    for quantize in (quantize_heads, torch.compile(quantize_heads)):
        found = quantize(x.cuda(), bits)
        assert torch.equal(found.codes.cpu(), expected.codes)
        assert torch.equal(found.steps.cpu(), expected.steps)


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 64), (4, 4, 32)])
@pytest.mark.parametrize("at", [0, 1, 63, 700, 1023])
def test_attention_of_one_position(heads: tuple[int, int, int], at: int) -> None:
    (H, J, D), B, N = heads, 2, 1024
    qkv = torch.randn(B, (H + 2 * J) * D)
    angle = torch.rand(N, D) * 6
    angles = Angles(angle.cos(), angle.sin())
    kind = Scoring(D**-0.5, torch.rand(D) + 0.5, torch.rand(D) + 0.5, eps=1e-6)
    cache = Cache(torch.randn(B, J, N, D).bfloat16(), torch.randn(B, J, N, D).bfloat16())
    copy = Cache(*(t.cuda() for t in cache))
    found = decode_attention(
        qkv.cuda(),
        copy,
        torch.tensor([at], device="cuda"),
        Angles(*(t.cuda() for t in angles)),
        Scoring(kind.scaling, kind.q_norm.cuda(), kind.k_norm.cuda(), kind.eps),
        order=16,
    )
    expected = decode_attention(qkv, cache, torch.tensor([at]), angles, kind, order=16)
    assert torch.allclose(found.cpu(), expected, atol=2e-3)
    assert torch.allclose(copy.keys.cpu().float(), cache.keys.float(), atol=2e-2)
    assert torch.equal(copy.values.cpu(), cache.values)


@pytest.mark.parametrize(
    ("at", "heads", "dtype", "bits"),
    covering(
        [0, 1, 63, 700, 1023] * 3,
        [(32, 8, 128), (16, 8, 64), (4, 4, 32)],
        [torch.bfloat16, torch.float16, torch.float32],
        [8, 4],
    ),
)
def test_attention_of_one_position_over_a_packed_cache(
    heads: tuple[int, int, int], at: int, bits: int, dtype: torch.dtype
) -> None:
    (H, J, D), B, N = heads, 2, 1024
    qkv = torch.randn(B, (H + 2 * J) * D).to(dtype).float()
    angle = torch.zeros(N, D)  # no rotation and no norm: keys are then equal to the bit
    angles, kind = Angles(angle.cos(), angle.sin()), Scoring(D**-0.5)
    told = torch.randn(2, B, J, N, D).to(dtype)
    caches = [Cache.empty((B, J, N, D), dtype, torch.device(d), bits) for d in ("cpu", "cuda")]
    for cache in caches:
        cache.put(*told.to(cache.keys.codes.device), EVERY, EVERY, EVERY)
    found, expected = (
        decode_attention(
            qkv.to(device),
            cache,
            torch.tensor([at], device=device),
            Angles(*(t.to(device) for t in angles)),
            kind,
            order=16,
        )
        for device, cache in zip(("cuda", "cpu"), caches[::-1], strict=True)
    )
    assert torch.allclose(found.cpu(), expected, atol=1e-4)
    for ours, plain in zip(caches[1], caches[0], strict=True):
        assert torch.equal(ours.codes.cpu(), plain.codes)
        assert torch.equal(ours.steps.cpu(), plain.steps)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_greedy_equals_whole_forwards(build: object) -> None:
    model = LanguageModel(build().cuda())
    ids = torch.randint(320, (2, 11), device="cuda")
    told = ids
    for _ in range(40):
        with torch.no_grad():
            following = model.model(told).logits[:, -1].argmax(-1, keepdim=True)
        told = torch.cat([told, following], 1)
    said = Decoder(model).generate(ids, Sampling(0.0), max_new_tokens=40)
    assert said == told[:, 11:].tolist()


@pytest.mark.parametrize("spec", [PACKED, *FOURS.values()], ids=["levels", *FOURS])
def test_bfloat16_logits_are_as_near_as_the_models(spec: LutSpec) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # which tensor cores read
    model = LanguageModel(tiny_quantized("qwen3", spec, initializer_range=0.3, **sizes).cuda())
    ids = torch.randint(320, (1, 33), device="cuda")
    with torch.no_grad():
        exact = model.model(ids).logits[:, -1]
        model.model.bfloat16()
        eager = model.model(ids).logits[:, -1]
    step = DecodeStep(model)
    _, caches = step.prefill(ids[:, :32], 256)
    place = torch.tensor([32], device="cuda")
    found = step.logits(ids[:, 32], place, caches, step.angles(256))
    slack = 0.01 * exact.abs().max().item()
    assert_no_worse_than_eager(found, eager, exact.double(), slack)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_drafted_tokens_are_those_of_the_teacher_alone(build: object) -> None:
    """Rounds are recorded, and both models read several tokens of one sequence at once."""
    ids = torch.randint(320, (1, 5))
    teacher = Decoder(LanguageModel(build().cuda()))
    expected = teacher.generate(ids, Sampling(0.0), max_new_tokens=40)
    other = tiny_model("qwen3", seed=1, initializer_range=0.3)
    for student in (build(), other):
        drafted = Drafted(
            rewindable(teacher), rewindable(Decoder(LanguageModel(student.cuda()))), 4
        )
        assert drafted.generate(ids, Sampling(0.0), max_new_tokens=40) == expected
        assert 1 <= drafted.accepted_length <= 5


def test_recorded_draws_follow_the_seed() -> None:
    decoder = Decoder(LanguageModel(tiny_model("qwen3").cuda()))
    ids = torch.tensor([[1, 2, 3]])

    def said(seed: int) -> list[list[int]]:
        with seeded(seed):
            return decoder.generate(ids, Sampling(1.0, 0.9), max_new_tokens=30)

    first = said(1)
    assert first == said(1) != said(2)
    assert len(set(first[0])) > 10  # a replay that drew the same each time would repeat itself


def test_a_recording_is_over_before_its_first_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    x, empty_cache = torch.zeros(1, device="cuda"), torch.cuda.empty_cache

    def and_keep_busy() -> None:  # the last that PyTorch calls before it turns to that stream
        empty_cache()
        with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
            torch.cuda._sleep(10**9)

    monkeypatch.setattr(torch.cuda, "empty_cache", and_keep_busy)
    replay, _ = on(x.device).record(lambda: x.add_(1))
    assert torch.cuda.graph.default_capture_stream.query()
    replay()
    assert x.item() == 1
