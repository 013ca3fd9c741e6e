"""Rotations: orthogonal, without a change of the function, refused where they would change it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from quantized import SPECS, tiny_quantized
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.convert.checkpoint import convert_checkpoint
from qat.convert.config import REPORT_NAME, ConvertConfig
from qat.convert.quantize import ROTATION
from qat.errors import ConfigError
from qat.extensions.rotate.rotate import orthogonal, rotate
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import load_model

pytestmark = pytest.mark.usefixtures("short_fits")

IDS = torch.arange(24).view(2, 12)


class InDouble(TorchFunctionMode):
    """Everything that asks for float32, as norms and softmax do, gets float64."""

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = (kwargs or {}).items()
        named = {k: torch.float64 if v is torch.float32 else v for k, v in named}
        return func(*args, **named)


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """The model with gains and biases that are neither one nor zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and ("norm" in name or "proj" in name):
            parameter.data += torch.rand(parameter.shape, generator=generator) - 0.5
    return model


def test_a_hadamard_matrix_is_orthogonal_and_of_equal_magnitudes() -> None:
    factors = 3, 6, 18, 52, 184  # sizes without one get a random factor
    for n in (1, 4, 12, 20, 36, 64, 80, 288, 576, 896, *factors):
        matrix, other = (orthogonal(n, torch.Generator().manual_seed(seed)) for seed in (1, 2))
        eye = torch.eye(n, dtype=torch.float64)
        torch.testing.assert_close(matrix @ matrix.T, eye, rtol=0, atol=1e-12)
        if n in factors:
            assert not torch.equal(matrix, other)
        else:
            torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, n**-0.5))


# plain; with biases; norms of heads; joined projections; gains of 1 + w, scaled embedding; factors
# in front of the stream; experts; gated values and gated states; states alone
@pytest.mark.parametrize(
    "family",
    [
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "GemmaForCausalLM",
        "GraniteForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "MambaForCausalLM",
    ],
)
def test_the_function_stays(family: str) -> None:
    model = shaken(build(family)).double()
    model.set_experts_implementation("eager")  # grouped products know no float64
    with InDouble(), torch.no_grad():
        before = model(IDS).logits
        done = rotate(LanguageModel(model))
        after = model(IDS).logits
    torch.testing.assert_close(after, before, rtol=0, atol=1e-9 * before.abs().max().item())
    assert done.logits_off < 1e-9
    model = shaken(build(family))
    assert rotate(LanguageModel(model)).logits_off < 1e-5  # float32


def test_values_and_the_stream_are_rotated() -> None:
    model, before = tiny_model("llama"), tiny_model("llama")
    rotate(LanguageModel(model))
    assert model.config.rotation_seed == 0
    for name, weight in model.named_parameters():
        old = before.get_parameter(name) if "lm_head" not in name else before.lm_head.weight
        assert torch.equal(weight, old) == ("norm" in name)
        if "norm" not in name:
            torch.testing.assert_close(weight.norm(), old.norm())  # nothing but turned
    # keys and queries read the rotated stream, and give what they gave
    old, new = (m.model.layers[0].self_attn for m in (before, model))
    tokens, turned = (m.model.embed_tokens(IDS) for m in (before, model))
    torch.testing.assert_close(new.k_proj(turned), old.k_proj(tokens), rtol=1e-4, atol=1e-6)
    assert (new.v_proj(turned) - old.v_proj(tokens)).norm() > old.v_proj(tokens).norm() / 10


def test_a_tied_head_is_untied_unless_the_last_gains_are_equal() -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    model.model.norm.weight.data.fill_(1.5)
    assert rotate(LanguageModel(model)).untied_megabytes == 0
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert model.model.norm.weight.unique().tolist() == [1.5]
    model = shaken(tiny_model("qwen3", tie_word_embeddings=True))
    table = model.lm_head.weight
    assert rotate(LanguageModel(model)).untied_megabytes == table.nbytes / 1e6
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings and not model.all_tied_weights_keys
    assert model.model.norm.weight.unique().tolist() == [1.0]


def test_tables_that_fit_16_bits_do_so_afterwards() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = shaken(tiny_model("qwen3", tie_word_embeddings=True).to(dtype).float())
        rotate(LanguageModel(model))
        for table in (model.lm_head.weight, model.model.embed_tokens.weight):
            assert torch.equal(table.bfloat16().float(), table) == (dtype is torch.bfloat16)


def test_outliers_spread_over_all_channels() -> None:
    model = tiny_model("llama", hidden_size=64)
    model.model.embed_tokens.weight.data[:, 3] *= 50

    def peak() -> float:
        seen = []
        read = model.model.layers[0].self_attn.q_proj
        with read.register_forward_pre_hook(lambda _m, args: seen.append(args[0])):
            model(IDS)
        return (seen[0].abs().amax(-1) / seen[0].square().mean(-1).sqrt()).mean().item()

    assert peak() > 5
    rotate(LanguageModel(model))
    assert peak() < 3


# What `qat convert --rotate` makes.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A float model with a tokenizer, a text, and a plan."""
    model = shaken(tiny_model("qwen3", tie_word_embeddings=True, initializer_range=0.2))
    model.save_pretrained(tmp_path / "float")
    tiny_tokenizer().save_pretrained(tmp_path / "float")
    words = "the cat sat on the mat and the dog saw the cat\n\n" * 200
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    return tmp_path


def convert(place: Path, out: str, source: str = "float", **values: object) -> Path:
    config = ConvertConfig(device="cpu", calibration_length=32, **values)
    convert_checkpoint(str(place / source), config, place / out)
    return place / out


def test_a_rotated_model_is_an_ordinary_directory(place: Path) -> None:
    out = convert(place, "rotated", rotate=True)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    expected = AutoModelForCausalLM.from_pretrained(place / "float")
    assert loaded.config.rotation_seed == 0 and not loaded.config.tie_word_embeddings
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    logits = expected(IDS).logits
    torch.testing.assert_close(loaded(IDS).logits, logits, rtol=0, atol=1e-4)
    rotation = json.loads((out / REPORT_NAME).read_text())["rotation"]
    assert rotation.keys() == {"seed", "logits_off", "rounding", "untied_megabytes"}


def test_a_rotated_model_is_quantized_as_any_other(place: Path) -> None:
    values = {"to": "q2a4", "group_size": 16, "embedding_bits": 8}
    values |= {"calibration": str(place / "text.txt"), "calibration_sequences": 8}
    out = convert(place, "packed", rotate=True, **values)
    report = json.loads((out / REPORT_NAME).read_text())
    assert report["num_tables"] == 2 and report["rotation"]["untied_megabytes"] > 0
    # in two steps it is the same to the bit
    rotated = load_model(str(convert(place, "rotated", rotate=True)), device="cpu")
    convert(place, "again", "rotated", **values)
    one, two = load_checkpoint(out), load_checkpoint(place / "again")
    assert torch.equal(one(IDS).logits, two(IDS).logits)
    assert (one(IDS).logits - rotated.model(IDS).logits).abs().max() > 0


@pytest.mark.slow
def test_a_base_is_rotated_as_the_model_is(place: Path) -> None:
    convert(place, "four", rotate=True, to="q4a4", group_size=16)
    again = {"source": "four", "to": "q2a2", "group_size": 16, "embedding_bits": 8}
    with pytest.raises(ConfigError, match="rotation_seed is None, the model's 0"):
        convert(place, "two", base=str(place / "float"), **again)
    convert(place, "rotated", rotate=True)
    convert(place, "two", base=str(place / "rotated"), **again)
    convert(place, "expected", "rotated", to="q2a2", group_size=16, embedding_bits=8)
    one, two = load_checkpoint(place / "two"), load_checkpoint(place / "expected")
    assert torch.equal(one(IDS).logits, two(IDS).logits)


def test_what_cannot_be_rotated_is_refused_in_a_line(place: Path) -> None:
    with pytest.raises(ConfigError, match="base=float is given with rotate"):
        convert(place, "out", rotate=True, base="float")
    convert(place, "rotated", rotate=True)
    with pytest.raises(ConfigError, match="says that the model is rotated already"):
        convert(place, "out", "rotated", rotate=True)
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut4"]), tiny_tokenizer(), place / "packed")
    with pytest.raises(ConfigError, match="layers.0.*quantized already"):
        convert(place, "out", "packed", rotate=True)
    assert not (place / "out").exists()


def test_other_architectures_are_refused_by_name() -> None:
    for family, said in (
        ("GPT2LMHeadModel", "no weight of GPT2LMHeadModel reads its residual stream"),
        ("Olmo2ForCausalLM", "Olmo2ForCausalLM is another function once"),
        ("Gemma3ForCausalLM", "Gemma3ForCausalLM is another function once"),
        ("CohereForCausalLM", "CohereForCausalLM is another function once"),
        ("InternVLForConditionalGeneration", "InternVLForConditionalGeneration also reads"),
    ):
        model = shaken(build(family))
        with pytest.raises(ConfigError, match=f"^rotate: {said}"):
            rotate(LanguageModel(model))
        assert getattr(model.config, ROTATION, None) is None


def test_a_weight_that_is_forgotten_is_noticed() -> None:
    class Adds(nn.Module):
        """Adds to the stream what nobody rotates."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.more = inner, nn.Parameter(torch.full((32,), 1e-4))

        def forward(self, *args: object, **named: object) -> Tensor:
            return self.inner(*args, **named) + self.more

    model = tiny_model("llama")
    model.model.layers[1].mlp = Adds(model.model.layers[1].mlp)
    with pytest.raises(ConfigError, match="another function"):
        rotate(LanguageModel(model))
