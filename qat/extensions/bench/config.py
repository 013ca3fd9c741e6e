"""Settings of the bench verbs, and the model shapes and TPUs that they can name."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from qat.config import Formats, Measured, Settings, Text
from qat.errors import ConfigError
from qat.models.devices import devices_named
from qat.train.step_config import StepConfig

PASSES = ("forward", "train", "decode")  # the kinds of calls that `qat bench attention` measures
DEFAULT_SHAPE, CPU_SHAPE = "qwen3-0.6b", "tiny"  # measured by default, on a GPU and on a CPU
DEFAULT_LENGTH, DEFAULT_TOP_K, DEFAULT_DRAWS = 64, 64, 50
TPUS = ("v4", "v5e", "v5p", "v6e")
"""Generations of TPUs that an extension compiles a step for (`qat.plans` in qat/hooks.py)."""
GIB_PER_UNIT = {"gib": 1.0, "gb": 1e9 / 2**30, "mib": 2**-10, "mb": 1e6 / 2**30}


def split_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split names into devices to predict and TPUs to compile for; TPUs in lower case."""
    cleaned = [name.strip() for name in names]
    devices = tuple(name for name in cleaned if name.lower() not in TPUS)
    return devices, tuple(name.lower() for name in cleaned if name.lower() in TPUS)


class MeasureConfig(StepConfig):
    """One setting of the training step, and how to measure it."""

    to: Formats[str] = "q2a4"
    """Preset that quantizes a student given by the name of a shape; q2a4_a8 and the like also
    quantize the inputs of its linears."""
    layers: Formats[int | None] = Field(None, ge=1)
    """Decoder layers of a student given by the name of a shape; by default as many as published."""
    attention: Formats[str | None] = None
    """Attention of the student, as in 'qat convert --attention'; by default unchanged."""
    cache_dir: Text[Path | None] = None
    """Teacher cache for real batches; without one they are random."""
    seq_len: Text[int | None] = Field(None, ge=2)
    """Positions per sequence; by default the cache's, or 64."""
    top_k: Text[int | None] = Field(None, ge=1)
    """Teacher tokens per position; by default the cache's, or 64."""
    steps: Measured[int] = Field(20, ge=1)
    """Timed optimizer steps; --find-max-batch takes fewer where they are long."""
    warmup: Measured[int] = Field(3, ge=1)
    """Steps before the clock starts; the first one compiles."""
    memory_limit: Measured[str] = ""
    """Emulate a device with this much memory, such as 16GiB."""

    @field_validator("memory_limit")
    @classmethod
    def _check_memory_limit(cls, text: str) -> str:
        if text:
            parse_gib(text)
        return text

    @property
    def memory_limit_gib(self) -> float | None:
        """The memory limit in GiB; None for all of the device's memory."""
        return parse_gib(self.memory_limit) if self.memory_limit else None


class BenchConfig(MeasureConfig):
    """Settings of `qat bench`. Without `like` rates are zero: every trial sees the same student."""

    shape: Formats[str | None] = None
    """Published shape to measure with random weights if no STUDENT is named; by default qwen3-0.6b,
    or tiny on a CPU."""
    like: Measured[Path | None] = None
    """Directory of a run of 'qat train': its steps are timed on its own batches and compared with
    the speed that it logged."""
    batch_sizes: Measured[str] = ""
    """Batch sizes to measure, joined by commas; with --find-max-batch, the only ones to try."""
    find_max_batch: Measured[bool] = False
    """Search for the largest batch that fits into memory, and for the fastest."""
    plan: Measured[bool | str] = False
    """Predict other devices from this run: all, or those named, joined by commas; for v4, v5e, v5p
    and v6e the step is compiled without a TPU (needs the extra tpu-plan)."""
    strict: Measured[bool] = False
    """Fail if anything ran differently than requested: another dtype, uncompiled layers, ..."""

    @field_validator("plan")
    @classmethod
    def _check_plan(cls, plan: bool | str) -> bool | str:
        if isinstance(plan, str):
            devices_named(split_names(plan.split(","))[0])
        return plan

    @field_validator("batch_sizes")
    @classmethod
    def _check_batch_sizes(cls, text: str) -> str:
        parse_sizes(text)
        return text

    @property
    def sizes(self) -> tuple[int, ...]:
        """The named batch sizes, ascending; empty if none are named."""
        return parse_sizes(self.batch_sizes)

    @property
    def tpus(self) -> tuple[str, ...]:
        """The TPUs to compile the step for."""
        return split_names(self.plan.split(","))[1] if isinstance(self.plan, str) else ()

    @property
    def planned(self) -> tuple[str, ...] | None:
        """The names of devices to predict; empty for all, None for no prediction."""
        if isinstance(self.plan, bool):
            return () if self.plan else None
        return split_names(self.plan.split(","))[0] or None


class AttentionConfig(Settings):
    """Dense attention by each PyTorch kernel, and sparse attention by each of ours."""

    lengths: str = "512,1024,2048,4096,8192,16384,32768,65536"
    """Positions per row, joined by commas."""
    groups: str = "2,4,5,8,16"
    """Query heads per key-value head, joined by commas."""
    key_heads: int = Field(8, ge=1)
    """Key-value heads."""
    head_dim: int = Field(128, ge=1)
    """Width of a head."""
    batch_size: int = Field(1, ge=1)
    """Rows per call."""
    attention: str = "nsa,nsa-merged"
    """Kinds of sparse attention, as in 'qat convert --attention', joined by commas."""
    passes: str = "forward,train,decode"
    """Kinds of calls, joined by commas: prefill, prefill with backward, decoding one position."""
    tune: bool = False
    """Write the lengths up to which dense attention and FlexAttention are fastest into the device's
    table, by which backend = "auto" then chooses."""
    device: str = "auto"
    """Device to measure on: auto, cpu, cuda, cuda:1."""
    repeats: int = Field(20, ge=1)
    """Rounds in which all ways take turns."""
    limit_s: float = Field(4.0, gt=0)
    """Time limit in seconds for the rounds of one shape; at least five rounds are run."""

    @field_validator("lengths", "groups")
    @classmethod
    def _check_sizes(cls, text: str) -> str:
        if not parse_sizes(text):
            raise ValueError("expected at least one size; write them as 4096,16384")
        return text

    @field_validator("passes")
    @classmethod
    def _check_passes(cls, text: str) -> str:
        unknown = [name for name in text.split(",") if name not in PASSES]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is unknown; use any of {','.join(PASSES)}")
        return text


class SweepConfig(Settings):
    """Settings for running a sweep; only `tiny` and `set` change what is compared."""

    tiny: bool = False
    """Run the recipe's [tiny] variant, which takes seconds on a CPU."""
    set: tuple[str, ...] = ()
    """A key of the recipe with another value, as in settings.steps=20, repeats=1,
    'product.ranks=[1,2]' or groups.NAME.steps=3; may be given several times."""
    dry_run: bool = False
    """Print the runs and stop."""
    strict: bool = False
    """Fail a run in which anything ran differently than requested."""
    sample_s: float = Field(1.0, gt=0)
    """Seconds between samples of GPU and host telemetry."""
    allow_command: bool = False
    """Run the program of a recipe with verb = "command"; read the recipe first."""


def parse_gib(text: str) -> float:
    """Parse `16GiB`, `24 GB` or `512MiB` to GiB.

    Raises:
        ValueError: it is not a positive number with such a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = GIB_PER_UNIT.get(found[2].lower()) if found else None
    if unit is None or float(found[1]) == 0:
        raise ValueError("expected a size with its unit; write it as 16GiB or 512MiB")
    return float(found[1]) * unit


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse `8,16,32` to ascending numbers without duplicates; empty for empty text.

    Raises:
        ValueError: a part is not a whole number of at least 1.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("expected whole numbers of at least 1; write them as 8,16,32")
    return tuple(sorted({int(part) for part in parts}))


# Published model sizes by name, from each model's config.json on the hub. Settings that do not
# change the cost of a step (rotary base, epsilon, special tokens) keep the architecture's defaults.


def _sizes(
    width: int, ffn: int, layers: int, heads: tuple[int, int, int], *, tied: bool = True
) -> dict[str, Any]:
    """Return the sizes of a shape; `heads` are query heads, key-value heads and the head width."""
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "tie_word_embeddings": tied,
    }


QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960}
MIXTURE = {**QWEN3, "model_type": "qwen3_moe", "norm_topk_prob": True}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262144, "max_position_embeddings": 32768}
GEMMA3 |= {"sliding_window": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**QWEN3, **_sizes(64, 128, 2, (2, 1, 32)), "vocab_size": 512},
    "tiny-moe": {
        **MIXTURE, **_sizes(64, 128, 2, (2, 1, 32)), "vocab_size": 512,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
    "qwen3-0.6b": {**QWEN3, **_sizes(1024, 3072, 28, (16, 8, 128))},
    "qwen3-1.7b": {**QWEN3, **_sizes(2048, 6144, 28, (16, 8, 128))},
    "qwen3-4b": {**QWEN3, **_sizes(2560, 9728, 36, (32, 8, 128))},
    "qwen3-8b": {**QWEN3, **_sizes(4096, 12288, 36, (32, 8, 128), tied=False)},
    "qwen3-14b": {**QWEN3, **_sizes(5120, 17408, 40, (40, 8, 128), tied=False)},
    "qwen3-32b": {**QWEN3, **_sizes(5120, 25600, 64, (64, 8, 128), tied=False)},
    "qwen3-30b-a3b": {
        **MIXTURE, **_sizes(2048, 6144, 48, (32, 4, 128), tied=False),
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    # the runbook of Native Sparse Attention: 12 heads over 2 groups of keys, 125M with its words
    "nsa-125m": {**LLAMA, **_sizes(768, 2528, 12, (12, 2, 64)), "vocab_size": 50257},
    "llama-3.2-1b": {**LLAMA, **_sizes(2048, 8192, 16, (32, 8, 64))},
    "llama-3.2-3b": {**LLAMA, **_sizes(3072, 8192, 28, (24, 8, 128))},
    "llama-3.3-70b": {**LLAMA, **_sizes(8192, 28672, 80, (64, 8, 128), tied=False)},
    "gemma-3-270m": {**GEMMA3, **_sizes(640, 2048, 18, (4, 1, 256))},
    "gemma-3-1b": {**GEMMA3, **_sizes(1152, 6912, 26, (4, 1, 256))},
}  # fmt: skip
"""Arguments of each architecture's configuration class."""


def shape_called(name: str) -> dict:
    """Return the sizes published under `name`, in any case.

    Raises:
        ConfigError: no shape has that name.
    """
    shape = SHAPES.get(name.lower())
    if shape is None:
        raise ConfigError(
            f"student={name} is neither a model directory nor a shape; name a checkpoint of 'qat "
            f"convert' or one of {', '.join(SHAPES)}"
        )
    return shape
