"""Packing against a token-by-token oracle."""

import random

import numpy as np
import pytest
import torch

from qat.data.batch import NO_LABEL
from qat.data.packing import Packer, labels, pack, position_ids

PAD = 0


def oracle(documents: list[list[int]], length: int) -> list[dict[str, list]]:
    """Sequences built one token at a time."""
    stream = [
        {"token": token, "place": place, "last": place == len(document) - 1}
        for document in documents
        for place, token in enumerate(document)
    ]
    sequences = []
    for first in range(0, len(stream), length):
        rows = stream[first : first + length]
        padding = length - len(rows)
        positions, position = [], 0
        for i, row in enumerate(rows):
            position = 0 if i == 0 or row["place"] == 0 else position + 1
            positions.append(position)
        next_label = [
            NO_LABEL if row["last"] or i == len(rows) - 1 else rows[i + 1]["token"]
            for i, row in enumerate(rows)
        ]
        sequences.append(
            {
                "tokens": [row["token"] for row in rows] + [PAD] * padding,
                "mask": [not row["last"] for row in rows] + [False] * padding,
                "positions": positions + list(range(padding)),
                "labels": next_label + [NO_LABEL] * padding,
            }
        )
    return sequences


def with_beginnings(documents: list[list[int]], length: int, begin: int) -> list[dict[str, list]]:
    """The oracle's sequences where each that begins inside a document has `begin` in front."""
    rows, row = [], []
    for document in documents:
        for place, token in enumerate(document):
            if len(row) == length:
                rows.append(row)
                row = []
            if place and not row:
                row.append((begin, False))
            row.append((token, place < len(document) - 1))
    rows.append(row)
    return [
        {
            "tokens": [token for token, _ in row] + [PAD] * (length - len(row)),
            "mask": [counts for _, counts in row] + [False] * (length - len(row)),
        }
        for row in rows
    ]


def random_documents(rng: random.Random) -> list[list[int]]:
    return [
        [rng.randrange(1, 100) for _ in range(rng.randrange(1, 23))]
        for _ in range(rng.randrange(1, 30))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_packing_equals_the_oracle(seed: int) -> None:
    rng = random.Random(seed)
    documents, length = random_documents(rng), rng.choice([2, 3, 8, 17])
    packed = pack(documents, length, PAD)
    tokens, starts = torch.from_numpy(packed.tokens).long(), torch.from_numpy(packed.starts)
    mask = torch.from_numpy(packed.mask)
    expected = oracle(documents, length)
    assert tokens.tolist() == [row["tokens"] for row in expected]
    assert mask.tolist() == [row["mask"] for row in expected]
    assert position_ids(starts).tolist() == [row["positions"] for row in expected]
    assert labels(tokens, starts, mask).tolist() == [row["labels"] for row in expected]
    assert packed.num_tokens == sum(map(len, documents))


@pytest.mark.parametrize("seed", range(20))
def test_taking_bit_by_bit_equals_taking_all(seed: int) -> None:
    rng = random.Random(seed)
    documents, length = random_documents(rng), rng.choice([2, 5, 8])
    whole = pack(documents, length, PAD)
    packer, parts = Packer(length, PAD), []
    for document in documents:
        packer.push(document)
        count = rng.randrange(packer.num_full + 1)
        if count:
            parts.append(packer.take(count))
    if packer.num_left:
        parts.append(packer.take(packer.num_left))
    for field in ("tokens", "starts", "mask"):
        joined = np.concatenate([getattr(part, field) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, field))
    assert sum(part.num_tokens for part in parts) == whole.num_tokens


@pytest.mark.parametrize("seed", range(20))
def test_the_rest_of_a_cut_document_begins_anew(seed: int) -> None:
    rng = random.Random(seed)
    documents, length, begin = random_documents(rng), rng.choice([2, 3, 8, 17]), 100
    expected = with_beginnings(documents, length, begin)
    packer, parts = Packer(length, PAD, begin), []
    for document in documents:
        packer.push(document)
        if packer.num_full:
            parts.append(packer.take(packer.num_full))
    if packer.num_left:
        parts.append(packer.take(packer.num_left))
    tokens, mask = (np.concatenate([getattr(p, key) for p in parts]) for key in ("tokens", "mask"))
    assert tokens.tolist() == [row["tokens"] for row in expected]
    assert mask.tolist() == [row["mask"] for row in expected]
    assert all(part.starts[:, 0].all() for part in parts)
    whole = pack(documents, length, PAD, begin)
    np.testing.assert_array_equal(whole.tokens, tokens)
    np.testing.assert_array_equal(whole.mask, mask)


@pytest.mark.parametrize("begin", [None, 100])
@pytest.mark.parametrize("seed", range(20))
def test_sequences_without_a_target_are_left_out(seed: int, begin: int | None) -> None:
    rng = random.Random(seed)
    documents, length = random_documents(rng), rng.choice([2, 3, 8, 17])
    flags = [[rng.random() < 0.1 for _ in document] for document in documents]
    packer, plain = Packer(length, PAD, begin), Packer(length, PAD, begin)
    origins = Packer(length, PAD, begin)
    number = 0
    for document, targets in zip(documents, flags, strict=True):
        packer.push(document, np.array(targets))
        plain.push(document)
        # each token's number among all, so that its flag can be found again
        origins.push(range(number + 1000, number + 1000 + len(document)))
        number += len(document)
    whole, places = plain.take(plain.num_left), origins.take(origins.num_left)
    is_target = {place + 1000: flag for place, flag in enumerate(sum(flags, []))}
    # a prediction counts if it did before and the next token of the stream is a target
    following = {place: is_target.get(place + 1, False) for place in is_target}
    wanted = np.vectorize(lambda place: following.get(place, False))(places.tokens) & whole.mask
    is_kept = wanted.any(1)
    is_kept[-1] |= whole.num_tokens % length > 0
    kept = packer.take(packer.num_left) if is_kept.any() else None
    assert packer.num_left == 0
    if kept is not None:
        np.testing.assert_array_equal(kept.tokens, whole.tokens[is_kept])
        np.testing.assert_array_equal(kept.starts, whole.starts[is_kept])
        np.testing.assert_array_equal(kept.mask, wanted[is_kept])


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        pack([], 4, PAD)
