"""Quantizing a whole model in place: which linears, from which weights, in which order."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from covering import covering
from families import build
from quantized import SPECS, fit_to_inputs, tiny_quantized
from test_sensitivity import tokens
from tiny import ARCHITECTURES, tiny_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from qat.convert import calibrate
from qat.convert.calibrate import TokenBatch
from qat.convert.quantize import QuantizeReport, check_experts, fits_at_once, quantize_model
from qat.errors import ConfigError
from qat.extensions.rotate.rotate import rotate
from qat.models.language_model import LanguageModel
from qat.models.load import load_model
from qat.models.streamed import StreamedModel
from qat.nn.quant_linear import FrozenLutLinear, quant_linears
from qat.nn.swap import linear_names, with_tables
from qat.quant.fit import fit_weight
from qat.quant.spec import PRESETS, LutSpec, PlanRule, QuantPlan
from qat.quant.weight import dequantize

Q2A4 = PRESETS["q2a4"]
SMALL = LutSpec(bits=2, group_size=8)
COARSE = LutSpec(bits=2, group_size=32)


def plan(pattern: str = "*", spec: LutSpec | None = SMALL) -> QuantPlan:
    return QuantPlan(name="p", rules=(PlanRule(pattern=pattern, spec=spec),))


def state(model) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def numbers(report: QuantizeReport) -> list[tuple]:
    return [(m.name, m.relative_error, m.weighted_error, m.bits_per_weight) for m in report.modules]


@pytest.mark.parametrize(
    ("architecture", "tied"), [*zip(ARCHITECTURES, itertools.cycle([True, False]))]
)
def test_every_linear_is_fitted_to_its_own_weight(architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, tie_word_embeddings=tied)
    weights = {name: model.get_submodule(name).weight.clone() for name in linear_names(model)}
    others = {
        n: p.clone()
        for n, p in model.named_parameters()
        if n.removesuffix(".weight") not in weights
    }
    mixed = Q2A4 if tied else plan()
    report = quantize_model(LanguageModel(model), mixed)
    assert [module.name for module in report.modules] == list(weights)
    linears = quant_linears(model)
    assert all(isinstance(linear, FrozenLutLinear) for linear in linears.values())
    for name in list(weights)[3:6]:
        expected = dequantize(fit_weight(weights[name], mixed.spec_for(name)))
        assert torch.equal(linears[name].quantized_weight(), expected)
    # embeddings, norms and the head stay, to the bit
    left = dict(model.named_parameters())
    assert all(torch.equal(left[name], value) for name, value in others.items())
    tied_now = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied_now == tied


def test_the_report_is_about_the_weights_in_place() -> None:
    model = tiny_model()
    weights = {name: model.get_submodule(name).weight.clone() for name in linear_names(model)}
    report = quantize_model(LanguageModel(model), Q2A4)
    assert report.plan == "q2a4" and report.kept == 0 and report.seconds > 0
    for module in report.modules:
        linear, weight = model.get_submodule(module.name), weights[module.name]
        error = (weight - linear.quantized_weight()).norm() / weight.norm()
        assert module.relative_error == pytest.approx(error.item(), rel=1e-5)
        assert module.weighted_error is None and module.seconds > 0
        # bits + 8 bits a group of 16 + a float32 codebook
        bits = module.bits + 8 / 16 + 32 * 2**module.bits / weight.numel()
        assert module.bits_per_weight == pytest.approx(bits)
        assert (module.codebook, module.scale, module.group_size) == ("lut", "group", 16)
    shares = [(m.bits_per_weight, weights[m.name].numel()) for m in report.modules]
    mean = sum(b * n for b, n in shares) / sum(n for _, n in shares)
    assert report.linear_bits == pytest.approx(mean)


def test_biases_are_kept() -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    biases = {n: torch.randn_like(p) for n, p in model.named_parameters() if n.endswith("bias")}
    assert len(biases) == 14
    for name, bias in biases.items():
        model.get_parameter(name).data.copy_(bias)
    quantize_model(LanguageModel(model), plan(), calibration=tokens())
    assert all(torch.equal(model.get_parameter(name), bias) for name, bias in biases.items())


def test_linears_of_the_wished_format_are_kept_as_they_are() -> None:
    model = tiny_quantized("qwen3", PRESETS["q4a4"].rules[0].spec)
    before = state(model)
    report = quantize_model(LanguageModel(model), Q2A4, calibration=tokens())
    attention = {n: t for n, t in before.items() if "self_attn" in n}
    now = state(model)
    assert attention and same(attention, {n: now[n] for n in attention})
    assert report.kept == 8 and len(report.modules) == 6
    assert {m.name.split(".")[-2] for m in report.modules} == {"mlp"}
    again = quantize_model(LanguageModel(model), Q2A4)
    assert again.kept == 14 and again.modules == [] and same(state(model), now)
    assert again.bits_per_weight == report.bits_per_weight


def reorder(model: PreTrainedModel) -> None:
    """The same function by other weights: the hidden units of each MLP in another order."""
    order = torch.randperm(model.config.intermediate_size)
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight.copy_(linear.weight[order])
            layer.mlp.down_proj.weight.copy_(layer.mlp.down_proj.weight[:, order])


@pytest.mark.parametrize(
    ("calibration", "is_packed"), [((), True), (tokens(64), False)], ids=["alone", "calibrated"]
)
def test_base_weights_are_imitated(calibration: tuple, is_packed: bool) -> None:
    shape = {"initializer_range": 0.2, "num_hidden_layers": 1}
    four, base = (tiny_model(**shape) for _ in range(2))
    reorder(base)
    quantize_model(LanguageModel(four), plan(spec=SPECS["lut4"]))
    if is_packed:
        quantize_model(LanguageModel(base), plan(spec=SPECS["lut3"]))
    before = state(base)
    report = quantize_model(
        LanguageModel(four), plan(), base=LanguageModel(base), calibration=calibration
    )
    errors = [module.relative_error for module in report.modules]
    name = linear_names(base)[-1]
    module = base.get_submodule(name)
    weight = module.quantized_weight() if is_packed else module.weight
    alone = dequantize(fit_weight(weight, SMALL))
    assert torch.equal(four.get_submodule(name).quantized_weight(), alone) == (not calibration)
    assert max(errors) < 0.7  # of an unrelated weight it would be above 1
    assert same(state(base), before)


def with_massive_activations(model: PreTrainedModel) -> PreTrainedModel:
    """Let token 0 drive two channels of each MLP 10^4 times as hard as any other, and alike.

    Trained models do so at their first token (arXiv:2402.17762).
    """
    with torch.no_grad():
        for layer in model.model.layers:
            up, gate = layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight
            direction = torch.randn(up.shape[1])
            up[3], up[7] = direction * 1e3, direction * -0.87e3
            gate[3] = gate[7] = direction * 10
            layer.mlp.down_proj.weight[:, [3, 7]] *= 1e-4
    return model


@pytest.mark.parametrize(
    ("name", "is_rotated"), covering(["q2a4", "v2a2", "b1", "ternary"], [False, True])
)
def test_massive_activations_are_calibrated_on(name: str, is_rotated: bool) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}
    model = LanguageModel(with_massive_activations(tiny_model(initializer_range=0.2, **shape)))
    if is_rotated:
        rotate(model)
    report = quantize_model(model, PRESETS[name], calibration=tokens(sequences=24))
    assert all(math.isfinite(module.weighted_error) for module in report.modules)
    assert all(module.weighted_error < 1 for module in report.modules)


def test_inputs_that_are_not_finite_name_their_linear() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.down_proj"):
        quantize_model(LanguageModel(model), plan("*down*"), calibration=tokens())


@pytest.mark.parametrize("is_in_files", [pytest.param(False, marks=pytest.mark.slow), True])
def test_streaming_gives_the_same_student(
    is_in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(initializer_range=0.2).save_pretrained(tmp_path)
    states, reports = [], []
    for remembers in (True, False):
        monkeypatch.setattr(calibrate, "fits_in_memory", lambda *_, says=remembers: says)
        folder = tmp_path if is_in_files else None
        model = load_model(str(tmp_path), device="cpu", dtype="fp32", folder=folder)
        assert isinstance(model, StreamedModel) == is_in_files
        reports.append(quantize_model(model, plan(), calibration=tokens(sequences=24)))
        states.append(state(model.model))
    assert numbers(reports[0]) == numbers(reports[1]) and same(*states)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calibration_brings_the_output_closer(architecture: str) -> None:
    batches, outputs = tokens(sequences=24), []
    for calibration in (None, (), batches):
        model = LanguageModel(tiny_model(architecture, initializer_range=0.2))
        if calibration is not None:
            quantize_model(model, plan(), calibration=calibration)
        outputs.append(torch.cat([model.hidden(*batch) for batch in batches]))
    whole, alone, calibrated = outputs
    assert (calibrated - whole).norm() < 0.9 * (alone - whole).norm()


@pytest.fixture(scope="module")
def trained() -> PreTrainedModel:
    """The first two layers of the repository's trained model."""
    place = Path(__file__).parents[2] / "checkpoints" / "tiny-qwen3"
    return AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, num_hidden_layers=2
    ).eval()


@pytest.fixture(scope="module")
def said(trained: PreTrainedModel) -> Tensor:
    """Return tokens `(192, 32)` sampled from that model: 144 rows to calibrate, 48 to judge."""
    ids = torch.randint(4096, (192, 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(31):
            p = trained(ids, logits_to_keep=1).logits[:, -1].softmax(-1)
            drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(ids.shape[1]))
            ids = torch.cat([ids, drawn], dim=1)
    return ids


def learned(said: Tensor) -> list[TokenBatch]:
    return [TokenBatch(ids, torch.arange(32).expand_as(ids)) for ids in said[:144].split(16)]


@torch.no_grad()
def divergence(teacher: PreTrainedModel, model: PreTrainedModel, said: Tensor) -> float:
    """KL(teacher || model), nats per token."""
    p, q = (m(said[144:]).logits.log_softmax(-1) for m in (teacher, model))
    return F.kl_div(q, p, log_target=True, reduction="sum").item() / said[144:].numel()


@pytest.mark.slow
def test_aiming_at_the_teacher_brings_the_whole_model_closer(
    trained: PreTrainedModel, said: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    aimed, plain = copy.deepcopy(trained), copy.deepcopy(trained)
    quantize_model(LanguageModel(aimed), plan(spec=COARSE), calibration=learned(said))
    monkeypatch.setattr("qat.convert.quantize.aim_all", lambda weights, *_: weights)
    quantize_model(LanguageModel(plain), plan(spec=COARSE), calibration=learned(said))
    assert divergence(trained, aimed, said) < 0.95 * divergence(trained, plain, said)


@pytest.mark.slow
def test_the_float_base_is_the_aim_of_a_quantized_model(
    trained: PreTrainedModel, said: Tensor
) -> None:
    start = copy.deepcopy(trained)
    # attention that is far from the teacher's, and stays
    quantize_model(LanguageModel(start), plan("*.self_attn.*", SPECS["ternary"]))
    found = []
    for base in (LanguageModel(trained), None):
        model = copy.deepcopy(start)
        mlp = plan("*.1.mlp.*", SPECS["lut2"])
        quantize_model(LanguageModel(model), mlp, base=base, calibration=learned(said))
        found.append(divergence(trained, model, said))
    assert found[0] < 0.9 * found[1]


def test_the_teacher_reads_the_table_before_it_is_quantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gaps = []

    def note(weights: list[Tensor], _hessian: Tensor, gap: Tensor, *_: Tensor) -> list[Tensor]:
        gaps.append(gap.norm().item())
        return weights

    monkeypatch.setattr("qat.convert.quantize.aim_all", note)
    for has_tables in (False, True):
        model, chosen = tiny_model(), plan("*.0.self_attn.q_proj")
        both = with_tables(chosen, model, 4) if has_tables else chosen
        quantize_model(LanguageModel(model), both, calibration=tokens())
    assert gaps[0] == 0.0 and gaps[1] > 1e-3


def test_the_weighted_error_is_that_of_the_layers_output() -> None:
    model, batches = tiny_model(), tokens()
    first = model.model.layers[0].mlp.up_proj
    weight, seen = first.weight.clone(), []
    only = plan("model.layers.0.mlp.up_proj")
    note = lambda _, args: seen.append(args[0].flatten(0, -2))  # noqa: E731
    with torch.no_grad(), first.register_forward_pre_hook(note):
        for batch in batches:
            LanguageModel(model).hidden(*batch)
    x = torch.cat(seen)
    (module,) = quantize_model(LanguageModel(model), only, calibration=batches).modules
    linear = model.model.layers[0].mlp.up_proj
    expected = dequantize(fit_to_inputs(weight, SMALL, x.T @ x / len(x)))
    same_place = torch.isclose(linear.quantized_weight(), expected, rtol=1e-2, atol=1e-5)
    assert same_place.float().mean() > 0.9  # the matmuls may have multiplied in bf16
    outputs = x @ weight.T, x @ (weight - linear.quantized_weight()).T
    # the damping of the Hessian moves it a little
    ratio = (outputs[1].norm() / outputs[0].norm()).item()
    assert module.weighted_error == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize(
    ("bad", "base", "message"),
    [
        (plan(), {"num_hidden_layers": 1}, "base: its model.layers.1.* is of shape None"),
        (plan(), {"intermediate_size": 48}, r"base: its .* is of shape \(48, 32\)"),
        (
            plan("*.experts.*"),
            None,
            r"plan p: pattern '\*.experts.\*' matches none of the model's 14",
        ),
        (
            plan(spec=LutSpec(bits=2, group_size=48)),
            None,
            "q_proj: group_size=48 does not divide its 32",
        ),
        (
            plan(spec=LutSpec(bits=2, scale="low_rank", rank=33, group_size=8)),
            None,
            "q_proj: rank=33 is more than its 64 x 32 weight has",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(bad: QuantPlan, base: dict | None, message: str) -> None:
    model, other = tiny_model(), base and LanguageModel(tiny_model(**base))
    before = state(model)
    with pytest.raises(ConfigError, match=message):
        quantize_model(LanguageModel(model), bad, base=other)
    assert same(state(model), before)


@pytest.mark.parametrize(
    "family", ["KimiLinearForCausalLM", "RwkvForCausalLM", "RecurrentGemmaForCausalLM"]
)
def test_parameters_of_three_sides_need_not_be_experts(family: str) -> None:
    model = LanguageModel(build(family)).model
    assert any(p.dim() >= 3 for p in model.parameters())
    check_experts(plan(), model)


def test_experts_that_no_entry_opens_are_refused() -> None:
    model = LanguageModel(build("DbrxForCausalLM")).model
    with pytest.raises(ConfigError, match=r"experts.mlp.w1 holds experts in one tensor of shape"):
        check_experts(plan(), model)
    check_experts(PRESETS["q2a4"].model_copy(update={"rules": ()}), model)


def test_as_many_weights_are_fitted_at_once_as_there_is_room_for() -> None:
    assert fits_at_once([2**20] * 5, None) == fits_at_once([2**20] * 5, 64) == 5
    assert fits_at_once([2**20, 2**30] * 5, 64) == 2  # of 14 GiB each in 32
    assert fits_at_once([2**30] * 5, 1) == fits_at_once([], 64) == 1
