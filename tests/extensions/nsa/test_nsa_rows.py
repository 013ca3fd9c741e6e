"""The places of a row's tokens, for every mask or positions that a model is called with."""

import pytest
import torch

from qat.extensions.nsa.rows import (
    TokenRows,
    padding_of,
    rows_of_documents,
    rows_of_mask,
    rows_of_positions,
)
from qat.kernels.attention import document_mask

TOKENS = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1]]).bool()
ORDER = [[2, 3, 4, 0, 1], [0, 1, 2, 3, 4], [0, 2, 4, 1, 3]]
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
FIRST = [[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0]]


def four_dimensional(tokens: torch.Tensor) -> torch.Tensor:
    """The mask that transformers makes of one over tokens."""
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return causal[None, None] & tokens[:, None, None]


@pytest.mark.parametrize("is_float", [False, True])
def test_tokens_come_first_and_go_back(is_float) -> None:
    mask = four_dimensional(TOKENS)
    if is_float:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    for rows in (rows_of_mask(TOKENS), rows_of_mask(mask)):
        assert rows.order.tolist() == ORDER
        values = torch.arange(15.0).view(3, 1, 5, 1)
        front = rows.to_front(values, 2)
        assert front[0].flatten().tolist() == [2, 3, 4, 0, 1]
        assert torch.equal(rows.back(front, 2), values)
    assert torch.equal(padding_of(mask), TOKENS)
    assert padding_of(None) is None and padding_of(TOKENS) is TOKENS


def test_documents_begin_where_positions_restart() -> None:
    for rows in (rows_of_positions(POSITIONS), rows_of_documents(POSITIONS)):
        assert rows.order is None and rows.first.tolist() == FIRST
    rows = rows_of_mask(document_mask(POSITIONS))
    assert rows.first.tolist() == FIRST
    assert rows_of_positions(POSITIONS[1:] + 7).first.tolist() == [[0] * 6]
    values = torch.randn(2, 6)
    assert rows_of_positions(POSITIONS).to_front(values, 1) is values


def test_documents_behind_padding_begin_among_the_tokens() -> None:
    mask = four_dimensional(TOKENS[:1]).clone()
    mask[..., 4, :4] = False  # a document of its own
    rows = rows_of_mask(mask)
    assert rows.order.tolist() == ORDER[:1]
    assert rows.first[0, :3].tolist() == [0, 0, 2]


def test_one_row_stands_for_all() -> None:
    rows = TokenRows(torch.tensor([[1, 0]]), None)
    assert rows.to_front(torch.tensor([[1, 2], [3, 4]]), 1).tolist() == [[2, 1], [4, 3]]
