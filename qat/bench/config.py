"""Settings of the bench verbs, and the shapes and TPUs that they name."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from qat.config import Formats, Measured, Settings, Text, refuse_code
from qat.errors import ConfigError, nearest
from qat.files import parse_toml
from qat.train.config import StepConfig

ATTENTION = ("nsa", "nsa-merged", "nsa-shared", "nsa-merged-shared", "nsa-paper")
PASSES = ("forward", "train", "decode")
"""What `qat bench attention` measures."""
CASES = ("ours", "plain-eager", "plain-compiled", "torchao-int2", "reference")
"""What `qat bench baselines` compares, by the names that its rows carry."""
DEFAULT_SHAPE = "qwen3-0.6b"
CPU_SHAPE = "tiny"
"""What is measured where nobody names a student."""
DEFAULT_LENGTH, DEFAULT_TOP_K, DEFAULT_DRAWS = 64, 64, 50
GIB_PER_UNIT = {"gib": 1.0, "gb": 1e9 / 2**30, "mib": 2**-10, "mb": 1e6 / 2**30}


# TPUs that a step is compiled for. Memory is one chip's HBM as its maker states it (Google Cloud's
# documentation); what the compiler lets a program have is a little less.


@dataclass(frozen=True)
class Topology:
    """One chip of a kind."""

    name: str
    described: str
    """The smallest slice that libtpu describes; the step is compiled for its first chip."""
    host_bounds: tuple[int, int, int] | None
    """Chips of a host, where libtpu must be told."""
    hbm_gib: float


TOPOLOGIES = (
    Topology("v4", "v4:2x2x1", None, 32),
    Topology("v5e", "v5e:1x1", (1, 1, 1), 16),
    Topology("v5p", "v5p:2x2x1", None, 95),
    Topology("v6e", "v6e:1x1", (1, 1, 1), 32),
)


def split_names(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[Topology, ...]]:
    """Devices to predict, and topologies to compile for; every other name counts as a device."""
    known = {topology.name: topology for topology in TOPOLOGIES}
    cleaned = [name.strip() for name in names]
    devices = tuple(name for name in cleaned if name.lower() not in known)
    return devices, tuple(known[name.lower()] for name in cleaned if name.lower() in known)


class MeasureConfig(StepConfig):
    """One setting of the training step, and how it is measured."""

    to: Formats[str] = "q2a4"
    """Preset that a student given by a shape's name is quantized by; q2a4_a8 and the like quantize
    the inputs of its linears too."""
    layers: Formats[int | None] = Field(None, ge=1)
    """Decoder layers of a student given by a shape's name; all that it was published with if not
    given."""
    attention: Formats[str | None] = None
    """How the student attends, as 'qat convert --attention' names it; as it is if not given."""
    cache_dir: Text[Path | None] = None
    """Teacher cache for real batches; without one they are random."""
    seq_len: Text[int | None] = Field(None, ge=2)
    """Positions in a sequence; by default the cache's, or 64."""
    top_k: Text[int | None] = Field(None, ge=1)
    """Teacher tokens at a position; by default the cache's, or 64."""
    steps: Measured[int] = Field(20, ge=1)
    """Timed optimizer steps."""
    warmup: Measured[int] = Field(3, ge=1)
    """Steps before the clock starts; the first one compiles."""
    memory_limit: Measured[str] = ""
    """Emulate a device of so much memory, such as 16GiB."""

    @field_validator("memory_limit")
    @classmethod
    def _check_memory_limit(cls, text: str) -> str:
        if text:
            parse_gib(text)
        return text

    @property
    def memory_limit_gib(self) -> float | None:
        """The memory to stay within, or None for all that there is."""
        return parse_gib(self.memory_limit) if self.memory_limit else None


class BenchConfig(MeasureConfig):
    """What `qat bench` measures. Learning rates are zero: every trial sees the same student."""

    shape: Formats[str | None] = None
    """Published shape to measure with random weights, where no STUDENT is named; qwen3-0.6b, or
    tiny on a CPU, if neither is."""
    batch_sizes: Measured[str] = ""
    """Batch sizes to measure, joined by commas; with --find-max-batch, the only ones to try."""
    find_max_batch: Measured[bool] = False
    """Search the largest batch that fits into memory, and the fastest."""
    plan: Measured[bool | str] = False
    """Predict other devices from this run: all, or those named, joined by commas; for v4, v5e, v5p
    and v6e the step is compiled, without a TPU (needs the extra tpu-plan)."""
    strict: Measured[bool] = False
    """Fail if something else ran than was asked for: another dtype, uncompiled layers, ..."""

    @field_validator("batch_sizes")
    @classmethod
    def _check_batch_sizes(cls, text: str) -> str:
        parse_sizes(text)
        return text

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes named, ascending; none if none are."""
        return parse_sizes(self.batch_sizes)

    @property
    def topologies(self) -> tuple[Topology, ...]:
        """TPUs that the step is to be compiled for."""
        return split_names(self.plan.split(","))[1] if isinstance(self.plan, str) else ()

    @property
    def planned(self) -> tuple[str, ...] | None:
        """Names of the devices to predict; empty means all, None no prediction."""
        if isinstance(self.plan, bool):
            return () if self.plan else None
        return split_names(self.plan.split(","))[0] or None


class BaselinesConfig(MeasureConfig):
    """Our step beside other ways to do the same, in one run on the same shapes and data."""

    only: Measured[str] = ",".join(CASES)
    """Cases to run, joined by commas."""
    rounds: Measured[int] = Field(2, ge=1)
    """How often all cases take their turn; every second round runs them backwards."""

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


class KernelsConfig(Settings):
    """Every Triton kernel and its reference through the gates: compile, correct, fast."""

    only: str = ""
    """Parts of kernels' names, joined by commas; all for none."""
    shape: str | None = None
    """Published shape whose dimensions speed is measured at, or tiny for a trial; by default
    qwen3-0.6b on a GPU, and tiny where no kernel runs."""
    device: str = "auto"
    """Where to measure: auto, cpu, cuda, cuda:1."""
    repeats: int = Field(30, ge=1)
    """Rounds in which a kernel and its reference take turns."""
    limit_s: float = Field(4.0, gt=0)
    """Seconds for the rounds of one kernel; at least five are taken."""
    seed: int | None = Field(None, ge=0)
    """Of the inputs; without it a new one each time, which the rows tell."""
    tune: bool = False
    """Tune the kernels that passed; what beats its default goes into the device's table."""
    keep: int = Field(4, ge=1)
    """Configurations that are measured again beside the default."""
    figures: Path | None = None
    """Append the figures that this run is asked for to that file."""


class AttentionConfig(Settings):
    """Dense attention by each of PyTorch's kernels, and sparse attention by each of ours."""

    lengths: str = "512,1024,2048,4096,8192,16384,32768,65536"
    """Positions in a row, joined by commas."""
    groups: str = "2,4,5,8,16"
    """Query heads that share a key-value head, joined by commas."""
    key_heads: int = Field(8, ge=1)
    """Key-value heads."""
    head_dim: int = Field(128, ge=1)
    """Width of a head."""
    batch_size: int = Field(1, ge=1)
    """Rows."""
    attention: str = "nsa,nsa-merged"
    """Kinds of sparse attention, as 'qat convert --attention' calls them, joined by commas."""
    passes: str = "forward,train,decode"
    """Kinds of calls: prefill, prefill with backward, and one position more."""
    device: str = "auto"
    """Where to measure: auto, cpu, cuda, cuda:1."""
    repeats: int = Field(20, ge=1)
    """Rounds in which all ways take turns."""
    limit_s: float = Field(4.0, gt=0)
    """Seconds for the rounds of one shape; at least five are taken."""

    @field_validator("lengths", "groups")
    @classmethod
    def _check_sizes(cls, text: str) -> str:
        if not parse_sizes(text):
            raise ValueError("expected at least one size; write them as 4096,16384")
        return text

    @field_validator("attention", "passes")
    @classmethod
    def _check_names(cls, text: str, info: ValidationInfo) -> str:
        known = ATTENTION if info.field_name == "attention" else PASSES
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is unknown; use any of {','.join(known)}")
        return text


class SweepConfig(Settings):
    """How a sweep runs; nothing here changes what is compared but `tiny`."""

    tiny: bool = False
    """Run the recipe's [tiny] variant, which a CPU takes in seconds."""
    dry_run: bool = False
    """Print the runs and stop."""
    strict: bool = False
    """Fail a run in which something else ran than was asked for."""
    sample_s: float = Field(1.0, gt=0)
    """Seconds between samples of GPU and host."""
    allow_command: bool = False
    """Run the program that a recipe of verb = "command" names: read it before."""


class QualityConfig(Settings):
    """Where the jobs of a recipe run; nothing here changes what they find."""

    workers: int = Field(1, ge=1)
    """Jobs side by side on each device; seconds compare only between rows of equal workers."""
    device: str = "auto"
    """auto or cuda, whose jobs spread over all GPUs, cpu, cuda:1 or mps."""
    only: str = ""
    """Recipes to run now: those whose name holds one of these words, joined by |; all if empty.
    The table keeps what others found before."""

    def wants(self, name: str) -> bool:
        """Whether the recipe called `name` is to run."""
        return any(word.strip() in name for word in self.only.split("|"))


def parse_gib(text: str) -> float:
    """`16GiB`, `24 GB` or `512MiB` in GiB.

    Raises:
        ValueError: it is not a positive number with such a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    unit = GIB_PER_UNIT.get(found[2].lower()) if found else None
    if unit is None or float(found[1]) == 0:
        raise ValueError("expected a size with its unit; write it as 16GiB or 512MiB")
    return float(found[1]) * unit


def parse_sizes(text: str) -> tuple[int, ...]:
    """`8,16,32` as numbers, ascending, each once; nothing for no text.

    Raises:
        ValueError: a part is not a whole number of at least 1.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError("expected whole numbers of at least 1; write them as 8,16,32")
    return tuple(sorted({int(part) for part in parts}))


# Recipe files of the benchmarks: TOML read with messages that say what was meant.


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The tables of a TOML file that should be a recipe of `kind`.

    Raises:
        ConfigError: it is missing or no TOML, or would run code of others.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"recipe={path}: {error.strerror}; expected a TOML file; check the path"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"recipe={path} is not TOML ({error}); expected a {kind} recipe; mend that line"
        ) from None
    refuse_code(values, str(path))
    return values


def check_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a key that nobody reads, with the nearest one that somebody does.

    Raises:
        ConfigError: naming the first such key.
    """
    known = sorted(known)
    for key in keys:
        if key not in known:
            close = nearest(key, known)
            hint = f"did you mean {close[0]!r}?" if close else f"choose among {', '.join(known)}"
            raise ConfigError(f"{where} has {key!r}, expected a key that it knows; {hint}")


# Published sizes of the models that students are made of, by name, from each model's config.json on
# the hub. What does not change the cost of a step (rotary base, epsilon, tokens of a kind) is left
# at its architecture's default.


def _sizes(
    width: int, ffn: int, layers: int, heads: tuple[int, int, int], *, tied: bool = True
) -> dict[str, Any]:
    """Sizes of a shape; `heads` are query heads, key-value heads and the width of one."""
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
    "llama-3.2-1b": {**LLAMA, **_sizes(2048, 8192, 16, (32, 8, 64))},
    "llama-3.2-3b": {**LLAMA, **_sizes(3072, 8192, 28, (24, 8, 128))},
    "llama-3.3-70b": {**LLAMA, **_sizes(8192, 28672, 80, (64, 8, 128), tied=False)},
    "gemma-3-270m": {**GEMMA3, **_sizes(640, 2048, 18, (4, 1, 256))},
    "gemma-3-1b": {**GEMMA3, **_sizes(1152, 6912, 26, (4, 1, 256))},
}  # fmt: skip
"""Arguments of each architecture's configuration class."""


def shape_called(name: str) -> dict:
    """The sizes published under `name`, upper or lower case.

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
