"""Generation with a cache says what whole rows say, whatever the batch and however it goes on."""

import pytest
import torch
from covering import covering
from nsa_model_case import opened_model, small
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from qat.errors import ConfigError
from qat.extensions.nsa.cache import NSALayer
from qat.nn.swap import CACHE

CONFIGS = {
    "residual": small(),
    "merged": small(mode="merged"),
    "pre": small(pooling="weighted", cmp_rope="pre", select_tile=1),
    "tile 32": small(mode="sigmoid", select_tile=32),
}
LENGTH = 90
IDS = torch.arange(LENGTH)[None] * 11 % 320


def logits(
    model: PreTrainedModel, ids: Tensor, cache: Cache | None = None, **inputs: object
) -> Tensor:
    return model(ids, **{CACHE: cache}, **inputs).logits


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@torch.no_grad()
def test_token_by_token_equals_the_whole_row(config) -> None:
    model = opened_model(config)
    whole = logits(model, IDS)
    for begin in (1, 8, 16, 63, 65):
        cache = DynamicCache(config=model.config)
        pieces = [logits(model, IDS[:, :begin], cache=cache)]
        middle = begin + 3  # several at once on a filled cache
        pieces.append(logits(model, IDS[:, begin:middle], cache=cache))
        for at in range(middle, {1: 40, 63: 80}.get(begin, middle + 6)):
            assert cache.get_seq_length() == at
            pieces.append(logits(model, IDS[:, at : at + 1], cache=cache))
        found = torch.cat(pieces, 1)
        assert (found - whole[:, : found.shape[1]]).abs().max() <= 1e-5


@pytest.mark.parametrize(("name", "side"), covering(CONFIGS, ["left", "right"]))
@torch.no_grad()
def test_padded_rows_go_on_as_each_alone(name: str, side: str) -> None:
    model = opened_model(CONFIGS[name])
    lengths, S = (70, 41, 5), 72
    mask = torch.zeros(3, S, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        row[S - length :] = 1 if side == "left" else 0
        row[:length] = 1 if side == "right" else row[:length]
    ids = torch.zeros(3, S, dtype=torch.long)
    for row, length in zip(range(3), lengths, strict=True):
        ids[row, mask[row].bool()] = IDS[0, :length]
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits(model, ids, attention_mask=mask, position_ids=positions, cache=cache)
    whole = logits(model, IDS)
    for step in range(18):
        places = torch.tensor([[length + step] for length in lengths])
        mask = nn.functional.pad(mask, (0, 1), value=1)
        found = logits(model, IDS[0, places], attention_mask=mask, position_ids=places, cache=cache)
        expected = torch.stack([whole[0, p] for p in places])
        assert (found - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_generate_equals_generation_without_a_cache() -> None:
    model = opened_model()
    ids = torch.randint(1, 320, (2, 56))
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    ids[0, :13] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    said = model.generate(ids, **asked)
    assert torch.equal(said, model.generate(ids, use_cache=False, **asked))
    beams = model.generate(ids, num_beams=3, **asked)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **asked))


@torch.no_grad()
def test_a_cache_goes_back_and_its_rows_change_places() -> None:
    model = opened_model()
    whole = logits(model, torch.cat([IDS, IDS.flip(1)]))
    cache = DynamicCache(config=model.config)
    logits(model, torch.cat([IDS, IDS.flip(1)])[:, :70], cache=cache)
    for at in range(70, 84):  # beyond the end of a tile, and back
        logits(model, torch.full((2, 1), at), cache=cache)
    for layer in cache.layers:
        layer.crop(-14)
        layer.crop(60)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.get_seq_length() == 60
    found = logits(model, torch.cat([IDS, IDS.flip(1)])[:, 60:], cache=cache)
    assert (found - whole[:, 60:]).abs().max() <= 1e-5
    cache.reset()
    assert cache.get_seq_length() == 0
    found = logits(model, IDS, cache=cache)
    assert (found - whole[:1]).abs().max() <= 1e-5


@torch.no_grad()
def test_below_min_len_decoding_is_dense_too() -> None:
    model, dense = opened_model(small(min_len=80)), opened_model(small(num_selected=20))
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :1], cache=cache)
    assert isinstance(cache.layers[0], NSALayer)
    for layer in dense.modules():
        if hasattr(layer, "gates") and layer.gates is not None:
            nn.init.zeros_(layer.gates.weight)
            nn.init.zeros_(layer.gates.bias)
    found = logits(model, IDS[:, 1:79], cache=cache)
    assert (found - logits(dense, IDS[:, :79])[:, 1:]).abs().max() <= 1e-5


@torch.no_grad()
def test_other_caches_are_refused() -> None:
    model = opened_model()
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ConfigError, match="a cache of StaticLayer, but .* cache_implementation"):
        logits(model, IDS[:, :4], cache=static)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    with pytest.raises(ConfigError, match="an offloaded cache, but .* cache_implementation"):
        logits(model, IDS[:, :4], cache=offloaded)
    model = opened_model(CONFIGS["pre"])
    cache = DynamicCache(config=model.config)
    logits(model, IDS[:, :4], cache=cache)
    with pytest.raises(ConfigError, match="cmp_rope=pre, .* without an assistant"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="takes no other layer's keys"):
        cache.update(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8), 0)
