"""Decoding one position at a time equals whole rows, by plain PyTorch and by the kernels."""

import pytest
import torch
from nsa_case import nsa_inputs, small
from nsa_decode_case import decoded, upto
from three_way import assert_no_worse_than_eager

from qat.extensions.nsa.kernels import decode, reference
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.decode import NONE, Past, append, attend, choose, listed
from qat.extensions.nsa.kernels.select import Inputs, select


@pytest.fixture
def both_ways(is_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "use_triton", lambda *_: is_kernel)


def whole(inputs: Inputs, config: NSAConfig) -> torch.Tensor:
    return reference.attend(inputs, select(inputs, config), config)


@pytest.mark.parametrize(
    ("tile", "bound", "mode"),
    [
        (1, 0.3, "residual"),
        (1, 0.0, "merged"),
        (16, 1.0, "residual"),
        (32, 0.0, "merged"),
        (64, 0.0, "residual"),
    ],
)
def test_positions_one_by_one_equal_the_whole_row(mode: str, tile: int, bound: float) -> None:
    config = small(mode=mode, select_tile=tile, bound=bound, num_selected=max(4, tile // 8))
    inputs = nsa_inputs(config, 80, dtype=torch.float32)
    for begin, end in ((0, 80), (1, 10), (8, 18), (63, 73), (65, 80)):
        part = upto(inputs, end, config)
        found, kept = decoded(part, config, begin)
        assert (found - whole(part, config)[:, begin:]).abs().max() <= 1e-5
        assert torch.equal(kept.pooled_keys, part.pooled_key)
        assert torch.equal(kept.blocks, listed(select(part, config), config.num_selected))


@pytest.mark.usefixtures("both_ways")
def test_weighted_pools_and_spare_room() -> None:
    config = small(pooling="weighted", num_selected=3, window=5)
    weights = tuple(torch.rand(2, config.compress_block) / 4 for _ in range(2))
    inputs = nsa_inputs(config, 75, dtype=torch.float32)
    inputs = upto(inputs, 75, config, weights)
    found, kept = decoded(inputs, config, 69, room=101, weights=weights)
    assert (found - whole(inputs, config)[:, 69:]).abs().max() <= 1e-5
    C = config.num_compressed(75)
    torch.testing.assert_close(kept.pooled_values[:, :, :C], inputs.pooled_value)
    assert not kept.pooled_values[:, :, C:].any()


@pytest.mark.slow
@pytest.mark.usefixtures("both_ways")
def test_rows_of_different_lengths_are_each_their_own() -> None:
    config = small(bound=0.3)  # everything that can be kept is there
    inputs = nsa_inputs(config, 80, dtype=torch.float32)
    lengths = (38, 64)
    pasts = [decoded(upto(inputs, n, config), config, n - 1, room=80)[1] for n in lengths]
    rows = [[tensor[row] for tensor in past] for row, past in enumerate(pasts)]
    kept = Past(*(torch.stack(pair) for pair in zip(*rows, strict=True)))
    for ahead in range(3):
        places = torch.tensor([n + ahead for n in lengths])
        query, key, value = (_at(tensor, places, 2) for tensor in inputs[:3])
        append(kept, key, value, places, config=config)
        choose(query, kept, places, config=config, scale=inputs.scale)
        gates = _at(inputs.gates, places, 1)
        found = attend(query, kept, places, gates=gates, config=config, scale=inputs.scale)
        expected = _at(whole(inputs, config), places, 1)
        assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("heads", "mode", "lengths"),
    [((4, 2), "residual", (1, 7, 139)), ((5, 1), "sigmoid", (33,)), ((2, 2), "merged", (8, 291))],
)
def test_the_kernel_errs_no_more_than_plain_pytorch(
    heads: tuple[int, int], mode: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    config = small(mode=mode, window=70, num_selected=9, select_tile=32)
    for length in lengths:
        inputs = nsa_inputs(config, length, heads=heads, width=24, dtype=torch.float32)
        eager, _ = decoded(inputs, config, length - 1)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "use_triton", lambda *_: True)
            found, _ = decoded(inputs, config, length - 1, room=300)
        exact = whole(doubled(inputs, config), config)[:, -1:]
        assert_no_worse_than_eager(found, eager, exact, slack=2e-6)


def test_lists_end_with_none() -> None:
    selection = torch.tensor([[False, True, False, True], [False] * 4])
    assert listed(selection, 3).tolist() == [[1, 3, NONE], [NONE] * 3]
    assert listed(selection, 6).tolist() == [[1, 3] + [NONE] * 4, [NONE] * 6]


def doubled(inputs: Inputs, config: NSAConfig) -> Inputs:
    """Convert the inputs to float64 and recompute their pools."""
    values = {
        name: None if tensor is None else tensor.double()
        for name, tensor in inputs._asdict().items()
        if name != "scale"
    }
    exact = Inputs(**values, scale=inputs.scale)
    return upto(exact, exact.length, config)


def _at(tensor: torch.Tensor, places: torch.Tensor, axis: int) -> torch.Tensor:
    """`(B, ...)`: each row's slice at its own place."""
    return torch.stack(
        [row.select(axis - 1, p) for row, p in zip(tensor, places.tolist(), strict=True)]
    )
