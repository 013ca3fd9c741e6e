"""A swapped model by kernels and by the reference, compiled or not, and what each token may see."""

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from qat.extensions.nsa.kernels.config import EACH, NSAConfig
from qat.extensions.nsa.swap import swap_attention
from qat.models.language_model import LanguageModel
from qat.models.regions import Regions

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_compiled_yet")]

DEVICE = "cuda"
B, S = 2, 700
WORSE = 1.5
"""Factor on the reference's error that the kernels' error may reach, before `SLACKS`."""
SLACKS = {torch.float32: 5e-4, torch.bfloat16: 2e-3}
"""Errors that are allowed on top, as shares of the norm of the exact result."""
NUM_SELECTED = {torch.float32: 4, torch.bfloat16: 6}
"""Selected blocks of six: bfloat16 may round near ties apart, so it selects all."""
SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_hidden_layers": 1,
    "initializer_range": 0.1,
}
MODES = {
    "residual": {},
    "merged": {"mode": "merged"},
    "weighted": {"pooling": "weighted", "cmp_rope": "pre"},
}


def swapped(mode: str, backend: str, num_selected: int, **more: float) -> LanguageModel:
    """A model of one layer, all of whose branches say something."""
    model = tiny_model(use_cache=False, **SHAPE)
    sizes = {"window": 256, "num_selected": num_selected, **MODES[mode], **more}
    swap_attention(model, NSAConfig(backend=backend, **sizes))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".nsa." in name:
            nn.init.normal_(parameter, std=0.2)
    return LanguageModel(model.to(DEVICE))


def results(model: LanguageModel, dtype: torch.dtype, *, is_packed: bool) -> dict[str, Tensor]:
    """The hidden state and all gradients."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(320, (B, S), generator=generator).to(DEVICE)
    positions = torch.arange(S).expand(B, S) % (257 if is_packed else S)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model.hidden(ids, positions.to(DEVICE), is_packed=is_packed)
    # of the last norm's squares the sum hardly changes: its gradient would be rounding
    weights = torch.randn(hidden.shape, generator=generator).to(DEVICE)
    (hidden.float() * weights).sum().backward()
    layer = model.model.model.layers[0]
    found = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    model.model.zero_grad()
    return {"hidden": hidden.detach(), **found}


@pytest.mark.parametrize("dtype", SLACKS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_kernels_and_the_reference_agree(
    dtype: torch.dtype, mode: str, is_packed: bool, is_compiled: bool
) -> None:
    count = NUM_SELECTED[dtype]
    exact = results(swapped(mode, "reference", count), torch.float32, is_packed=is_packed)
    plain = results(swapped(mode, "reference", count), dtype, is_packed=is_packed)
    model = swapped(mode, "flex", count)
    regions = Regions(model.model, is_compiled=is_compiled, recompute_every=1)
    regions.install()
    found = results(model, dtype, is_packed=is_packed)
    regions.remove()
    layer = model.model.model.layers[0].self_attn
    assert layer.route(S, torch.device(DEVICE)).backend == "flex"
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        mine, other = (distance(each[name], value) for each in (found, plain))
        assert mine <= WORSE * other + SLACKS[dtype], f"{name}: {mine:.2g}, plain {other:.2g}"


def distance(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact.float()).norm() / exact.float().norm()).item()


@torch.no_grad()
def test_a_padded_row_equals_the_row_alone() -> None:
    model = swapped("residual", "auto", 4).model
    ids = torch.randint(320, (1, 600), device=DEVICE)
    mask = torch.ones(2, S, dtype=torch.long, device=DEVICE)
    mask[0, :100] = mask[1, 600:] = 0
    padded = torch.zeros_like(mask)
    padded[mask.bool()] = ids.expand(2, -1).flatten()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits
    alone = model(ids).logits[0]
    for row, real in zip(found, mask.bool(), strict=True):
        torch.testing.assert_close(row[real], alone, rtol=0, atol=1e-2)


ROUTES = {"flex": {}, "gather": EACH, "dense": None}
"""Settings with which each kernel takes all layers; None for attention as the model came."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("length", [64, S])
@torch.no_grad()
def test_nothing_leaks_from_the_future(route: str, length: int) -> None:
    sizes = ROUTES[route]
    if sizes is None:
        model = LanguageModel(tiny_model(use_cache=False, **SHAPE).to(DEVICE))
    else:
        model = swapped("residual", route, 4, **sizes)
        layer = model.model.model.layers[0].self_attn
        assert layer.route(length, torch.device(DEVICE)).backend == route
    ids = torch.arange(length, device=DEVICE)[None] * 11 % 320
    positions = torch.arange(length, device=DEVICE)[None]
    before = model.hidden(ids, positions, is_packed=False)
    for place in (1, length // 2, length - 1):
        changed = ids.clone()
        changed[:, place:] = (changed[:, place:] + 5) % 320
        after = model.hidden(changed, positions, is_packed=False)
        torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-5)
        assert (after[:, place:] - before[:, place:]).abs().amax() > 1e-2
