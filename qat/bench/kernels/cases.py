"""Every case of the kernel bench, by name, and the sizes of the work that is timed."""

from typing import Any

from qat.bench.kernels.case import Case
from qat.bench.kernels.layer_cases import layer_cases
from qat.bench.kernels.linear_cases import linear_cases
from qat.bench.kernels.word_cases import word_cases
from qat.bench.shapes import shape_called
from qat.errors import ConfigError

TRAINING = {"sequences": 512, "length": 64, "kept": 64, "logit_rows": 8192, "context": 2048}
TRIAL = {"sequences": 2, "length": 8, "kept": 8, "logit_rows": 16, "context": 32}
"""Of the smallest shape, for a look at whether everything runs."""


def work_of(shape: str) -> dict[str, Any]:
    """A published shape's dimensions, and those of a batch, the cache's pass and a context.

    Raises:
        ConfigError: no shape has that name.
    """
    return {**shape_called(shape), **(TRIAL if shape == "tiny" else TRAINING)}


def all_cases() -> dict[str, Case]:
    """In the order in which they are run."""
    every = (*layer_cases(), *linear_cases(), *word_cases())
    return {case.name: case for case in every}


def cases_named(only: str) -> list[Case]:
    """Cases whose names hold one of the parts of `only`, joined by commas; all for none.

    Raises:
        ConfigError: a part is in no name.
    """
    every, parts = all_cases(), [part.strip() for part in only.split(",")]
    for part in parts:
        if not any(part in name for name in every):
            raise ConfigError(
                f"only={part!r} is in no kernel's name; choose parts of {'; '.join(every)}"
            )
    return [case for name, case in every.items() if any(part in name for part in parts)]
