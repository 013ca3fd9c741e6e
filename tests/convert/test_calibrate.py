"""The layer-wise run: order, stages, and the second moment that each linear is fitted to."""

import copy
from collections.abc import Callable

import pytest
import torch
from quantized import SPECS, frozen_linear
from tiny import ARCHITECTURES, VOCAB, tiny_model
from torch import Tensor, nn

from qat.convert import calibrate
from qat.convert.calibrate import LayerwiseRun, StageInputs, TokenBatch, stages_in_order
from qat.models.language_model import LanguageModel
from qat.models.streamed import StateStore, record_block_inputs
from qat.nn.swap import decoder_layers, linear_names, replace_module
from qat.quant.error_feedback import DAMPING, needed_damping

QKV = [f"self_attn.{p}_proj" for p in "qkv"]
STAGES = [QKV, ["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]


def batches(packed: bool = False) -> list[TokenBatch]:
    """Two batches of different size; packed documents restart their positions."""
    made = []
    for seed, B in ((0, 3), (1, 2)):
        ids = torch.randint(VOCAB, (B, 10), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(10).remainder(6 if packed else 10).expand_as(ids)
        made.append(TokenBatch(ids, positions))
    return made


def moments(model, names: list[str], batches: list[TokenBatch]) -> dict[str, Tensor]:
    """`X^T X / n` of the inputs that each linear really gets in whole forwards, in float64."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}

    def watch(name: str) -> Callable:
        return lambda _module, args: seen[name].append(args[0].flatten(0, -2).double())

    with torch.no_grad(), calibrate._hooked((model.get_submodule(n), watch(n)) for n in names):
        for batch in batches:
            LanguageModel(model).hidden(*batch)
    rows = {name: torch.cat(parts) for name, parts in seen.items()}
    return {name: x.T @ x / len(x) for name, x in rows.items()}


@pytest.fixture(params=[True, False], ids=["remembers", "streams"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for what modules gave, or for the states between layers alone."""
    monkeypatch.setattr(calibrate, "fits_in_memory", lambda *_: request.param)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("architecture", "packed"), [*zip(ARCHITECTURES, [True, False, True], strict=True)]
)
def test_each_stage_sees_what_the_blocks_quantized_so_far_make(
    architecture: str, packed: bool
) -> None:
    model, data = tiny_model(architecture, initializer_range=0.2), batches(packed)
    order: list[list[str]] = []

    def spy(names: list[str], inputs: StageInputs) -> None:
        order.append(names)
        # a whole forward of the model as it stands: earlier stages are quantized, later ones not
        for H in moments(model, names, data).values():
            torch.testing.assert_close(inputs.second_moment.double(), H, rtol=1e-4, atol=1e-6)
        for name in names:
            linear = model.get_submodule(name)
            new = frozen_linear(linear.out_features, linear.in_features, SPECS["lut2"])
            replace_module(model, name, new)

    for names, inputs in stages_in_order(LanguageModel(model), data, linear_names(model)):
        spy(names, inputs)
    assert order == [
        [f"model.layers.{layer}.{part}" for part in stage] for layer in (0, 1) for stage in STAGES
    ]


def readings(model, name: str, batches: list[TokenBatch]) -> tuple[Tensor, Tensor]:
    """The linear's input, and the sum behind it less its output, in whole forwards, in float64.

    Llama and Qwen add the output of `down_proj` to make the layer's, and that of `o_proj` to make
    what `post_attention_layernorm` reads.
    """
    layer = model.get_submodule(name.partition(".self_attn")[0].partition(".mlp")[0])
    xs, sums, outputs = [], [], []
    linear = model.get_submodule(name)
    before = [(linear, lambda _, args: xs.append(args[0]))]
    after = [(linear, lambda _m, _a, output: outputs.append(output))]
    if "o_proj" in name:
        before.append((layer.post_attention_layernorm, lambda _, args: sums.append(args[0])))
    else:
        after.append((layer, lambda _m, _a, output: sums.append(output)))
    with torch.no_grad(), calibrate._hooked(before, after):
        for batch in batches:
            LanguageModel(model).hidden(*batch)
    x, total, y = (torch.cat([t.flatten(0, -2) for t in part]) for part in (xs, sums, outputs))
    return x.double(), (total - y).double() if total.shape == y.shape else total


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("architecture", "is_other"), [*zip(ARCHITECTURES, [True, False, False], strict=True)]
)
def test_the_teacher_is_walked_beside_the_student(architecture: str, is_other: bool) -> None:
    biases = {} if architecture == "gemma3" else {"attention_bias": True}
    model = tiny_model(architecture, initializer_range=0.2, **biases)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    before, data = copy.deepcopy(model), batches(packed=True)
    teacher = LanguageModel(before if is_other else model)

    def spy(names: list[str], inputs: StageInputs) -> None:
        for name in names:
            x, stream = readings(model, name, data)
            x_f, stream_f = readings(before, name, data)
            gap = (x_f - x).T @ x / len(x)
            torch.testing.assert_close(inputs.input_gap.double(), gap, rtol=1e-3, atol=1e-5)
            is_writer = name.endswith(("o_proj", "down_proj")) and architecture != "gemma3"
            assert (inputs.stream_gap is not None) == is_writer
            if is_writer:
                gap = (stream_f - stream).T @ x / len(x)
                torch.testing.assert_close(inputs.stream_gap.double(), gap, rtol=1e-3, atol=1e-5)
        if "layers.1" in names[0]:
            assert inputs.input_gap.norm() > 1e-2
        for name in names:
            linear = model.get_submodule(name)
            new = frozen_linear(linear.out_features, linear.in_features, SPECS["lut2"])
            new.bias = linear.bias
            replace_module(model, name, new)

    run = LayerwiseRun(teacher, data)
    language_model = LanguageModel(model)
    for names, inputs in stages_in_order(language_model, data, linear_names(model), teacher=run):
        spy(names, inputs)


@pytest.mark.usefixtures("memory")
def test_experts_that_see_some_tokens_have_no_gap() -> None:
    """A linear whose input is a list of tokens, as routing makes it, is not compared."""
    model, seen = tiny_model(), {}
    for layer in model.model.layers:
        layer.mlp = _Routed(layer.mlp)
    names = [n for n in linear_names(model) if "mlp" in n]
    run = LayerwiseRun(LanguageModel(model), batches())
    for stage, inputs in stages_in_order(LanguageModel(model), batches(), names, teacher=run):
        seen.update(dict.fromkeys(stage, inputs))
    assert len(seen) == 6 and all(inputs.second_moment.isfinite().all() for inputs in seen.values())
    assert all(inputs.input_gap is None and inputs.stream_gap is None for inputs in seen.values())


class _Routed(nn.Module):
    """Sends every second token through an MLP and the others past it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        return torch.cat([self.mlp(rows[::2]), rows[1::2]]).view_as(x)


def test_streaming_keeps_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept memory grows with tokens times width, not with outputs of all linears of a layer."""
    kept: list[int] = []
    monkeypatch.setattr(calibrate, "fits_in_memory", lambda *_: False)
    monkeypatch.setattr(StateStore, "put", lambda _, value: kept.append(value.nbytes) or value)
    model, data = tiny_model(), batches()
    run = LayerwiseRun(LanguageModel(model), data)
    for _ in stages_in_order(LanguageModel(model), data, linear_names(model), teacher=run):
        pass
    state = sum(batch.input_ids.numel() for batch in data) * model.config.hidden_size * 4
    num_layers = model.config.num_hidden_layers
    assert sum(kept) == 2 * (1 + num_layers) * state  # two models, before and behind each layer


def test_the_time_is_estimated_before_it_is_spent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibrate, "ESTIMATED_BATCHES", 2)
    monkeypatch.setattr(calibrate, "ESTIMATED_S", 0.0)
    model, beats = tiny_model(), []
    run = LayerwiseRun(LanguageModel(model), batches())
    stages = stages_in_order(
        LanguageModel(model), batches(), linear_names(model), teacher=run, heartbeat=beats.append
    )
    with caplog.at_level("INFO", logger="qat"):
        next(stages)
    said = [m for m in caplog.messages if "50 tokens" in m]
    assert len(said) == 1
    assert [beat.rpartition(" ")[2] for beat in beats] == ["1", "2"]


def test_moments_with_massive_activations_are_positive_definite() -> None:
    """Two collinear channels 10^4 times as strong as the rest, in every 64th token."""
    x = torch.randn(20000, 48, generator=torch.Generator().manual_seed(0)) * 0.1
    x[::64, 3] = 3e3
    x[::64, 7] = -2.7e3
    total = calibrate._MeanOuter()
    for rows in x.split(6000):
        total.add(rows, calibrate._Rows(rows))
    expected = x.double().T @ x.double() / len(x)
    scale = expected.diagonal().sqrt()
    off = (total.mean() - expected).abs() / (scale[:, None] * scale)
    assert total.mean().dtype == torch.float64 and off.max() < 1e-6
    rest = [i for i in range(48) if i not in (3, 7)]
    noise = torch.finfo(torch.float32).eps * expected.diagonal()[rest].max()
    assert torch.linalg.eigvalsh(total.mean() - expected).abs().max() < 48 * noise
    assert needed_damping(total.mean()) == DAMPING


def test_only_the_named_linears_are_visited() -> None:
    model, visited = tiny_model(), []
    names = [
        n for n in linear_names(model) if "layers.1." in n and n.endswith(("up_proj", "q_proj"))
    ]
    for stage, inputs in stages_in_order(LanguageModel(model), batches(), names):
        visited.append(stage)
        assert inputs[1:] == (None, None), "no gap to a teacher that nobody gave"
    assert visited == [[name] for name in names]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_inputs_replay_the_model(architecture: str) -> None:
    model, batch = tiny_model(architecture), batches(packed=True)[0]
    layers = decoder_layers(model)
    with torch.no_grad():
        inputs = record_block_inputs(LanguageModel(model), layers, batch)
        hidden = inputs.hidden
        for layer, call in zip(layers, inputs.kwargs, strict=True):
            hidden = layer(hidden, **call)
        expected = LanguageModel(model).hidden(*batch)
        torch.testing.assert_close(model.base_model.norm(hidden), expected)
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_hooks_are_gone_when_quantizing_fails() -> None:
    model = tiny_model()
    with pytest.raises(RuntimeError, match="our bug"):
        for _ in stages_in_order(LanguageModel(model), batches(), linear_names(model)):
            raise RuntimeError("our bug")
    assert not any(module._forward_pre_hooks for module in model.modules())
