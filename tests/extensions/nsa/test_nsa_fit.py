"""Gates and pools learn what the blocks that are left out would have said."""

import pytest
import torch
from nsa_model_case import small, sparse_model
from torch import nn

from qat.convert.calibrate import TokenBatch
from qat.extensions.nsa.fit import attention_errors, fit_attention, natural_size
from qat.extensions.nsa.swap import nsa_modules, unswap_attention
from qat.models.language_model import LanguageModel


def batches(length: int, count: int = 2) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(320, (count, 2, length), generator=generator)
    return [TokenBatch(each, torch.arange(length).expand(2, -1)) for each in ids]


def sparse(**changes: object) -> LanguageModel:
    return LanguageModel(sparse_model(config=small(num_selected=3, **changes)))


def test_errors_are_those_of_the_output_on_the_dense_models_input() -> None:
    model, (tokens,) = sparse(), batches(100, 1)
    inputs, outputs = {}, {}

    def note(into: dict):
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
            into[module.layer_idx] = (kwargs, output[0])

        return hook

    found = list(attention_errors(model, [tokens]).values())
    modules = list(nsa_modules(model.model).values())
    with torch.no_grad():
        dense = LanguageModel(sparse_model(config=small(num_selected=3)))
        unswap_attention(dense.model)
        hooks = [
            layer.self_attn.register_forward_hook(note(inputs), with_kwargs=True)
            for layer in dense.model.model.layers
        ]
        dense.hidden(*tokens)
        for module in modules:
            kwargs, target = inputs[module.layer_idx]
            outputs[module.layer_idx] = module(**kwargs)[0] - target, target
    for hook in hooks:
        hook.remove()
    expected = [(off.norm() / target.norm()).item() for off, target in outputs.values()]
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("changes", [{}, {"pooling": "weighted"}, {"mode": "sigmoid"}])
def test_every_layer_comes_closer_and_nothing_else_moves(changes: dict) -> None:
    model = sparse(**changes)
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    fits = fit_attention(model, batches(120), steps=12)
    assert [fit.name for fit in fits] == [f"model.layers.{n}.self_attn" for n in range(2)]
    share = 1.0 if "mode" in changes else 0.97  # its gates begin where their slope is small
    for fit in fits:
        assert fit.error_after < share * fit.error_before
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, before[name]) == (".nsa." not in name), name
        assert parameter.grad is None and parameter.requires_grad
    after = [*attention_errors(model, batches(120)).values()]
    assert after == pytest.approx([fit.error_after for fit in fits])


def test_without_parameters_or_beyond_need_nothing_is_fitted() -> None:
    for model, length in ((sparse(mode="merged"), 120), (sparse(), 48)):
        assert fit_attention(model, batches(length), steps=2) == []
    errors = attention_errors(model, batches(48))  # within its reach it is dense
    assert max(errors.values()) < 1e-6


def test_a_step_moves_gates_by_about_its_rate() -> None:
    assert natural_size("self_attn.nsa.gates.weight", torch.zeros(6, 64)) == 1 / 64
    assert natural_size("self_attn.nsa.gates.bias", torch.zeros(6)) == 1.0
    assert natural_size("self_attn.nsa.pool_key", torch.full((2, 4), 0.25)) == 0.25
