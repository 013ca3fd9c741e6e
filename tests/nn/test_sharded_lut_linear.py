"""A linear whose latent weight lies in rows on several ranks equals the one that holds it whole."""

from pathlib import Path

import pytest
import torch
from covering import covering
from quantized import SPECS, random_weight
from ranks_case import run_ranks
from torch import Tensor, nn

from qat.nn.by_layer import GatherPrefetch, form_by_layer
from qat.nn.quant_linear import LutLinear, quant_linears
from qat.nn.sharded import ShardedLutLinear
from qat.nn.step import form_moved_weights, form_weights
from qat.quant.lora import random_lora
from qat.quant.weight import dequantize
from qat.ranks import ALONE, Ranks, SimulatedRanks, Wait

O, I, B = 7, 32, 5


@pytest.mark.parametrize(
    ("spec", "has_adapter"),
    covering(["lut2", "lut4_r1", "ternary_r2", "lut2_s8", "fours8_s8"], [True, False]),
)
def test_weight_codes_and_gradients_are_those_of_the_whole(
    tmp_path: Path, spec: str, has_adapter: bool
) -> None:
    whole, parts = _made_of(spec)
    x, dy = torch.randn(2, 3, B, I), torch.randn(2, 3, B, O)  # two micro-batches of three ranks
    lora = random_lora(dequantize(parts[1]), 2, torch.Generator().manual_seed(1))
    lora = lora._replace(lora_out=torch.randn(O, 2)) if has_adapter else None
    whole.set_lora(lora)
    for name, parameter in whole.weight_parameters().items():
        parameter.requires_grad_("lora" not in name)
    _run(whole, x.flatten(1, 2), dy.flatten(1, 2))

    def act(ranks: Ranks) -> list[bool]:
        linear = ShardedLutLinear(*parts, ranks=ranks)
        linear.set_lora(lora)
        for name, parameter in linear.weight_parameters().items():
            parameter.requires_grad_("lora" not in name)
        found = [
            linear.weight.shape[0] == (2, 2, 3)[ranks.rank],
            linear.latent_size() == whole.latent_size(),
            torch.equal(linear.indices(), whole.indices()),
            torch.equal(linear.quantized_weight(), whole.quantized_weight()),
        ]
        _run(linear, x[:, ranks.rank], dy[:, ranks.rank])
        weight = linear.whole(linear.weight.grad)
        rest = {n: p for n, p in linear.weight_parameters().items() if n != "weight"}
        learning = [p.grad for p in rest.values() if p.grad is not None]
        ranks.sum_(learning)
        found.append(torch.allclose(weight, whole.weight.grad, rtol=1e-4, atol=1e-5))
        for name, parameter in rest.items():
            theirs = whole.get_parameter(name).grad
            if theirs is not None:
                found.append(torch.allclose(parameter.grad, theirs, rtol=1e-3, atol=1e-4))
        return found

    for found in run_ranks(3, act, tmp_path):
        assert len(found) > 6 and all(found)


def test_used_alone_it_pulls_back_inside_autograd(tmp_path: Path) -> None:
    whole, parts = _made_of("lut2")
    x, dy = torch.randn(2, B, I), torch.randn(2, B, O)
    whole(x.flatten(0, 1)).backward(dy.flatten(0, 1))

    def act(ranks: Ranks) -> bool:
        linear = ShardedLutLinear(*parts, ranks=ranks)
        linear(x[ranks.rank]).backward(dy[ranks.rank])
        return torch.allclose(linear.weight.grad, whole.weight.grad[linear.rows], atol=1e-5)

    assert run_ranks(2, act, tmp_path) == [True, True]


def test_a_rehearsal_takes_a_share_and_gives_whole_weights() -> None:
    _, parts = _made_of("lut2")
    linear = ShardedLutLinear(*parts, ranks=SimulatedRanks(0, 3, torch.device("cpu")))
    _run(linear, torch.randn(2, B, I), torch.randn(2, B, O))
    assert linear.weight.shape == linear.weight.grad.shape == (2, I)
    assert linear.quantized_weight().shape == (O, I) and linear.scales.grad.shape[0] == O


@pytest.mark.parametrize(("is_by_layer", "is_safe"), [(True, False), (False, False), (True, True)])
def test_exchanges_beside_the_work_change_no_bit(
    tmp_path: Path, is_by_layer: bool, is_safe: bool
) -> None:
    """Three steps of two ranks, each over its micro-batch, beside one process that sees both."""
    x = torch.randn(3, 2, B, I)
    parts = [_made_of("lut2", I, seed)[1] for seed in range(8)]
    alone = _layers(parts, ALONE)
    expected = _course(alone, x, ALONE, is_by_layer=is_by_layer)

    def act(ranks: Ranks) -> list[bool]:
        ranks.is_safe = is_safe
        mine = _layers(parts, ranks)
        found = _course(mine, x[:, ranks.rank, None], ranks, is_by_layer=is_by_layer)
        return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]

    assert not torch.equal(expected[0], parts[0][0])
    assert run_ranks(2, act, tmp_path) == [[True] * 8] * 2


class Told(SimulatedRanks):
    """Two ranks that keep a log of their exchanges."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"))
        self.log: list[str] = []

    def _told(self, name: str, wait: Wait) -> Wait:
        self.log.append(name)
        return lambda: (self.log.append(f"{name} ends"), wait())

    def _all_gather(self, out: Tensor | list[Tensor], given: Tensor) -> Wait:
        return self._told("gather", super()._all_gather(out, given))

    def _all_to_all(self, found: Tensor, given: Tensor, *sizes: list[int]) -> Wait:
        return self._told("sum", super()._all_to_all(found, given, *sizes))


FIRST = ["gather", "gather ends"]
"""Exchanges of a first layer, whose gather was not started ahead."""


def _told_layers(*, is_safe: bool = False) -> tuple[Told, nn.Sequential]:
    ranks = Told()
    ranks.is_safe = is_safe
    layers = _layers([_made_of("lut2", I, seed)[1] for seed in range(3)], ranks, size=1)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, index=index: ranks.log.append(f"run {index}"))
    return ranks, layers


def test_a_layers_weights_travel_while_the_one_before_it_runs() -> None:
    ranks, layers = _told_layers()
    form_by_layer(layers)
    form_weights(layers, torch.float32)
    out = layers(torch.randn(B, I))
    ahead = ["gather", "run 0", "gather ends", "gather", "run 1", "gather ends", "run 2"]
    assert ranks.log == FIRST + ahead
    ranks.log.clear()
    out.sum().backward()
    # a gather ends where its layer begins; sums of so few linears are not waited for
    ahead = ["gather", "sum", "gather ends", "gather", "sum", "gather ends", "sum"]
    assert ranks.log == FIRST + ahead
    assert all(layer[0].weight.grad is None for layer in layers)
    ranks.finish_deferred()
    assert ranks.log[-3:] == ["sum ends"] * 3
    assert all(layer[0].weight.grad is not None for layer in layers)


def test_nothing_travels_beside_the_work_of_safe_ranks() -> None:
    ranks, layers = _told_layers(is_safe=True)
    form_by_layer(layers)
    form_weights(layers, torch.float32)
    layers(torch.randn(B, I)).sum().backward()
    runs = [each for each in ranks.log if each.startswith("run")]
    exchanges = [each for each in ranks.log if each not in runs]
    assert runs == ["run 0", "run 1", "run 2"]
    assert exchanges[1::2] == [f"{each} ends" for each in exchanges[::2]]
    assert exchanges.count("sum") == 3 and exchanges.count("gather") >= 3
    for place, each in enumerate(ranks.log):
        assert each.endswith("ends") or each in runs or ranks.log[place + 1] == f"{each} ends"
    assert all(layer[0].weight.grad is not None for layer in layers)  # nothing is left to wait for


def test_all_layers_weights_travel_at_once_and_each_waits_for_its_own() -> None:
    ranks, layers = _told_layers()
    prefetch = GatherPrefetch(layers, layers)
    x, want = torch.randn(B, I), ["run 0", "run 1", "run 2"]
    for _ in range(2):
        prefetch.form(torch.float32)
        out = layers(x)
        ends = [each for number in range(3) for each in ("gather ends", f"run {number}")]
        assert ranks.log == ["gather"] * 3 + ends
        ranks.log.clear()
    prefetch.form(torch.float32)
    prefetch.end()
    assert ranks.log == ["gather"] * 3 + ["gather ends"] * 3
    ranks.log.clear()
    assert torch.equal(layers(x), out) and ranks.log == want


def test_weights_that_nobody_came_for_are_formed_anew() -> None:
    ranks, layers = _told_layers()
    layers[0].requires_grad_(False)
    end = form_by_layer(layers)
    form_weights(layers, torch.float32)
    layers(torch.randn(B, I)).sum().backward()
    assert ranks.log[-2:] == ["gather", "sum"], "of the first layer, whose backward has no work"
    with torch.no_grad():
        layers[0][0].weight.mul_(-1)
    ranks.log.clear()
    layers[0](torch.randn(B, I))
    assert ranks.log == ["gather ends", *FIRST, "gather", "run 0"]
    assert torch.equal(layers[0][0].formed, layers[0][0].quantized_weight())
    end()
    assert ranks.log[-1] == "gather ends"


def _layers(parts: list[tuple], ranks: Ranks, size: int = 2) -> nn.Sequential:
    """Layers of so many linears, whose latent weights alone learn."""
    made = [
        LutLinear(*each) if ranks.size == 1 else ShardedLutLinear(*each, ranks=ranks)
        for each in parts
    ]
    for linear in made:
        linear.requires_grad_(False)
        linear.weight.requires_grad_()
    pairs = (made[first : first + size] for first in range(0, len(made), size))
    return nn.Sequential(*(nn.Sequential(*pair, nn.Tanh()) for pair in pairs))


def _course(model: nn.Sequential, x: Tensor, ranks: Ranks, *, is_by_layer: bool) -> list[Tensor]:
    """The whole latent weights after plain descent, a step for each of the micro-batches' stacks"""
    if is_by_layer:
        form_by_layer(model)
    linears = quant_linears(model).values()
    for batches in x:
        form_moved_weights(model, torch.float32)
        for batch in batches:
            model(batch).square().sum().backward()
        ranks.finish_deferred()
        for linear in linears:
            linear.weight.data -= 0.1 * linear.weight.grad
            linear.weight.grad = None
    rows = (linear.weight.detach() for linear in linears)
    return [t if ranks.size == 1 else ranks.gather_rows(t, I) for t in rows]


def _made_of(name: str, rows: int = O, seed: int = 0) -> tuple[LutLinear, tuple]:
    torch.manual_seed(seed)
    quantized = random_weight(rows, I, SPECS[name])
    latent = dequantize(quantized) + 0.01 * torch.randn(rows, I)
    parts = latent, quantized, torch.randn(rows), SPECS[name]
    return LutLinear(*parts), parts


def _run(linear: LutLinear, x: Tensor, dy: Tensor) -> None:
    """The three acts of a step over all micro-batches."""
    linear.form_(torch.float32)
    for one, gradient in zip(x, dy, strict=True):
        linear(one).backward(gradient)
    if isinstance(linear, ShardedLutLinear):
        linear.ranks.finish_deferred()
