"""Decoding by the static-cache step says what the model's own loop says."""

import pytest
import torch
from quantized import random_weight, tiny_adapted, tiny_quantized, with_kv, with_rounded_inputs
from three_way import assert_no_worse_than_eager
from tiny import tiny_model, tiny_tokenizer
from torch.nn import functional as F
from transformers import PreTrainedModel

from qat.backend.device import seeded
from qat.extensions.decode.decoder import Decoder
from qat.extensions.decode.kernels.lut_rows import SPLIT
from qat.extensions.decode.step import DecodeStep, read_bytes
from qat.generate.sampling import Sampling
from qat.generate.text import Generated, generate_text
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import FrozenLutLinear
from qat.nn.swap import CACHE, put_quantized, replace_module, table_names, weight_shape
from qat.quant.kv import PackedHeads, dequantize_heads, fake_quantize_heads
from qat.quant.spec import ACTIVATION_KINDS, KvSpec, LutSpec

PACKED = LutSpec(bits=2, group_size=16, scale_bits=8)
GREEDY = Sampling(0.0)
RANGE = {"initializer_range": 0.3}


def mixed() -> PreTrainedModel:
    """Bits that differ from one projection to the next, tables of 4 bits, one unreadable linear."""
    model = tiny_quantized("qwen3", PACKED, **RANGE, tie_word_embeddings=True)
    four, low_rank = LutSpec(bits=4, group_size=16), LutSpec(bits=2, scale="low_rank", rank=2)
    for name, spec in (
        ("model.layers.0.self_attn.k_proj", four),
        ("model.layers.0.mlp.up_proj", four),
        ("model.layers.1.self_attn.v_proj", low_rank),
        ("model.layers.1.mlp.down_proj", low_rank),
    ):
        old = model.get_submodule(name)
        weight = random_weight(old.out_features, old.in_features, spec)
        replace_module(model, name, FrozenLutLinear(weight, None, spec).eval())
    for name in table_names(model):
        put_quantized(model, name, random_weight(320, 32, four), four)
    return model


def of_vectors() -> PreTrainedModel:
    """Codewords in linears and tables, beside levels that are read packed."""
    pairs = LutSpec(bits=6, vector_size=2, group_size=16)
    model = tiny_quantized("qwen3", LutSpec(bits=8, vector_size=4, group_size=16), **RANGE)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"):
        shape = weight_shape(model.get_submodule(name))
        put_quantized(model, name, random_weight(*shape, PACKED), PACKED)
    for name in table_names(model):
        put_quantized(model, name, random_weight(320, 32, pairs), pairs)
    return model


def packed(architecture: str) -> PreTrainedModel:
    return tiny_quantized(architecture, PACKED, **RANGE)


MODELS = {
    "float": lambda: tiny_model("qwen3", **RANGE),
    "llama with biases": lambda: tiny_model("llama", **RANGE, attention_bias=True, mlp_bias=True),
    "packed": lambda: packed("qwen3"),
    "packed, biases": lambda: tiny_quantized("llama", PACKED, **RANGE, attention_bias=True),
    "adapters": lambda: tiny_adapted("qwen3", PACKED, **RANGE),
    "mixed": mixed,
    "vectors": of_vectors,
    **{f"inputs {k}": lambda k=k: with_rounded_inputs(mixed(), k) for k in ACTIVATION_KINDS},
    "keys and values of 8 bits": lambda: with_kv(packed("qwen3"), 8),
    "keys and values of 4 bits": lambda: with_kv(packed("llama"), 4),
}


def most_likely(model: LanguageModel, ids: torch.Tensor, count: int) -> list[list[int]]:
    """The most likely tokens by whole forwards."""
    told = ids
    for _ in range(count):
        with torch.no_grad():
            following = model.model(told).logits[:, -1].argmax(-1, keepdim=True)
        told = torch.cat([told, following], 1)
    return told[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_greedy_equals_whole_forwards(build: object) -> None:
    model = LanguageModel(build())
    ids = torch.randint(320, (2, 5))
    expected = most_likely(model, ids, 12)
    assert DecodeStep.fits(model)
    assert Decoder(model).generate(ids, GREEDY, max_new_tokens=12) == expected


def test_logits_equal_the_models() -> None:
    model = LanguageModel(mixed())
    ids = torch.randint(320, (1, 20))
    with torch.no_grad():
        expected = model.model(ids).logits[0, -1]
    step = DecodeStep(model)
    first, caches = step.prefill(ids[:, :19], 64)
    assert first.shape == (1, 320)
    found = step.logits(ids[:, 19], torch.tensor([19]), caches, step.angles(64))
    assert torch.allclose(found[0], expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_cache_holds_what_the_model_attends_to(bits: int) -> None:
    model, ids = LanguageModel(with_kv(packed("qwen3"), bits)), torch.randint(320, (2, 20))
    with torch.no_grad():
        kept = model.model(ids)[CACHE].layers
    step = DecodeStep(model)
    _, caches = step.prefill(ids, 64)
    for cache, layer in zip(caches, kept, strict=True):
        for part, heads in zip(cache, (layer.keys, layer.values), strict=True):
            assert isinstance(part, PackedHeads)
            expected = fake_quantize_heads(heads, bits)
            assert torch.equal(dequantize_heads(part)[:, :, :20], expected)
            assert part.nbytes == 2 * 64 * KvSpec(bits=bits).head_bytes(32)


def test_text_stream_and_end_are_those_of_the_plain_loop() -> None:
    tokenizer = tiny_tokenizer()

    def said(generator: LanguageModel | Decoder) -> tuple[Generated, str]:
        pieces: list[str] = []
        settings = {"temperature": 0.0, "max_new_tokens": 21, "stream": pieces.append}
        found = generate_text(generator, tokenizer, "the cat", **settings)
        return found, "".join(pieces)

    for end in (0, None):
        model = LanguageModel(tiny_model("qwen3", **RANGE))
        if end is None:  # a token that it does say
            plain, _ = said(model)
            model.model.generation_config.eos_token_id = tokenizer(plain.text)["input_ids"][9]
        expected = said(model)
        assert said(Decoder(model)) == expected


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(4000, 1)

    def shares(sampling: Sampling) -> torch.Tensor:
        with seeded(0):
            return sampling.draw(logits).bincount(minlength=4) / 4000

    assert torch.allclose(shares(Sampling(1.0)), F.softmax(logits[0], -1), atol=0.03)
    assert torch.allclose(shares(Sampling(2.0)), F.softmax(logits[0] / 2, -1), atol=0.03)
    kept = shares(Sampling(1.0, top_p=0.8))  # 0.64 + 0.24 hold it
    assert kept[2:].sum() == 0
    assert kept[1] > 0
    assert shares(Sampling(1.0, top_p=0.01))[0] == 1
    assert torch.equal(shares(Sampling(1.0)), shares(Sampling(1.0)))


def test_no_weight_lies_in_memory_twice() -> None:
    model = LanguageModel(tiny_quantized("qwen3", PACKED))
    linears = [m for m in model.model.modules() if isinstance(m, FrozenLutLinear)]
    expected = sum(linear.packed.nbytes + linear.scales.numel() for linear in linears)
    step = DecodeStep(model)
    head = model.head.weight.nbytes
    assert read_bytes(step) == expected + head
    attention = model.model.model.layers[0].self_attn
    (rows,) = step.blocks[0].qkv.rows
    assert attention.k_proj.rows.octets.data_ptr() == rows.octets[64].data_ptr()


def test_families_that_are_not_known() -> None:
    assert not DecodeStep.fits(LanguageModel(tiny_model("gemma3")))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert not DecodeStep.fits(LanguageModel(tiny_model("qwen3", **windows)))
    assert not Decoder.fits(LanguageModel(tiny_model("qwen3"))) or torch.cuda.is_available()


def test_too_many_prompts() -> None:
    decoder = Decoder(LanguageModel(tiny_model("qwen3")))
    with pytest.raises(ValueError, match="9 prompts at once, expected at most 8"):
        decoder.generate(torch.ones(9, 2, dtype=torch.int64), GREEDY, max_new_tokens=2)


@pytest.mark.parametrize("bits", [2, 4])
def test_split_inputs_in_bfloat16_are_as_near_as_the_model(bits: int) -> None:
    spec = LutSpec(bits=bits, group_size=16, scale_bits=8)
    sizes = {"hidden_size": 64, "intermediate_size": 128, **RANGE}
    model = LanguageModel(tiny_quantized("qwen3", spec, **sizes))
    ids = torch.randint(320, (2, 33))
    with torch.no_grad():
        exact = model.model(ids).logits[:, -1]
        model.model.bfloat16()
        eager = model.model(ids).logits[:, -1].float()
    step = DecodeStep(model)
    assert step.blocks[0].qkv.order == step.blocks[1].down.order == SPLIT
    _, caches = step.prefill(ids[:, :32], 64)
    found = step.logits(ids[:, 32], torch.tensor([32]), caches, step.angles(64))
    slack = 0.01 * exact.abs().max().item()  # the prompt's keys and values are the model's own
    assert_no_worse_than_eager(found, eager, exact.double(), slack)


@pytest.mark.parametrize(("top_p", "count"), [(0.25, 1), (0.5, 2), (0.51, 3), (1.0, 4)])
def test_words_are_drawn_from_the_fewest_that_hold_the_mass(top_p: float, count: int) -> None:
    """Four words of a quarter each, whose sums are exact."""
    logits = torch.zeros(500, 6)
    logits[:, 4:] = -torch.inf
    assert len(set(Sampling(1.0, top_p).draw(logits).tolist())) == count
