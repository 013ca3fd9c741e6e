"""Bit packing and the codec of teacher signals: round trips and the stated accuracy."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from cache_case import max_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.data.codec import (
    M,
    decode_draws,
    decode_top_k,
    draw,
    encode_draws,
    encode_top_k,
    id_bits,
    pack_bits,
    packed_bytes,
    top_k,
    uniforms,
    unpack_bits,
)

S = 5


def exact_logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def round_trip(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probs and tail as a reader gets them, one row per token."""
    V = logits.shape[-1]
    rows = encode_top_k(top_k(logits, k), logits.shape[0] // S, V)
    assert rows["topk_codes"].shape[1] == packed_bytes(S * (k - 1), 9)
    ids, logprobs = decode_top_k(rows, length=S, k=k, vocab_size=V)
    return ids.flatten(0, 1), logprobs.flatten(0, 1), rows["tail_logprob"].flatten()


def split_ids(rows: dict[str, Tensor]) -> list[np.ndarray]:
    return [ids.numpy() for ids in rows["sample_ids"].split(rows["sample_lengths"].tolist())]


def test_bits_round_trip_at_every_width() -> None:
    for bits, count in product(range(1, 32), (1, 7, 8, 13)):
        values = torch.randint(0, 2**bits, (3, count))
        packed = pack_bits(values, bits)
        assert packed.shape == (3, packed_bytes(count, bits))
        found = unpack_bits(packed, bits, count)
        assert torch.equal(found.long(), values)
        assert found.dtype.itemsize * 8 > bits


def test_bits_are_laid_least_significant_first() -> None:
    values = torch.tensor([[0b101, 0b011, 0b110]])
    assert pack_bits(values, 3).tolist() == [[0b10011101, 0b1]]


def test_id_bits_of_known_vocabularies() -> None:
    assert [id_bits(V) for V in (1, 2, 3, 256, 257, 151_936)] == [1, 1, 2, 8, 9, 18]


@settings(max_examples=60, deadline=None)
@given(
    V=st.integers(1, 700),
    k_frac=st.floats(0, 1),
    scale=st.sampled_from([0.0, 0.01, 0.5, 2.0, 6.0, 20.0]),
    seed=st.integers(0, 2**31),
)
def test_decoded_log_probs_stay_within_the_stated_bound(V, k_frac, scale, seed) -> None:
    k = max(1, round(k_frac * V))
    logits = scale * torch.randn(2 * S, V, generator=torch.Generator().manual_seed(seed))
    ids, logprobs, tail = round_trip(logits, k)
    exact = exact_logprobs(logits)
    chosen = exact.gather(-1, ids)
    assert torch.equal(ids, top_k(logits, k).ids)
    near = chosen[:, :1] - chosen < 104
    largest_T = torch.where(near, chosen[:, :1] - chosen, 0.0).amax(-1)
    for token, largest in enumerate(largest_T.tolist()):
        stored_range = max(1.036 * largest, 0.016)
        errors = (logprobs - chosen).abs()[token][near[token]]
        assert errors.max() <= max_error(stored_range, k) + 2e-5
    mass = logprobs.double().exp().sum(-1) + tail.double().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


def test_tail_is_the_log_sum_of_the_other_logits() -> None:
    logits = torch.randn(S, 400) * 4
    top = top_k(logits, 8)
    rest = logits.double().scatter(-1, top.ids, -torch.inf)
    total = torch.logsumexp(logits.double(), -1)
    torch.testing.assert_close(top.log_sum_exp.double(), total, rtol=1e-6, atol=1e-6)
    exact = torch.logsumexp(rest, -1) - total
    torch.testing.assert_close(top.tail_logprob.double(), exact, rtol=1e-6, atol=1e-6)


def test_a_small_tail_is_kept_where_one_minus_the_sum_would_lose_it() -> None:
    logits = torch.tensor([[0.0, -1.0, -30.0]])
    tail = top_k(logits, 2).tail_logprob.item()
    assert tail == pytest.approx(-30 - torch.tensor([0.0, -1.0]).logsumexp(0).item(), rel=1e-5)


def test_divergence_between_exact_and_decoded_is_below_a_ten_thousandth() -> None:
    logits = 4 * torch.randn(200 * S, 3001)
    exact = exact_logprobs(logits)
    for k in (32, 64):
        ids, logprobs, _ = round_trip(logits, k)
        chosen = exact.gather(-1, ids)
        kl = (chosen.exp() * (chosen - logprobs)).sum(-1)
        assert kl.mean() < 2e-5
        assert kl.max() < 1e-4


def test_impossible_tokens_get_probability_zero_and_spoil_nobody_else() -> None:
    logits = torch.randn(S, 37)
    logits[:, 5:] = -torch.inf
    ids, logprobs, tail = round_trip(logits, 20)
    exact = exact_logprobs(logits).gather(-1, ids)
    assert torch.equal(logprobs[:, 5:].exp(), torch.zeros(S, 15))
    assert torch.equal(tail.exp(), torch.zeros(S))
    assert (logprobs - exact)[:, :5].abs().max() < max_error(5.0, 20)


def test_stated_bound_is_the_documented_number() -> None:
    assert M == 510
    assert max_error(20.0, 64) == pytest.approx(0.057, abs=5e-4)


@pytest.mark.parametrize(("V", "n"), [(2, 1), (9, 50), (1001, 50), (151_936, 7)])
def test_draws_round_trip_as_ids_and_counts(V: int, n: int) -> None:
    numbers = uniforms(1, torch.arange(3 * S), 1)[:, 0]
    draws = draw(3 * torch.randn(3 * S, V), numbers, n).view(3, S, n)
    mask = torch.rand(3, S) > 0.3
    rows = encode_draws(draws, mask, V)
    assert len(rows["sample_ids"]) == rows["sample_lengths"].sum()
    id_rows = split_ids(rows)
    ids, counts = decode_draws(rows["sample_marks"], id_rows, length=S, num_draws=n, vocab_size=V)
    for i in range(3):
        for s in range(S):
            want = Counter(draws[i, s].tolist()) if mask[i, s] else {}
            pairs = zip(ids[i, s].tolist(), counts[i, s].tolist(), strict=True)
            assert {token: count for token, count in pairs if count} == want


def test_draws_of_fully_masked_sequences_are_empty() -> None:
    rows = encode_draws(torch.zeros(2, S, 4).long(), torch.zeros(2, S, dtype=torch.bool), 300)
    id_rows = split_ids(rows)
    ids, counts = decode_draws(rows["sample_marks"], id_rows, length=S, num_draws=4, vocab_size=300)
    assert ids.shape == counts.shape == (2, S, 4)
    assert counts.sum() == 0
