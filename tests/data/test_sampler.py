"""The order of sequences is a function of seed and step."""

import numpy as np
import pytest

from qat.data import sampler
from qat.data.sampler import sequence_indices


@pytest.mark.parametrize(("batch", "total"), [(4, 12), (5, 12), (7, 3), (1, 1), (12, 12)])
def test_every_sequence_comes_once_per_epoch(batch: int, total: int) -> None:
    steps = 3 * total  # `batch` * 3 whole epochs
    order = np.concatenate([sequence_indices(1, step, batch, total) for step in range(steps)])
    for epoch in order.reshape(-1, total):
        assert sorted(epoch) == list(range(total))


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = sequence_indices(7, 3, 16, 100)
    sequence_indices(8, 0, 16, 100)
    np.testing.assert_array_equal(first, sequence_indices(7, 3, 16, 100))
    assert not np.array_equal(first, sequence_indices(8, 3, 16, 100))
    assert not np.array_equal(sequence_indices(7, 0, 100, 100), sequence_indices(7, 1, 100, 100))


def test_an_empty_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="num_sequences=0"):
        sequence_indices(0, 0, 4, 0)


@pytest.mark.parametrize("total", [17, 24, 25, 100])
def test_windows_of_a_large_cache_give_every_sequence_once(monkeypatch, total: int) -> None:
    monkeypatch.setattr(sampler, "WINDOW", 8)
    sampler._windows.cache_clear()
    order = np.concatenate([sequence_indices(5, step, 3, total) for step in range(total)])
    epochs = order.reshape(-1, total)
    for epoch in epochs:
        assert sorted(epoch) == list(range(total))
        assert sum(np.diff(epoch // 8) != 0) == (total - 1) // 8  # one window after the other
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_array_equal(order[6:9], sequence_indices(5, 2, 3, total))


def test_a_trillion_sequences_take_the_memory_of_a_window() -> None:
    found = sequence_indices(0, 10**9, 64, 10**12)
    assert len(set(found.tolist())) == 64 and 0 <= found.min() and found.max() < 10**12
    assert found.max() - found.min() < sampler.WINDOW


def test_a_run_that_goes_on_meets_the_same_windows() -> None:
    window = 2**22  # another size would be another order, and so another run
    found = sequence_indices(1, 5, 4, window + 1)  # of which the window of one comes first
    expected = np.random.Generator(np.random.PCG64([1, 0, 0])).permutation(window)[19:23]
    np.testing.assert_array_equal(found, expected)
