"""Sparse attention goes in and out of a dense model; what it cannot go into is refused."""

import pytest
import torch
from nsa_model_case import SMALL, small, sparse_model
from tiny import tiny_model
from torch import nn

from qat.errors import CheckpointError, ConfigError
from qat.extensions.nsa.attention import NSAParts
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.swap import nsa_config, nsa_modules, swap_attention, unswap_attention
from qat.nn.swap import linear_names

IDS = torch.arange(2 * SMALL.reach).view(2, -1) * 7 % 320


@pytest.mark.parametrize(
    ("mode", "pooling", "cmp_rope", "architecture"),
    [
        ("residual", "mean", "pre", "qwen3"),
        ("residual", "mean", "post", "llama"),
        ("residual", "weighted", "pre", "llama"),
        ("residual", "weighted", "post", "qwen3"),
        ("merged", "mean", "post", "qwen3"),
    ],
)
def test_swapped_equals_dense_up_to_its_reach(architecture, mode, pooling, cmp_rope) -> None:
    model = tiny_model(architecture, use_cache=False)
    lengths = (1, 7, 8, 15, 16, 17, SMALL.reach)
    expected = [model(IDS[:, :length]).logits for length in lengths]
    swap_attention(model, small(mode=mode, pooling=pooling, cmp_rope=cmp_rope))
    for length, logits in zip(lengths, expected, strict=True):
        assert (model(IDS[:, :length]).logits - logits).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["residual", "sigmoid", "merged"])
def test_swapped_out_the_model_is_what_it_was(mode) -> None:
    dense, model = tiny_model(use_cache=False), sparse_model(config=small(mode=mode))
    for parameter in (p for name, p in model.named_parameters() if ".nsa." in name):
        nn.init.normal_(parameter)
    unswap_attention(model)
    assert torch.equal(model(IDS).logits, dense(IDS).logits)
    assert list(model.state_dict()) == list(dense.state_dict())
    assert model.config.to_dict() == dense.config.to_dict()
    assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]


def test_names_stay_and_gates_are_new() -> None:
    dense, model = tiny_model(), sparse_model()
    new = {name for name in model.state_dict() if name not in dense.state_dict()}
    layers = range(2)
    assert new == {
        f"model.layers.{n}.self_attn.nsa.gates.{part}"
        for n in layers
        for part in ("weight", "bias")
    }
    assert linear_names(model) == linear_names(dense)
    weighted = sparse_model(config=small(pooling="weighted")).state_dict()
    pools = {name.rpartition(".")[2] for name in weighted.keys() - model.state_dict().keys()}
    assert pools == {"pool_key", "pool_value"}
    assert (
        sparse_model(config=small(mode="merged")).state_dict().keys() == dense.state_dict().keys()
    )


BEGIN = {"residual": [0.0, 1.0, 0.0], "sigmoid": [0.00247, 0.99753, 0.00247]}


@pytest.mark.parametrize(("mode", "gates"), BEGIN.items())
@torch.no_grad()
def test_gates_begin_with_selection_and_pools_as_the_mean(mode: str, gates: list[float]) -> None:
    config = NSAConfig(mode=mode, pooling="weighted")
    parts = NSAParts(config, hidden_size=16, num_heads=4, num_key_heads=2)
    found = parts.gates_of(torch.randn(2, 3, 16))
    torch.testing.assert_close(found, torch.tensor(gates).expand(2, 3, 4, 3), rtol=0, atol=1e-5)
    for weights in (parts.pool_key, parts.pool_value):
        assert torch.equal(weights, torch.full((2, 32), 1 / 32))


def test_some_layers_alone() -> None:
    model = sparse_model(config=small(layers=(1,)))
    assert list(nsa_modules(model)) == ["model.layers.1.self_attn"]
    assert nsa_config(model) == nsa_config(model.config) == small(layers=(1,))
    assert nsa_config(tiny_model()) is None


def test_new_parameters_have_the_models_dtype() -> None:
    model = tiny_model().bfloat16()
    swap_attention(model, SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_what_cannot_be_swapped_is_refused() -> None:
    with pytest.raises(CheckpointError, match="already, expected dense attention; swap it out"):
        swap_attention(sparse_model(), SMALL)
    with pytest.raises(ConfigError, match=r"layers names 2, but the model's layers are 0 ... 1"):
        swap_attention(tiny_model(), small(layers=(0, 2)))
    for layers in ((), (1, 1)):
        with pytest.raises(ConfigError, match="names no layer or one twice, expected some, once"):
            swap_attention(tiny_model(), small(layers=layers))
    with pytest.raises(CheckpointError, match="has Gemma3Attention in layers of .*sliding"):
        swap_attention(tiny_model("gemma3"), SMALL)
    model = tiny_model()
    del model.model.layers[1].self_attn.v_proj
    with pytest.raises(CheckpointError, match="has no v_proj, expected separate query"):
        swap_attention(model, SMALL)
    assert not nsa_modules(model)
    assert nsa_config(model) is None
    model.config.nsa = {"window": 0}
    with pytest.raises(CheckpointError, match="'nsa' of config.json: window=0: .*convert"):
        nsa_config(model)
