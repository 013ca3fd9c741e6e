"""Sizes and lists as users write them."""

import pytest

from qat.errors import ConfigError
from qat.extensions.bench.config import BenchConfig, parse_gib, parse_sizes


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("16GiB", 16.0),
        ("1.5 gib", 1.5),
        ("512MiB", 0.5),
        ("1GB", 1e9 / 2**30),
        ("2mb", 2e6 / 2**30),
    ],
)
def test_memory_is_read_with_its_unit(text: str, gib: float) -> None:
    assert parse_gib(text) == pytest.approx(gib)


def test_batch_sizes_come_ascending_and_once() -> None:
    assert parse_sizes("32, 8,16,8") == (8, 16, 32)
    assert parse_sizes("") == ()


def test_sizes_without_sense_are_refused() -> None:
    for name, texts in (
        ("memory_limit", ("16", "GiB", "0GiB", "16 apples", "-1GiB")),
        ("batch_sizes", ("0,8", "8;16", "8,,16", "-1", "x")),
    ):
        for text in texts:
            with pytest.raises(ConfigError, match=f"{name}='{text}': expected"):
                BenchConfig.parse({name: text}, "flags")
