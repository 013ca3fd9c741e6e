"""Settings of the lab's verbs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from qat.config import Measured, Settings
from qat.extensions.bench.config import MeasureConfig

CASES = ("ours", "plain-eager", "plain-compiled", "torchao-int2", "reference")
"""The cases of `qat bench baselines`, by the names in its rows."""
KERNELS = (
    "attention, forward", "attention, backward", "joined attention, forward",
    "joined attention, backward", "gated unit, forward", "gated unit, backward",
    "decode attention", "form, packed 2-bit", "pull back, packed 2-bit", "form, packed 4-bit",
    "pull back, packed 4-bit", "form, latent 2-bit", "pull back, latent 2-bit",
    "form, latent 4-bit", "pull back, latent 4-bit", "choose, 256 x 4", "form, packed 256 x 4",
    "pull back, packed 256 x 4", "choose, 64 x 2", "form, packed 64 x 2",
    "pull back, packed 64 x 2", "form and pull back, latent 2-bit",
    "form and pull back, latent 256 x 4", "matvec, queries, keys, values, 4-bit",
    "matvec, attention out, 4-bit", "matvec, gates and ups, 2-bit", "matvec, down, 2-bit",
    "matvec, head, 4-bit", "matvec, down, exact levels, 2-bit",
    "matvec, queries, keys, values, 16-bit", "matvec, attention out, 16-bit",
    "matvec, gates and ups, 16-bit", "matvec, down, 16-bit", "matvec, head, 16-bit",
    "matvec, gates and ups, 256 x 4", "matvec, down, 256 x 4", "gather-dot", "gather-sum",
    "other words", "divergence", "top-k, block pass", "top-k, selection",
    "AdamW, stochastic rounding",
    "columns, settle", "columns, refit",
)  # fmt: skip
"""The cases of `qat bench kernels` by name, in the order in which they run."""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The GPUs of `qat bench targets` by instruction set: T4, A100, RTX 3090, RTX 4090, H100, B200, RTX
5090."""

GAIN = re.compile(r"(\d+\.?\d*|\.\d+)(%?)")


def gain_of(text: str) -> float:
    """Return `10%` or `0.1` as a share."""
    number, percent = GAIN.fullmatch(text).groups()
    return float(number) / (100 if percent else 1)


class BaselinesConfig(MeasureConfig):
    """Our training step against other implementations, in one run on the same shapes and data."""

    only: Measured[str] = ",".join(CASES)
    """Cases to run, joined by commas."""
    rounds: Measured[int] = Field(2, ge=1)
    """Rounds in which each case takes a turn; every second round runs in reverse order."""

    @field_validator("only")
    @classmethod
    def _check_only(cls, text: str) -> str:
        unknown = [name for name in text.split(",") if name not in CASES]
        if unknown:
            raise ValueError(f"no case is called {unknown[0]!r}; choose among {', '.join(CASES)}")
        return text

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases to run, in the order of `CASES`."""
        return tuple(name for name in CASES if name in self.only.split(","))


class TargetsConfig(Settings):
    """Settings of `qat bench targets`, which compiles all Triton kernels for absent GPUs."""

    only: str = ",".join(ARCHITECTURES)
    """Architectures to compile for, joined by commas."""
    processes: int = Field(2, ge=1)
    """Architectures to compile for at once."""
    page: Path | None = None
    """Markdown file to which the table is written."""
    figures: Path | None = None
    """File to which the goal's figure is appended."""

    @field_validator("only")
    @classmethod
    def _check_only(cls, text: str) -> str:
        unknown = [name for name in text.split(",") if name not in ARCHITECTURES]
        if unknown:
            raise ValueError(
                f"no architecture is called {unknown[0]!r}; choose among {', '.join(ARCHITECTURES)}"
            )
        return text

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures to compile for."""
        return tuple(self.only.split(","))


class KernelsConfig(Settings):
    """Checks of every Triton kernel against its reference: it compiles, is correct, and is fast."""

    only: str = ""
    """Kernels to run: those whose name contains one of these words, joined by commas; by default
    all."""
    shape: str | None = None
    """Published shape whose dimensions are timed, or tiny for a trial; by default qwen3-0.6b on a
    GPU, and tiny where kernels cannot run."""
    device: str = "auto"
    """Device to measure on: auto, cpu, cuda, cuda:1."""
    repeats: int = Field(100, ge=1)
    """Rounds in which a kernel and its reference take turns, as many as fit in --limit-s."""
    limit_s: float = Field(10.0, gt=0)
    """Time limit in seconds for the rounds of one kernel; at least five rounds are run."""
    seed: int | None = Field(None, ge=0)
    """Seed of the inputs; by default a new one each time, which the rows record."""
    tune: bool | Literal["token"] = False
    """Tune the kernels that passed; configurations faster than the default enter the device's
    table. Tiles of a token's linears must be faster within a token; 'token' tunes these alone."""
    keep: int = Field(4, ge=1)
    """Best configurations to measure again against the default."""
    beat: Path | None = None
    """Earlier results; the exit code is 0 only if every kernel is faster than there by --by."""
    by: str = "10%"
    """Least gain over --beat, such as 10% or 0.1: medians that far apart, with separate
    intervals."""
    ncu: bool = False
    """Read counters of each kernel with Nsight Compute, if ncu is installed; the roofline is
    measured anyway."""
    figures: Path | None = None
    """File to which the goals' figures of this run are appended."""

    @field_validator("tune", mode="wrap")
    @classmethod
    def _check_tune(cls, value: object, parsed: Callable[[object], bool | str]) -> bool | str:
        try:
            return parsed(value)
        except ValidationError:  # one for each of the two types, by their names in pydantic
            raise ValueError(
                "expected true, false or token; write --tune or --tune token"
            ) from None

    @field_validator("by")
    @classmethod
    def _check_by(cls, text: str) -> str:
        found = GAIN.fullmatch(text)
        if found is None or not 0 < gain_of(text) < 1:
            raise ValueError("no gain, expected above 0% and below 100%; write 10% or 0.1")
        return text

    @model_validator(mode="after")
    def _check_beat(self) -> Self:
        if self.beat is None and "by" in self.model_fields_set:
            raise ValueError(
                f"by={self.by} without beat, expected the run to compare with; add --beat DIR"
            )
        return self

    @property
    def gain(self) -> float:
        """The least gain over `beat` as a share of the earlier median."""
        return gain_of(self.by)

    @field_validator("only")
    @classmethod
    def _check_only(cls, text: str) -> str:
        for part in map(str.strip, text.split(",")):
            if not any(part in name for name in KERNELS):
                raise ValueError(
                    f"{part!r} is in no kernel's name; choose parts of {'; '.join(KERNELS)}"
                )
        return text


class GgufConfig(Settings):
    """The distance of GGUF files from their teacher, measured in llama.cpp."""

    text: Path | None = None
    """Text that is cut into contexts; the second half of each is judged, as llama-perplexity
    does."""
    cache_dir: Path | None = None
    """Instead of a text, the held-out rows of a teacher cache, judged where the loss counts."""
    context: int = Field(512, ge=4)
    """Tokens in a context of the text."""
    contexts: int = Field(16, ge=0)
    """The first contexts of the text, or rows of the cache, that are judged; 0 for all."""


class QualityConfig(Settings):
    """Settings for running the jobs of a recipe; nothing here changes their results."""

    workers: int = Field(1, ge=1)
    """Parallel jobs per device; compare seconds only between rows with equal workers."""
    device: str = "auto"
    """Device of the jobs: auto or cuda (spread over all GPUs), cpu, cuda:1 or mps."""
    only: str = ""
    """Recipes to run: those whose name contains one of these words, joined by |; all if empty. The
    table keeps earlier results of the others."""

    def selects(self, name: str) -> bool:
        """Return whether the recipe called `name` is selected."""
        return any(word.strip() in name for word in self.only.split("|"))
