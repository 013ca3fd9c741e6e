"""Inputs that a conversion quantizes: which, with which scales, and what is refused."""

from pathlib import Path

import pytest
import torch
from cache_case import texts
from families import build
from tiny import save_tiny, tiny_model

from qat.convert.activations import (
    MOST_OF_MEDIAN,
    Magnitudes,
    inputs_of,
    level_products,
    put_activations,
)
from qat.convert.calibrate import TokenBatch
from qat.convert.checkpoint import PLAN_NAME, convert_checkpoint
from qat.convert.config import ConvertConfig, read_plan
from qat.convert.convert import check_conversion, convert_model
from qat.convert.quantize import quantize_model
from qat.errors import ConfigError
from qat.export.targets import check_model, ships_to
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.stored_state import activation_counts, quantized_modules
from qat.nn.latent import add_adapters
from qat.nn.quant_linear import quant_linears
from qat.quant.activation import LEVELS, quantize_static
from qat.quant.spec import SUFFIX_OF, ActivationSpec, preset_called

pytestmark = pytest.mark.usefixtures("short_fits")

IDS = torch.arange(64).view(2, 32) * 7 % 320
BATCHES = [TokenBatch(IDS, torch.arange(32).expand_as(IDS))]

KINDS = [(0, "int8-static"), (1, "int8")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("activations")
    save_tiny(place / "float", initializer_range=0.2)
    (place / "text.txt").write_text("\n\n".join(texts(30)), encoding="utf-8")
    return place


def config(**values: object) -> ConvertConfig:
    return ConvertConfig(**{"device": "cpu", "calibration_length": 32, "to": "q2a4", **values})


def test_a_preset_and_a_flag_say_the_same() -> None:
    for kind, suffix in SUFFIX_OF.items():
        plan = read_plan(config(activations=kind))
        assert plan == preset_called(f"q2a4_{suffix}") and plan.name == f"q2a4_{suffix}"
        assert plan.activations == {ActivationSpec(kind=kind)}
        assert preset_called(f"q4a4_r32_{suffix}").activations == plan.activations
        with pytest.raises(ConfigError, match="says .* already; name them once"):
            read_plan(config(to=f"q2a4_{suffix}", activations="int8"))
        assert preset_called("q2a4").activations == {None}
        assert preset_called(f"q9_{suffix}") is None and preset_called("q2a4_a9") is None


def test_every_quantized_linear_and_the_head_get_it(place: Path, tmp_path: Path) -> None:
    settings = config(to="q2a4_a8", embedding_bits=4, group_size=16)
    report = convert_checkpoint(str(place / "float"), settings, tmp_path / "out")
    assert report.activations == {"int8": 15} and report.modules[1].activation == "int8"
    model = load_checkpoint(tmp_path / "out")
    modules = quantized_modules(model)
    kinds = {name: m.activation and m.activation.spec.kind for name, m in modules.items()}
    assert kinds.pop("model.embed_tokens") is None and report.modules[0].activation is None
    assert set(kinds.values()) == {"int8"} and "lm_head" in kinds


def test_static_scales_are_found_on_the_text_and_shared(place: Path, tmp_path: Path) -> None:
    settings = config(to="q4a4_a8s", calibration=str(place / "text.txt"), calibration_sequences=8)
    convert_checkpoint(str(place / "float"), settings, tmp_path / "out")
    model = load_checkpoint(tmp_path / "out")
    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.activation is layer.self_attn.v_proj.activation
    assert layer.mlp.gate_proj.activation is layer.mlp.up_proj.activation
    assert layer.mlp.down_proj.activation is not layer.mlp.up_proj.activation
    assert len({linear.activation for linear in quant_linears(model).values()}) == 8
    scales = [linear.activation.scale.item() for linear in quant_linears(model).values()]
    assert min(scales) > 0
    # what is there is kept, and other kinds of input take its place
    again = convert_checkpoint(str(tmp_path / "out"), settings, tmp_path / "again")
    kept = load_checkpoint(tmp_path / "again")
    assert again.kept == 14 + 2  # the tables too
    assert scales == [linear.activation.scale.item() for linear in quant_linears(kept).values()]
    plain = convert_checkpoint(str(tmp_path / "out"), config(to="q4a4"), tmp_path / "plain")
    assert plain.kept == 14 + 2 and plain.activations == {}


def test_the_best_scale_errs_least_among_many() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 8)
    x[0, :4] *= 30
    seen = Magnitudes()
    seen.add(x[:100])
    seen.add(x[100:])
    found = seen.best_scale()

    def error(scale: torch.Tensor, sizes: torch.Tensor) -> float:
        return ((quantize_static(x, scale) - x).square() / sizes).mean().item()

    sizes = x.norm(dim=-1, keepdim=True)
    tried = [x.abs().max() / LEVELS * share for share in torch.linspace(0.02, 1, 200)]
    assert error(found, sizes) <= min(error(scale, sizes) for scale in tried) * 1.02
    # a token counts by its own size: the one that is larger has less to say
    plain = min(tried, key=lambda scale: error(scale, torch.ones(())))
    assert found < plain * 0.9


def test_large_channels_are_levelled_without_a_changed_bit() -> None:
    student = LanguageModel(tiny_model(initializer_range=0.2))
    mlp = student.model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[3] *= 100
        mlp.up_proj.bias = torch.nn.Parameter(torch.ones(mlp.up_proj.out_features))
        before, old = student.hidden(*BATCHES[0]), mlp.down_proj.weight.clone()
        wished = {f"model.layers.{n}.mlp.down_proj": ActivationSpec(kind=k) for n, k in KINDS}
        assert level_products(student, wished, BATCHES) > 0
        read: list[torch.Tensor] = []
        with mlp.down_proj.register_forward_pre_hook(lambda _m, args: read.append(args[0])):
            assert torch.equal(student.hidden(*BATCHES[0]), before)
        assert level_products(student, dict.fromkeys(wished), BATCHES) == 0
    ratio = mlp.down_proj.weight[:, 3] / old[:, 3]
    assert ratio.unique().numel() == 1 and ratio[0].log2() % 1 == 0 and ratio[0] >= 16
    peaks = read[0].abs().flatten(0, 1).amax(0)
    assert peaks.max() <= peaks.median() * MOST_OF_MEDIAN * 1.01
    # a product that is not linear in `up_proj`
    mlp.up_proj.register_forward_hook(lambda _m, _args, output: output.relu() + 1)
    mlp.up_proj.weight.data[5] *= 100
    kept = mlp.down_proj.weight.clone()
    only = {"model.layers.0.mlp.down_proj": ActivationSpec(kind="int8-static")}
    assert level_products(student, only, BATCHES) == 0
    assert torch.equal(mlp.down_proj.weight, kept)


@pytest.mark.parametrize(("live", "size"), [(16, 1.0), (16, 1e-37), (1, 1.0), (0, 1.0)])
def test_pruned_channels_are_not_levelled_by(live: int, size: float) -> None:
    """Most channels are zero: the median of all is no range, and what fails is undone exactly."""
    student = LanguageModel(tiny_model(initializer_range=0.2))
    mlp = student.model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[live:] = 0
        mlp.up_proj.weight[1:live] *= size
        mlp.up_proj.weight[0] *= 100
        before = {name: weight.clone() for name, weight in mlp.state_dict().items()}
        expected = student.hidden(*BATCHES[0])
        only = {"model.layers.0.mlp.down_proj": ActivationSpec(kind="int8-static")}
        count = level_products(student, only, BATCHES)
        assert torch.equal(student.hidden(*BATCHES[0]), expected)
    assert (count > 0) == (live > 1 and size == 1.0)
    if not count:
        assert all(torch.equal(mlp.state_dict()[name], old) for name, old in before.items())


def test_a_token_of_zeros_chooses_no_range() -> None:
    seen, with_zeros = Magnitudes(), Magnitudes()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    seen.add(x)
    with_zeros.add(torch.cat([x, torch.zeros(64, 8)]))
    assert torch.equal(seen.best_scale(), with_zeros.best_scale())


def test_inputs_are_those_of_the_model() -> None:
    student = LanguageModel(tiny_model(initializer_range=0.2))
    quantize_model(student, preset_called("q4a4"))
    read: list[torch.Tensor] = []
    up = student.model.model.layers[1].mlp.up_proj
    with torch.no_grad():
        with up.register_forward_pre_hook(lambda _m, args: read.append(args[0])):
            student.hidden(*BATCHES[0])
        found = inputs_of(student, quant_linears(student.model), BATCHES)
    assert len(found) == 8
    (mine,) = (each for names, each in found.items() if "model.layers.1.mlp.up_proj" in names)
    expected = Magnitudes()
    expected.add(read[0])
    sizes = read[0].double().norm(dim=-1)
    assert torch.equal(mine.counts, expected.counts)
    torch.testing.assert_close(mine.counts.sum(), (read[0].shape[-1] / sizes).sum())
    typical = (mine.values() * mine.counts).sum()
    of_all = (read[0].double().abs().sum(-1) / sizes).sum()
    torch.testing.assert_close(typical, of_all, rtol=0.02, atol=0)


def test_experts_are_refused_where_their_input_is_inside(place: Path, tmp_path: Path) -> None:
    student = LanguageModel(build("Qwen3MoeForCausalLM"))
    with pytest.raises(ConfigError, match=r"experts.down_proj cannot be quantized .*plan file"):
        convert_model(student, config(activations="int8"))
    with pytest.raises(ConfigError, match="cannot be quantized"):
        check_conversion(student, config(activations="int8"))
    file = tmp_path / "plan.toml"
    file.write_text(
        'name = "mine"\n[[rules]]\npattern = "*.down_proj"\nspec = { bits = 4, group_size = 16 }\n'
        '[[rules]]\npattern = "*"\nspec = { bits = 4, group_size = 16 }\n'
        'activation = { kind = "int8-static" }\n'
    )
    with pytest.raises(ConfigError, match="add --calibration"):
        convert_model(student, config(to=str(file)))
    plan = read_plan(config(to=str(file)))
    quantize_model(student, plan, calibration=BATCHES)
    experts = student.model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.activation.scale > 0 and experts.down_proj.activation is None
    before = activation_counts(student.model)
    put_activations(student, dict.fromkeys(quant_linears(student.model)))
    assert before["int8-static"] > 0 and activation_counts(student.model) == {}


@pytest.mark.slow
def test_a_budget_and_adapters_keep_the_inputs_of_the_plan(place: Path, tmp_path: Path) -> None:
    settings = config(
        to="q4a4_a8",
        bits_budget=3.6,
        embedding_bits=16,
        calibration=str(place / "text.txt"),
        calibration_sequences=4,
    )
    source = str(place / "float")
    assert convert_checkpoint(source, settings, tmp_path / "out").activations == {"int8": 14}
    again = config(to=str(tmp_path / "out" / PLAN_NAME), embedding_bits=16)
    assert convert_checkpoint(source, again, tmp_path / "again").activations == {"int8": 14}
    model = load_checkpoint(tmp_path / "again")
    add_adapters(model, list(quant_linears(model)), 2, seed=0)
    with torch.no_grad():
        before = model(IDS).logits
        save_checkpoint(model, None, tmp_path / "adapted")
        assert torch.equal(load_checkpoint(tmp_path / "adapted")(IDS).logits, before)


def test_settings_that_do_not_go_together_are_told(place: Path, tmp_path: Path) -> None:
    source = str(place / "float")
    for values, message in [
        ({"to": "q2a4_a8s"}, "add --calibration"),
        ({"to": None, "activations": "int8", "attention": "dense"}, "add --to PLAN"),
        ({"to": "q2a4_a9"}, "may end in _a8, _a8z, _a8s, _f8"),
    ]:
        with pytest.raises(ConfigError, match=message):
            convert_checkpoint(source, config(**values), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_targets_that_hold_weights_alone_say_so(place: Path, tmp_path: Path) -> None:
    from qat.convert.shipping import Shipping
    from qat.errors import ExportError
    from qat.export.targets import load_target

    out, source = tmp_path / "out", str(place / "float")
    settings = config(to="q4a4_a8", group_size=16)
    convert_checkpoint(source, settings, out)
    lacks = ships_to(out)
    assert lacks["packed"] is None and "its input is quantized" in lacks["dense"].reason
    with pytest.raises(ExportError, match=r"its input is quantized \(int8\)"):
        check_model("dense", load_checkpoint(out))
    with pytest.raises(
        ExportError, match=r"dense cannot hold plan q4a4_a8: its input is quantized \(int8\)"
    ):
        convert_checkpoint(
            source, settings, tmp_path / "b", Shipping({"dense": load_target("dense")})
        )
    assert not (tmp_path / "b").exists()
