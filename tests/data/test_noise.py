"""Random numbers by place: equal to splitmix64, uniform, and independent of what is asked with."""

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


def test_a_places_numbers_depend_on_nothing_else() -> None:
    together = uniforms(9, torch.arange(100, 200), 6)
    assert torch.equal(uniforms(9, torch.tensor([150, 101]), 6), together[[50, 1]])


@pytest.mark.parametrize("number", [0, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_stream_is_an_int64(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda _: number)
    assert np.uint64(number).astype(np.int64) == stream(0, "train")


def test_streams_differ_and_are_uniform() -> None:
    numbers = {name: uniforms(stream(0, name), torch.arange(20_000), 4) for name in "ab"}
    assert not torch.equal(numbers["a"], numbers["b"])
    for found in numbers.values():
        assert 0 <= found.min() <= found.max() < 1
        counts = torch.histc(found, 64, 0, 1)
        assert (counts - found.numel() / 64).abs().max() < 5 * (found.numel() / 64) ** 0.5
    correlation = torch.corrcoef(torch.cat([numbers["a"].T, numbers["b"].T]))
    assert (correlation - torch.eye(8)).abs().max() < 0.03
