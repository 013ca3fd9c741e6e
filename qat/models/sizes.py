"""Sizes of a checkpoint and of the model that it came from."""

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel

from qat.errors import QatError
from qat.models.checkpoint import load_skeleton
from qat.models.cost import linear_bits, parameter_count, quantized_parameter_count
from qat.models.directory import adapted, resolve
from qat.nn.quant_linear import quant_linears
from qat.online import snapshot


def model_bytes(path: Path) -> int:
    """Return the bytes of the tensors in the safetensors files of a model directory."""
    return sum(tensor_sizes(path).values())


def tensor_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor in the safetensors files of a directory."""
    sizes = {}
    for file in path.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        offsets = {name: tensor["data_offsets"] for name, tensor in header.items()}
        sizes |= {name: end - begin for name, (begin, end) in offsets.items()}
    return sizes


def linear_bits_in(sizes: Mapping[str, int], model: PreTrainedModel, *, otherwise: float) -> float:
    """Return the bits per weight of the quantized linears in files whose tensors have these sizes.

    `otherwise` where the files do not tell all linears apart.
    """
    linears = quant_linears(model)
    own: dict[str, int] = dict.fromkeys(linears, 0)
    for key, size in sizes.items():
        name = next((n for n in accumulate(key.split("."), "{}.{}".format) if n in own), None)
        if name is not None and key != f"{name}.bias":
            own[name] += size
    if not all(own.values()):
        return otherwise
    return 8 * sum(own.values()) / quantized_parameter_count(model)


MEGABYTE = 1e6
SIZE_COLUMNS = ("MB of the source", "MB", "bits per weight", "of linears")
"""Headings of `Sizes.cells`."""


ALIKE = 1.001
"""Ratio up to which files are as large: one with the same weights may have a longer header."""


class Sizes(NamedTuple):
    """The sizes of a model and of the one that it came from."""

    source_megabytes: float | None
    """Weights of the source in 10**6 bytes; None if its files are not on this disk."""
    megabytes: float
    """Weights of the result in 10**6 bytes."""
    bits_per_weight: float
    """Bits per weight over all weights, with tables, norms, scales and codebooks."""
    linear_bits: float
    """Bits per weight of the quantized linears alone; NaN without any."""

    def cells(self) -> tuple[str, str, str, str]:
        """Return a table row for the headings `SIZE_COLUMNS`."""
        return (
            "-" if self.source_megabytes is None else f"{self.source_megabytes:.1f}",
            f"{self.megabytes:.1f}",
            f"{self.bits_per_weight:.3f}",
            "-" if math.isnan(self.linear_bits) else f"{self.linear_bits:.3f}",
        )

    def rounded(self) -> dict[str, float | None]:
        """Return the sizes by name, rounded to four decimals; None for an unknown one."""
        return {
            name: None if value is None or math.isnan(value) else round(value, 4)
            for name, value in self._asdict().items()
        }

    def warning(self, reason: str) -> str | None:
        """Return a warning with `reason` if the result is larger than its source, or None."""
        source, size, *_ = self.cells()
        if self.source_megabytes is None or self.megabytes <= ALIKE * self.source_megabytes:
            return None
        return f"WARNING: {size} MB are more than the {source} MB of the source: {reason}"


def source_megabytes(source: str) -> float | None:
    """Return the size of the model's weights in 10**6 bytes; None if they are not on this disk."""
    try:
        if not Path(source).exists():  # local files only: a report may name a deleted path
            source = str(snapshot(source, local_only=True))
        path = Path(adapted(source) or resolve(source))
    except (QatError, OSError, ValueError):
        return None
    files = [path] if path.is_file() else path.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    size = size or sum(file.stat().st_size for file in path.glob("*.bin"))
    return size / MEGABYTE if size else None


def checkpoint_sizes(directory: Path, source: str | None) -> Sizes:
    """Compute the sizes of a packed checkpoint; only its configuration and file sizes are read.

    Raises:
        CheckpointError: it is not a packed checkpoint.
    """
    model, size = load_skeleton(directory), model_bytes(directory)
    return Sizes(
        source_megabytes=None if source is None else source_megabytes(source),
        megabytes=size / MEGABYTE,
        bits_per_weight=8 * size / parameter_count(model),
        linear_bits=linear_bits(model),
    )
