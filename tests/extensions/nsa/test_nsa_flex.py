"""FlexAttention's lists of blocks against the masks of the reference."""

import pytest
import torch
from covering import covering
from nsa_case import nsa_inputs
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import flex, reference
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.flex import EDGE
from qat.extensions.nsa.kernels.select import select

WHOLE = dict(num_selected=5, local_blocks=2, window=200)
FINE = dict(select_block=32, select_tile=16, num_selected=9, window=70)
COARSE = dict(select_block=256, select_tile=256, num_selected=4, init_blocks=2, local_blocks=1)
MIXED = dict(select_block=64, select_tile=256, num_selected=9)
SIZES = (WHOLE, FINE, COARSE, MIXED, {**WHOLE, "compress_block": 48, "compress_stride": 16})


def many_documents(S: int) -> Tensor:
    """Return documents within a tile, over several tiles, and from the start of a tile."""
    places = torch.arange(S)
    rows = [[0, 5, 130, 256, 300, 390], [0, 200, 201]]
    found = [torch.stack([torch.where(places >= s, s, 0) for s in row]).amax(0) for row in rows]
    return torch.stack(found)


def dense_mask(mask: BlockMask, size: tuple[int, int]) -> Tensor:
    """The lists of tiles as a mask of queries and keys; those of blocks must say the same."""
    rows, heads = size
    tiles, blocks = (length // EDGE for length in mask.seq_lengths)
    kinds = [
        (mask.kv_num_blocks, mask.kv_indices, mask.q_num_blocks, mask.q_indices),
        (
            mask.full_kv_num_blocks,
            mask.full_kv_indices,
            mask.full_q_num_blocks,
            mask.full_q_indices,
        ),
    ]
    found = []
    for counts, indices, turned_counts, turned_indices in kinds:
        if counts is None:
            found.append(torch.zeros(rows, heads, tiles, blocks, dtype=torch.bool))
            continue
        assert {each.dtype for each in (counts, indices, turned_counts, turned_indices)} == {
            torch.int32
        }
        of_tiles = unlisted(counts, indices, blocks)
        assert torch.equal(of_tiles.mT, unlisted(turned_counts, turned_indices, tiles))
        found.append(of_tiles.expand(rows, heads, -1, -1))
    partial, full = found
    assert not (partial & full).any()
    row, head, query, key = torch.meshgrid(
        *(torch.arange(n) for n in (rows, heads, *mask.seq_lengths)), indexing="ij"
    )
    sees = mask.mask_mod(row, head, query, key)
    return wide(full) | (wide(partial) & sees)


def unlisted(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """`(..., rows, columns)` bool; no column may be named twice."""
    found = torch.zeros(*counts.shape, columns, dtype=torch.int32)
    is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
    found.scatter_add_(-1, indices.long(), is_listed.int())
    assert found.max() <= 1
    return found.bool()


def wide(blocks: Tensor) -> Tensor:
    return blocks.repeat_interleave(EDGE, -1).repeat_interleave(EDGE, -2)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    """Record the arguments of each call of FlexAttention, whose results are zeros."""
    found = []

    def record(query: Tensor, key: Tensor, value: Tensor, **kwargs: object) -> Tensor:
        found.append((query, key, value, kwargs["block_mask"]))
        return torch.zeros_like(query)

    monkeypatch.setattr(flex, "flex_attention", record)
    return found


@pytest.mark.parametrize(
    ("sizes", "S", "is_packed"), covering(2 * SIZES, [401, 100], [False, True])
)
def test_blocks_and_masks_are_those_of_the_reference(
    calls: list, sizes: dict, S: int, is_packed: bool
) -> None:
    config = NSAConfig(**sizes)
    inputs = nsa_inputs(config, S, first=many_documents(S) if is_packed else None)
    selection = select(inputs, config)
    flex.attend_compiling(inputs, config, selection)
    B, H, C = 2, 4, inputs.pooled_key.shape[2]
    assert {call[3].kv_num_blocks.shape[1] for call in calls} == {H}  # one head's would be row 0's
    selected = reference.selected_mask(inputs, selection, config).repeat_interleave(2, 1)
    window = reference.window_mask(inputs, config)[:, None].expand(B, H, -1, -1)
    assert torch.equal(dense_mask(calls[0][3], (B, H))[:, :, :S, :S], selected)
    assert torch.equal(dense_mask(calls[-1][3], (B, H))[:, :, :S, :S], window)
    if C:
        parts = calls[1][0].shape[0] // B
        found = dense_mask(calls[1][3], (B * parts, H)).unflatten(0, (B, parts))
        found = found.transpose(1, 2).flatten(2, 3)[:, :, :S, :C]
        expected = reference.compressed_mask(inputs, config)[:, None].expand(B, H, -1, -1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("is_packed", [False, True])
def test_copies_of_the_first_blocks_are_read_in_their_place(calls: list, is_packed: bool) -> None:
    config = NSAConfig(mode="merged", **WHOLE, init_blocks=2)
    S = 5000
    assert flex.copies_of(40, config) == (2, 2)
    first = torch.where(torch.arange(S) < 3000, 0, 3000).expand(2, -1) if is_packed else None
    inputs = nsa_inputs(config, S, heads=(1, 1), first=first)
    selection = select(inputs, config)
    flex.attend_compiling(inputs, config, selection)
    _, key, value, mask = calls[0]
    blocks = dense_blocks(mask)
    assert blocks[..., 40:].any() and not blocks[..., 3:23, :2].any()
    for tensor, whole in ((key, inputs.key), (value, inputs.value)):
        assert tensor.shape[2] == 5120 + 4 * EDGE
        for number in range(2):
            begin = 5120 + number * 2 * EDGE
            assert torch.equal(tensor[:, :, begin : begin + 2 * EDGE], whole[:, :, : 2 * EDGE])
    folded = blocks[..., :40]
    folded[..., :2] |= blocks[..., 40:42] | blocks[..., 42:44]
    assert torch.equal(folded, selection)


def dense_blocks(mask: BlockMask) -> Tensor:
    columns = mask.seq_lengths[1] // EDGE
    partial = unlisted(mask.kv_num_blocks, mask.kv_indices, columns)
    return partial | unlisted(mask.full_kv_num_blocks, mask.full_kv_indices, columns)


def test_the_canary_notices_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_checked", set())
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="use backend=reference"):
        patch.setattr(
            flex, "attend", lambda inputs, config, selection: reference.attend_densely(inputs)
        )
        flex.check(torch.device("cpu"))
    monkeypatch.setattr(
        flex,
        "attend",
        lambda inputs, config, selection: reference.attend(inputs, selection, config),
    )
    flex.check(torch.device("cpu"))


def test_few_lengths_are_compiled() -> None:
    for S in (1, 127, 128, 129, 1024, 1025, 5000, 65536):
        assert S <= flex.bucket(S) <= max(EDGE, 1.25 * S + EDGE), S
        assert flex.bucket(S) % EDGE == 0, S
        assert len({flex.bucket(length) for length in range(S, 2 * S)}) <= 9, S


def test_what_fills_a_row_changes_nothing() -> None:
    config = NSAConfig(**WHOLE)
    inputs = nsa_inputs(config, 300, first=many_documents(300))
    longer = flex.lengthened(inputs, config, 512)
    found = reference.attend(longer, select(longer, config), config)[:, :300]
    torch.testing.assert_close(found, reference.attend(inputs, select(inputs, config), config))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_flex_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NSAConfig(mode="merged", num_selected=3)
    inputs = nsa_inputs(config, 500, width=32, dtype=torch.float32)
    with torch.no_grad():
        found = flex.attend(inputs, config)
    expected = reference.attend(inputs, select(inputs, config), config)
    torch.testing.assert_close(found, expected)
