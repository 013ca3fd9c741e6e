"""A swapped model reads tokens of the past and its own document, however its rows are laid out."""

import pytest
import torch
from covering import covering
from nsa_model_case import opened_model, small, sparse_model
from torch import Tensor
from transformers import PreTrainedModel

from qat.errors import ConfigError

CONFIGS = [small(mode=mode) for mode in ("residual", "sigmoid", "merged")] + [
    small(pooling="weighted", cmp_rope="pre", select_tile=1)
]
LENGTH = 100
IDS = torch.arange(LENGTH)[None] * 11 % 320


def hidden(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:
    return model.model(ids, **inputs).last_hidden_state


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_nothing_leaks_from_the_future(config) -> None:
    model = opened_model(config)
    before = hidden(model, IDS)
    for place in (1, 16, 65, 99):
        changed = IDS.clone()
        changed[:, place:] = (changed[:, place:] + 5) % 320
        after = hidden(model, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place:], before[:, place:])


@pytest.mark.parametrize(("config", "implementation"), covering(CONFIGS, ["sdpa", "eager"]))
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(config, implementation) -> None:
    model = opened_model(config)
    model.set_attn_implementation(implementation)
    mask = torch.ones(3, LENGTH + 10, dtype=torch.long)
    mask[0, :10] = mask[1, -10:] = mask[2, 40:50] = 0  # left, right, between
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = IDS.expand(3, -1).flatten()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = hidden(model, ids, attention_mask=mask, position_ids=positions)
    alone = hidden(model, IDS)
    for row, real in zip(padded, mask.bool(), strict=True):
        torch.testing.assert_close(row[real][None], alone, rtol=0, atol=1e-5)
    assert padded.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(config) -> None:
    model = opened_model(config)
    lengths = (37, 16, 1, 46)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    before = hidden(model, IDS, position_ids=positions)
    changed = IDS.clone()
    changed[:, 37:53] += 1
    after = hidden(model, changed, position_ids=positions)
    is_same = (after == before).all(-1)[0]
    assert is_same.tolist() == [True] * 37 + [False] * 16 + [True] * 47
    alone = hidden(model, IDS[:, :37])
    torch.testing.assert_close(before[:, :37], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "config"), covering(2 * [1, 7, 8, 15, 16, 17, 65], CONFIGS))
def test_any_length_is_finite_with_its_gradients(length, config) -> None:
    model = opened_model(config)
    found = hidden(model, IDS[:, :length])
    found.square().sum().backward()
    assert found.isfinite().all()
    for name, parameter in model.model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_no_longer_than_the_rotary_embedding() -> None:
    ids = torch.zeros(1, 129, dtype=torch.long)
    with pytest.raises(ConfigError, match="has 129 positions, .* made for 128; shorten"):
        hidden(sparse_model(), ids)
