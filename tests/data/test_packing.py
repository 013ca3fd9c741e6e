"""Packing: every prediction counts once, behind as much context as was promised."""

import random
from collections.abc import Collection

import numpy as np
import pytest
import torch

from qat.data.packing import (
    CONTEXT,
    LOOKAHEAD,
    NO_LABEL,
    PackedRows,
    Packer,
    labels,
    position_ids,
)

PAD, BEGIN = 0, 7
LENGTHS = [2, 3, 8, 17]


def pack(
    documents: list[list[int]],
    length: int,
    special: Collection[int] = (),
    flags: list[np.ndarray | None] | None = None,
    **how: object,
) -> PackedRows:
    """All documents, packed at once."""
    packer = Packer(length, PAD, special, **how)
    for ids, is_target in zip(documents, flags or [None] * len(documents), strict=True):
        packer.push(ids, is_target)
    packer.finish()
    return packer.take(packer.num_full)


def documents_of(rng: random.Random) -> list[list[int]]:
    """Documents of which every token is another number, but for how some begin."""
    numbers = iter(range(1000, 9999))
    sizes = [rng.randrange(2, 60) for _ in range(rng.randrange(1, 30))]
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    for document in documents[::2]:
        document[0] = BEGIN
    return documents


def pieces_of(packed: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """Tokens and flags of all pieces but padding, in their order."""
    found = []
    for tokens, starts, mask in zip(packed.tokens, packed.starts, packed.mask, strict=True):
        edges = [*np.flatnonzero(starts).tolist(), len(tokens)]
        assert edges[0] == 0
        for begin, end in zip(edges, edges[1:], strict=False):
            if (tokens[begin:end] != PAD).all():
                found.append((tokens[begin:end].tolist(), mask[begin:end].tolist()))
            else:
                assert end == len(tokens) and not mask[begin:].any()
                assert (tokens[begin:] == PAD).all()
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_every_prediction_counts_once_in_its_context(length: int) -> None:
    for seed in range(10):
        documents = documents_of(random.Random(seed))
        packed = pack(documents, length, {BEGIN})
        pieces = pieces_of(packed)
        assert packed.num_tokens == sum(len(tokens) for tokens, _ in pieces), seed
        context = max(1, length // CONTEXT)
        predicted = []
        for tokens, counts in pieces:
            whole = next(document for document in documents if tokens[-1] in document)
            last = whole.index(tokens[-1])
            first = last + 1 - len(tokens)
            begins = tokens == whole[: len(tokens)]
            assert counts[-1] is False and any(counts), seed
            assert all(counts[context if not begins else 0 : -1]), seed
            if begins:
                assert len(tokens) == min(len(whole), length), seed
            else:
                assert counts[: context - 1] == [False] * (context - 1), seed
                assert tokens[1:] == whole[first + 1 : last + 1], seed
                assert tokens[0] == (
                    BEGIN if whole[0] == BEGIN and context > 1 else whole[first]
                ), seed
            predicted += [
                token for token, counted in zip(tokens[1:], counts, strict=False) if counted
            ]
        assert sorted(predicted) == sorted(
            token for document in documents for token in document[1:]
        ), seed


@pytest.mark.parametrize("seed", range(5))
def test_sequences_are_full_and_in_the_order_of_their_documents(seed: int) -> None:
    rng = random.Random(seed)
    documents = [[1000 + i] * rng.randrange(2, 33) for i in range(2000)]
    packed = pack(documents, 32)
    padding = 1 - packed.num_tokens / packed.tokens.size
    assert padding < 0.03
    firsts = packed.tokens[:, 0]
    window = np.flatnonzero(np.cumsum([len(each) for each in documents]) >= LOOKAHEAD * 32)
    in_first = firsts <= 1000 + window[0]
    assert in_first.sum() >= LOOKAHEAD and (np.diff(firsts[in_first]) >= 0).all()


def test_a_piece_of_a_chat_begins_with_its_question() -> None:
    ids, is_target = np.arange(100, 160), np.zeros(60, dtype=bool)
    is_target[3:] = True
    first, second, _ = pack([ids], 32, flags=[is_target]).tokens
    assert first.tolist() == list(range(100, 132))
    assert second.tolist() == [100, 101, 102, *range(127, 156)]
    is_target[:20] = False  # a question that would leave no room for what was said last
    second = pack([ids], 32, flags=[is_target]).tokens[1]
    assert second.tolist() == [*range(100, 104), *range(128, 156)]


@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_without_a_target_are_left_out(length: int) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        documents = documents_of(rng)
        flags = [np.array([rng.random() < 0.1 for _ in document]) for document in documents]
        packer = Packer(length, PAD, {BEGIN})
        for document, is_target in zip(documents, flags, strict=True):
            packer.push(document, is_target)
        packer.finish()
        pieces = pieces_of(packer.take(packer.num_full)) if packer.num_full else []
        assert packer.is_empty and all(any(counts) for _, counts in pieces), seed
        said = [
            t for tokens, counts in pieces for t, c in zip(tokens[1:], counts, strict=False) if c
        ]
        pairs = zip(documents, flags, strict=True)
        expected = [np.array(document)[1:][is_target[1:]] for document, is_target in pairs]
        assert sorted(said) == sorted(np.concatenate(expected).tolist()), seed


def test_taking_bit_by_bit_equals_taking_all() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        documents, length = documents_of(rng), rng.choice(LENGTHS)
        whole = pack(documents, length, lookahead=4)
        packer, parts = Packer(length, PAD, lookahead=4), []
        for document in documents:
            packer.push(document)
            count = rng.randrange(packer.num_full + 1)
            if count:
                parts.append(packer.take(count))
        packer.finish()
        if packer.num_full:
            parts.append(packer.take(packer.num_full))
        for field in ("tokens", "starts", "mask"):
            joined = np.concatenate([getattr(part, field) for part in parts])
            np.testing.assert_array_equal(joined, getattr(whole, field))
        assert sum(part.num_tokens for part in parts) == whole.num_tokens, seed


@pytest.mark.parametrize("seed", range(5))
def test_unsorted_sequences_of_fewer_documents_are_beginnings_of_those_of_more(seed: int) -> None:
    documents = documents_of(random.Random(seed)) * 20
    half = documents[: len(documents) // 2]
    less, more = (pack(some, 32, lookahead=16, sorts=False) for some in (half, documents))
    count, is_there = len(less.tokens), less.tokens != PAD
    assert count > 16 and (less.tokens == more.tokens[:count])[is_there].all()
    assert (less.mask <= more.mask[:count]).all()
    assert (less.starts == more.starts[:count])[is_there].all()


def test_positions_restart_and_labels_stay_inside_a_document() -> None:
    packed = pack([[11, 12, 13], [21, 22], [31, 32]], 6)
    tokens, starts = torch.from_numpy(packed.tokens).long(), torch.from_numpy(packed.starts)
    mask = torch.from_numpy(packed.mask)
    assert tokens.tolist() == [[11, 12, 13, 21, 22, PAD], [31, 32, PAD, PAD, PAD, PAD]]
    assert position_ids(starts).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    no = NO_LABEL
    assert labels(tokens, starts, mask).tolist() == [
        [12, 13, no, 22, no, no],
        [32, no, no, no, no, no],
    ]


def test_no_label_is_a_token_of_the_next_document_whatever_the_mask_counts() -> None:
    tokens = torch.tensor([[11, 12, 21, 22, 31]])
    starts = torch.tensor([[True, False, True, False, True]])
    counted = torch.ones(1, 5, dtype=torch.bool)
    no = NO_LABEL
    assert labels(tokens, starts, counted).tolist() == [[12, no, 22, no, no]]
