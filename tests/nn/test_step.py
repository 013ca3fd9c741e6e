"""The three-act step against autograd through the textbook formula `codebook[indices] * S`."""

import copy

import pytest
import torch
from covering import covering
from quantized import KINDS, SPECS, frozen_linear, latent_linear, nearest_e5m3, with_adapter
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from qat.kernels import lut_weight
from qat.nn.by_layer import form_by_layer
from qat.nn.quant_linear import LutLinear, QuantLinear, quant_linears
from qat.nn.step import (
    JoinedLinears,
    form_moved_weights,
    form_weights,
    join_linears,
    part_linears,
    release_weights,
)
from qat.quant.spec import LutSpec

LINEARS = {"frozen": frozen_linear, "latent": latent_linear}
MODES = ["formed", "alone", "formed_checkpointed", "alone_checkpointed"]


class Oracle(nn.Module):
    """The same linear by plain autograd; the latent weight gets a straight-through gradient."""

    def __init__(self, linear: QuantLinear) -> None:
        super().__init__()
        self.indices = linear.indices().long()
        self.shape = linear.out_features, linear.in_features
        self.named = {
            name: nn.Parameter(parameter.detach().half().float() if "scale" in name else parameter)
            for name, parameter in linear.weight_parameters().items()
        }
        self.named["codebook"] = nn.Parameter(linear.levels().clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def weight(self) -> Tensor:
        n = self.named
        if "scales" in n:
            O, I = self.shape
            G = n["scales"].shape[1]
            S = n["scales"][:, :, None].expand(O, G, I // G).reshape(O, I)
        else:
            S = n["scale_out"] @ torch.diag(n["rank_gain"]) @ n["scale_in"]
        W = n["codebook"][self.indices].view(self.shape) * S
        return W + (n["weight"] - n["weight"].detach()) if "weight" in n else W

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(), self.bias)


class Pair(nn.Module):
    """Two quantized linears around a nonlinearity, the second used twice."""

    def __init__(self, first: nn.Module, second: nn.Module, is_checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.is_checkpointed = is_checkpointed

    def _body(self, x: Tensor) -> Tensor:
        h = F.silu(self.first(x))
        return self.second(torch.tanh(self.second(h)) + h)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self._body, x, use_reentrant=False)
        return self._body(x)


def run_step(model: Pair, micro_batches: list[Tensor]) -> list[float]:
    """Losses of two micro-batches whose gradients add up."""
    losses = []
    for x in micro_batches:
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "mode", "bias", "kind"),
    [
        *((*each, "frozen") for each in covering(SPECS, MODES, [True, False])),
        *((*each, "latent") for each in covering(KINDS, MODES[::-1], [False, True])),
    ],
)
def test_losses_and_gradients_equal_autograd(name: str, mode: str, bias: bool, kind: str) -> None:
    make, spec = LINEARS[kind], SPECS[name]
    group = spec.group_size
    first, second = make(group, 3 * group, spec, bias), make(group, group, spec, bias)
    oracle = Pair(Oracle(first), Oracle(second), False)
    model = Pair(first, second, "checkpointed" in mode)
    micro_batches = [torch.randn(5, 3 * group), torch.randn(2, 3, 3 * group)]
    if "formed" in mode:
        form_weights(model, torch.float32)
    torch.testing.assert_close(
        run_step(model, micro_batches), run_step(oracle, micro_batches), rtol=1e-5, atol=1e-6
    )
    for linear, plain in ((first, oracle.first), (second, oracle.second)):
        for name, parameter in linear.weight_parameters().items():
            expected = plain.named[name].grad
            torch.testing.assert_close(
                parameter.grad, expected, rtol=1e-4, atol=2e-6 * expected.abs().max().item() + 1e-7
            )
        if bias:
            torch.testing.assert_close(linear.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-6)
        assert linear.formed is None or linear.formed.grad is None


@pytest.mark.parametrize(
    ("name", "dtype"), covering(KINDS, [torch.float32, torch.bfloat16, torch.float16])
)
def test_forward_computes_with_the_exported_weight(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    for kind, make in LINEARS.items():
        linear = make(11, 2 * spec.group_size, spec)
        exported = linear.quantized_weight(dtype)
        x = torch.randn(3, 2 * spec.group_size, dtype=dtype)
        alone = linear(x)
        form_weights(linear, dtype)
        assert torch.equal(linear.formed, exported), kind
        assert torch.equal(linear(x), F.linear(x, exported)), kind
        assert torch.equal(alone, F.linear(x, exported)), kind


@pytest.mark.parametrize("is_formed", [True, False])
@pytest.mark.parametrize("kind", LINEARS)
def test_gradients_pass_straight_through_the_rounding_of_scales(kind: str, is_formed: bool) -> None:
    linear = LINEARS[kind](24, 64, SPECS["lut2_s8"])
    with torch.no_grad():
        linear.scales.uniform_(-0.02, 0.1)  # as training leaves them: between bytes, some negative
    raw = linear.scales.detach().clone().requires_grad_()
    rounded = nearest_e5m3(raw.detach().clamp_min(0))
    assert not torch.equal(rounded, raw) and (rounded == 0).any()
    assert torch.equal(linear.scales_as_stored().scales, rounded)
    codebook = linear.codebook.detach().clone().requires_grad_()
    S = (rounded + (raw - raw.detach())).repeat_interleave(8, dim=1)
    weight = codebook[linear.indices().long()] * S
    x, dy = torch.randn(5, 64), torch.randn(5, 24)
    F.linear(x, weight).backward(dy)
    if is_formed:
        form_weights(linear, torch.float32)
    assert torch.equal(linear.quantized_weight(), weight)
    linear(x).backward(dy)
    torch.testing.assert_close(linear.scales.grad, raw.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(linear.codebook.grad, codebook.grad, rtol=1e-5, atol=1e-5)
    if kind == "latent":
        assert torch.equal(linear.weight.grad, dy.T @ x)


def test_joined_linears_keep_their_own_rounding() -> None:
    specs = [SPECS["lut2"].model_copy(update={"scale_bits": bits}) for bits in (16, 8)]
    linears = [frozen_linear(12, 32, spec) for spec in specs]
    x, dy = torch.randn(5, 32), torch.randn(5, 24)
    with torch.no_grad():
        for linear in linears:
            linear.scales.uniform_(0.1, 0.2)
    alone = torch.cat([linear(x) for linear in linears], dim=1)
    alone.backward(dy)
    expected = [linear.scales.grad.clone() for linear in linears]
    joined = JoinedLinears(linears)
    assert torch.equal(joined(x), alone)  # with nothing formed
    for linear in linears:
        linear.zero_grad()
    joined.form_(torch.float32)
    for linear, rows in zip(linears, joined.formed.split(12), strict=True):
        assert torch.equal(rows, linear.quantized_weight())
    torch.testing.assert_close(joined(x), alone)
    joined(x).backward(dy)
    for linear, gradient in zip(linears, expected, strict=True):
        torch.testing.assert_close(linear.scales.grad, gradient)


def test_parted_linears_forget_what_was_formed_together() -> None:
    model = nn.ModuleDict({name: frozen_linear(12, 32, SPECS["lut2"]) for name in "kv"})
    join_linears(model, "both", ("k", "v"))
    form_weights(model, torch.float32)
    assert model["k"].formed is None and model["both"].formed.shape == (24, 32)
    part_linears(model)
    assert list(model) == ["k", "v"]
    x = torch.randn(2, 32)
    with torch.no_grad():
        for linear in model.values():
            linear.scales.mul_(2)  # nothing of what was formed together is used any more
            torch.testing.assert_close(linear(x), F.linear(x, linear.quantized_weight()))


def test_autocast_does_not_reach_the_formed_weight() -> None:
    linear = frozen_linear(16, 32, SPECS["lut4_r1"], bias=True)
    x = torch.randn(3, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
        expected = F.linear(x, linear.quantized_weight(), linear.bias)
        y.square().sum().backward()
    assert torch.equal(y, expected)
    under_autocast = linear.scale_in.grad.clone()
    linear.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    y.square().sum().backward()
    assert torch.equal(under_autocast, linear.scale_in.grad)


def test_indices_follow_the_latent_weight() -> None:
    linear = latent_linear(8, 32, SPECS["lut2"])
    form_weights(linear, torch.float32)
    before = linear.formed.clone()
    with torch.no_grad():
        linear.weight.neg_()
    form_weights(linear, torch.float32)
    distances = (linear.weight[..., None] - linear.codebook * _expanded(linear)[..., None]).abs()
    assert torch.equal(linear.indices().long(), distances.argmin(-1))
    assert not torch.equal(linear.formed, before)


def _expanded(linear: LutLinear) -> Tensor:
    return linear.scales.half().float().repeat_interleave(linear.spec.group_size, dim=1)


@pytest.mark.parametrize("spec", [SPECS["lut4"], SPECS["lut2_r4"]], ids=["group", "low_rank"])
def test_order_of_a_latent_codebook_is_irrelevant(spec: LutSpec) -> None:
    linear = latent_linear(8, 32, spec)
    shuffled = copy.deepcopy(linear)
    order = torch.randperm(spec.num_levels)
    with torch.no_grad():
        shuffled.codebook.copy_(linear.codebook[order])
    assert torch.equal(shuffled.quantized_weight(), linear.quantized_weight())
    x = torch.randn(4, 32)
    for module in (linear, shuffled):
        module(x).square().sum().backward()
    torch.testing.assert_close(shuffled.codebook.grad, linear.codebook.grad[order])


@pytest.mark.parametrize("is_formed", [True, False])
def test_frozen_parameters_get_no_gradient(is_formed: bool) -> None:
    for kind, spec, has_adapter in (
        ("latent", "lut2", False),
        ("frozen", "lut2_r4", False),
        ("frozen", "lut2", True),
    ):
        plain = LINEARS[kind](8, 32, SPECS[spec])
        linear = with_adapter(plain) if has_adapter else plain
        for frozen in linear.weight_parameters():
            one = copy.deepcopy(linear)
            one.get_parameter(frozen).requires_grad_(False)
            if is_formed:
                one.form_(torch.float32)
            one(torch.randn(4, 32)).square().sum().backward()
            has_gradient = {n: p.grad is not None for n, p in one.weight_parameters().items()}
            assert has_gradient == {n: n != frozen for n in has_gradient}


def test_where_nothing_learns_the_formed_weight_needs_no_gradient() -> None:
    linear = frozen_linear(8, 32, SPECS["lut2"], bias=True)
    linear.form_(torch.float32)
    assert linear.formed.requires_grad
    for parameter in linear.weight_parameters().values():
        parameter.requires_grad_(False)
    linear.form_(torch.float32)
    assert not linear.formed.requires_grad
    linear(torch.randn(2, 32)).sum().backward()
    assert linear.bias.grad is not None


class ReadsNothing(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, _weight: Tensor, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def test_a_weight_that_nothing_differentiable_reads_gets_no_gradient() -> None:
    linear = frozen_linear(8, 32, SPECS["lut2"])
    linear.form_(torch.float32)
    ReadsNothing.apply(linear.formed, torch.randn(2, requires_grad=True)).sum().backward()
    assert linear.scales.grad is None and linear.codebook.grad is None


def test_formed_memory_is_used_again() -> None:
    linear = frozen_linear(8, 32, SPECS["lut2"])
    x = torch.randn(2, 32)
    linear(x).sum().backward()
    alone = linear.scales.grad.clone()
    linear.zero_grad()
    linear.form_(torch.float32)
    address = linear.formed.data_ptr()
    linear.form_(torch.float32)
    assert linear.formed.data_ptr() == address
    linear(x).sum().backward()
    assert torch.equal(linear.scales.grad, alone)  # pulled back once, not once per form_
    with torch.no_grad():
        linear.scales.mul_(2)
    linear.form_(torch.float32)
    assert torch.equal(linear.formed, linear.quantized_weight())


def test_quant_linears_are_named_and_released() -> None:
    model = nn.Sequential(
        nn.Linear(32, 32), frozen_linear(32, 32, SPECS["lut2"]), latent_linear(8, 32, SPECS["lut4"])
    )
    assert list(quant_linears(model)) == ["1", "2"]
    form_weights(model, torch.bfloat16)
    assert all(m.formed.dtype == torch.bfloat16 for m in quant_linears(model).values())
    assert not any("formed" in key for key in model.state_dict())
    release_weights(model)
    assert all(m.formed is None for m in quant_linears(model).values())


@pytest.mark.parametrize("kind", LINEARS)
def test_a_cast_of_the_model_does_not_round_the_quantizer(kind: str) -> None:
    linear = with_adapter(LINEARS[kind](32, 32, SPECS["lut2"], bias=True))
    model = nn.Sequential(linear, nn.LayerNorm(32))
    before = model[0].quantized_weight()
    model.to(torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    assert {p.dtype for p in model[0].parameters()} == {torch.float32}
    assert torch.equal(model[0].quantized_weight(), before)
    assert model(torch.randn(2, 32).bfloat16()).dtype == torch.bfloat16
    assert {t.device.type for t in model.to("meta").state_dict().values()} == {"meta"}


def test_between_steps_only_what_learns_is_formed_again(monkeypatch) -> None:
    model = nn.ModuleDict(
        {"a": latent_linear(8, 32, SPECS["lut2"]), "b": frozen_linear(8, 32, SPECS["lut4"])}
    )
    model["b"].requires_grad_(False)
    form_moved_weights(model, torch.float32)
    kept = model["b"].formed
    formed = []
    monkeypatch.setattr(QuantLinear, "form_", lambda self, dtype: formed.append(self))
    form_moved_weights(model, torch.float32)
    assert formed == [model["a"]]
    form_moved_weights(model, torch.bfloat16)
    assert formed[1:] == [model["a"], model["b"]], "another dtype needs another weight"
    assert torch.equal(kept, model["b"].quantized_weight())


def test_a_bf16_latent_weight_stays_so_and_takes_its_gradient_without_a_copy() -> None:
    full = latent_linear(8, 32, SPECS["lut2"])
    weight = full.weight.detach().bfloat16()
    linear = LutLinear(weight, full.quantized(), None, full.spec)
    assert linear.weight.dtype == torch.bfloat16
    assert (
        LutLinear(weight.float(), full.quantized(), None, full.spec).weight.dtype == torch.float32
    )
    with torch.no_grad():
        full.weight.copy_(weight)
    assert torch.equal(linear.quantized_weight(), full.quantized_weight())
    linear.form_(torch.bfloat16)
    seen = []
    pulled_back = linear.pulled_back
    linear.pulled_back = lambda dW, wanted: seen.append(dW) or pulled_back(dW, wanted)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    linear(x).sum().backward()
    assert linear.weight.grad is seen[0]
    linear(x).sum().backward()
    assert linear.weight.grad is seen[0], "micro-batches add up in place"
    assert linear.weight.grad.dtype == torch.bfloat16
    assert linear.scales.grad.dtype == torch.float32


def test_gradients_add_up_where_they_lie() -> None:
    linear = latent_linear(8, 32, SPECS["lut2_r4"])
    linear.form_(torch.float32)
    x = torch.randn(2, 32)
    linear(x).sum().backward()
    once = {name: p.grad.clone() for name, p in linear.weight_parameters().items()}
    places = {name: p.grad.data_ptr() for name, p in linear.weight_parameters().items()}
    linear(x).sum().backward()
    for name, parameter in linear.weight_parameters().items():
        assert parameter.grad.data_ptr() == places[name]
        assert torch.equal(parameter.grad, 2 * once[name])


@pytest.mark.parametrize(("kind", "is_checkpointed"), [("frozen", False), ("latent", True)])
def test_a_formed_linear_compiles_to_one_graph(kind: str, is_checkpointed: bool) -> None:
    make = LINEARS[kind]
    spec = SPECS["lut2"]
    plain = Pair(make(16, 32, spec, bias=True), make(16, 16, spec), is_checkpointed)
    layer = copy.deepcopy(plain)
    for model in (plain, layer):
        form_weights(model, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    micro_batches = [torch.randn(4, 32), torch.randn(4, 32)]
    torch.testing.assert_close(run_step(compiled, micro_batches), run_step(plain, micro_batches))
    for (name, p), q in zip(plain.named_parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    assert layer.first.formed.grad is None


def test_forming_again_does_not_compile_again() -> None:
    layer = latent_linear(8, 32, SPECS["lut2"])
    layer.form_(torch.float32)
    graphs = []
    compiled = torch.compile(layer, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    x = torch.ones(2, 32)
    for _ in range(3):
        assert torch.equal(compiled(x), F.linear(x, layer.quantized_weight()))
        with torch.no_grad():
            layer.weight.neg_()
        layer.form_(torch.float32)
    assert len(graphs) == 1


def test_codewords_are_found_once_for_forming_and_pulling_back(monkeypatch) -> None:
    searches = []
    search = lut_weight.latent_indices
    monkeypatch.setattr(
        lut_weight, "latent_indices", lambda *given: searches.append(1) or search(*given)
    )
    linear = latent_linear(8, 32, SPECS["pairs6"])
    for forms in (1, 2):
        linear.form_(torch.float32)
        for _ in range(3):
            linear(torch.randn(3, 32)).sum().backward()
        assert len(searches) == forms
    room = linear._chosen[0].octets, linear._chosen[1]
    with torch.no_grad():
        linear.weight.neg_()
        linear.codebook.mul_(0.9)
    linear.form_(torch.float32)
    # a recorded backward finds them where they were
    indices, levels = linear._made_of()
    assert [t.data_ptr() for t in (indices.octets, levels)] == [t.data_ptr() for t in room]
    assert torch.equal(indices.indices(), linear.indices())
    assert torch.equal(levels, linear.levels())


def test_a_gradient_belongs_to_the_codewords_that_were_formed() -> None:
    """A latent weight that moves does not change the gradient while codewords are kept."""
    linear, dW = latent_linear(8, 32, SPECS["fours8_s8"]), torch.randn(8, 32)
    linear.form_(torch.float32)
    formed = linear.pulled_back(dW, {"codebook"})["codebook"]
    with torch.no_grad():
        linear.weight.neg_()
    assert torch.equal(linear.pulled_back(dW, {"codebook"})["codebook"], formed)
    joined = JoinedLinears([linear])
    moved = linear.pulled_back(dW, {"codebook"})["codebook"]
    assert not torch.equal(moved, formed)
    joined.form_(torch.float32)
    assert torch.equal(linear.pulled_back(dW, {"codebook"})["codebook"], moved)
    assert linear._chosen is not None
    release_weights(joined)
    assert linear._chosen is None


def test_codewords_are_not_kept_where_nothing_learns() -> None:
    linear = latent_linear(8, 32, SPECS["pairs6"]).requires_grad_(False)
    linear.form_(torch.float32)
    assert linear._chosen is None


def stack(kind: str, spec: LutSpec, *, is_checkpointed: bool) -> nn.Sequential:
    """Three equal layers, each of a linear alone and of two that are joined."""
    layers = nn.Sequential()
    for _ in range(3):
        pair = Pair(
            LINEARS[kind](32, 32, spec), LINEARS[kind](32, 32, spec, bias=True), is_checkpointed
        )
        for name in "kv":
            pair.add_module(name, LINEARS[kind](16, 32, spec))
        join_linears(pair, "both", ("k", "v"))
        layers.append(pair)
    return layers


def course_of(layers: nn.Sequential, dtype: torch.dtype) -> list[Tensor]:
    """Losses and gradients of two micro-batches after one forming."""
    form_moved_weights(layers, dtype)
    losses = []
    for rows in (5, 2):
        x = torch.linspace(-1, 1, rows * 32).view(rows, 32).to(dtype)
        loss = layers(x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses + [p.grad for p in layers.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "is_checkpointed"),
    [
        ("lut2", "frozen", torch.float32, True),
        ("int4_r3", "latent", torch.bfloat16, False),
        ("fours8_s8", "latent", torch.float32, True),
        ("fours8_s8", "frozen", torch.bfloat16, False),
    ],
)
def test_layers_formed_one_by_one_give_the_bits_of_all_formed_at_once(
    name: str, kind: str, dtype: torch.dtype, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(pair: Pair, x: Tensor) -> Tensor:
        return pair.both(pair.second(F.silu(pair.first(x))))

    monkeypatch.setattr(Pair, "_body", body)
    spec = SPECS[name].model_copy(update={"group_size": 16})
    whole = stack(kind, spec, is_checkpointed=is_checkpointed)
    by_layer = copy.deepcopy(whole)
    undo = form_by_layer(by_layer)

    def spoil(layer: JoinedLinears, *_: object) -> None:
        for buffer in layer.both.shared_buffer.buffers.values():
            buffer.fill_(torch.nan)

    # nobody reads what a layer has left behind
    spoiling = [layer.register_forward_hook(spoil) for layer in by_layer]
    expected, found = course_of(whole, dtype), course_of(by_layer, dtype)
    assert len(found) == len(expected) > 12
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    buffers = by_layer[0].first.shared_buffer.buffers
    assert len(buffers) == 3 and {buffer.dtype for buffer in buffers.values()} == {dtype}
    for unit in ("first", "second", "both"):
        assert len({getattr(layer, unit).formed.data_ptr() for layer in by_layer}) == 1
    for handle in spoiling:
        handle.remove()
    undo()
    linears = [*quant_linears(by_layer).values(), *(layer.both for layer in by_layer)]
    assert all(each.formed is None and each.shared_buffer is None for each in linears)
    undone = course_of(by_layer, dtype)
    assert all(torch.equal(a, b) for a, b in zip(undone[:2], expected[:2], strict=True))


def test_a_linear_that_several_layers_call_keeps_memory_of_its_own() -> None:
    shared = frozen_linear(16, 16, SPECS["lut2"])
    layers = nn.Sequential(
        *(nn.Sequential(frozen_linear(16, 16, SPECS["lut2"]), shared) for _ in range(2))
    )
    form_by_layer(layers)
    form_weights(layers, torch.float32)
    assert shared.shared_buffer is None and torch.equal(shared.formed, shared.quantized_weight())
    first, second = layers[0][0], layers[1][0]
    assert first.formed.data_ptr() == second.formed.data_ptr() != shared.formed.data_ptr()
    layers(torch.randn(2, 16)).sum().backward()
    assert all(linear.scales.grad.abs().max() > 0 for linear in (first, second, shared))


def test_backward_forms_again_of_the_codes_that_forward_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = nn.Sequential(*(latent_linear(16, 16, SPECS["fours8_s8"]) for _ in range(2)))
    form_by_layer(layers)
    sought, written = [], []
    choose, write = LutLinear._choose, LutLinear.write_
    monkeypatch.setattr(
        LutLinear, "_choose", lambda self, *a, **k: sought.append(self) or choose(self, *a, **k)
    )
    monkeypatch.setattr(
        LutLinear, "write_", lambda self, *, again: written.append(self) or write(self, again=again)
    )
    form_weights(layers, torch.float32)
    assert not sought, "only room is made"
    layers(torch.randn(2, 16)).sum().backward()
    first, second = layers
    assert written == [first, second, second, first] and sought == [first, second]


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_layer_that_gives_several_tensors_is_formed_before_the_backward_of_each(
    kind: type,
) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = frozen_linear(16, 16, SPECS["lut2"])

        def forward(self, x: Tensor) -> tuple | list:
            return kind((self.linear(x), x.sum(), "no tensor"))

    layers = nn.ModuleList([Two(), Two()])
    plain = copy.deepcopy(layers)
    form_by_layer(layers)
    x = torch.randn(2, 16)
    for model in (layers, plain):
        form_weights(model, torch.float32)
        model[1](model[0](x)[0])[0].square().sum().backward()
    for mine, its in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
