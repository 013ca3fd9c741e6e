"""Random numbers by place: equal to splitmix64, and independent of what is asked with."""

import numpy as np
import pytest
import torch

from qat.data.codec import stream, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> tuple[int, int]:
    """The next state and output, from the published C code."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return state, z ^ (z >> 31)


def test_numbers_are_those_of_splitmix64() -> None:
    for seed in (0, 5, stream(3, "train")):
        state, expected = seed & MASK, []
        for _ in range(12):
            state, output = splitmix64(state)
            expected.append((output >> 11) * 2.0**-53)
        assert uniforms(seed, torch.arange(4), 3).flatten().tolist() == expected
        assert uniforms(seed, torch.tensor([3, 1]), 3).tolist() == [expected[9:], expected[3:6]]


@pytest.mark.parametrize("number", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_stream_is_an_int64(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda _: number)
    assert np.uint64(number).astype(np.int64) == stream(0, "train")


def test_streams_differ() -> None:
    assert len({stream(0, "train"), stream(0, "held_out"), stream(1, "train")}) == 3
