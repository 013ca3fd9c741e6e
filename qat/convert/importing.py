"""Interface of importers, with which extensions read another system's caches and checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qat.data.cache import Manifest
from qat.data.config import ImportConfig
from qat.hooks import extension


@dataclass(frozen=True)
class ImportReport:
    """The report of an import."""

    source: str
    """The file that was read."""
    base: str
    """The float model that the checkpoint was made from."""
    version: int
    """Version of the other system's format."""
    linears: int
    """Quantized linears."""
    formats: dict[str, int]
    """Number of linears per format, such as `lut2 r32 s16`."""
    adapters: int
    """Linears with a LoRA adapter, which is kept."""
    floored: int
    """Weights that became zero because version 1 raises their scale to 1e-8."""
    bits_per_weight: float
    """Bits per weight over all weights: linears with scales, codebooks and adapters, tables, all
    else."""
    linear_bits: float
    """Bits per weight of the quantized linears alone."""
    megabytes: float
    """Size of the files with tensors, in units of 1e6 bytes."""


class Importer(Protocol):
    """The interface of a module that an entry point of the group `qat.importers` names."""

    def import_cache(self, source: Path, config: ImportConfig, out: Path) -> Manifest:
        """Convert the teacher cache in the directory `source` to `out`, completely or not at all.

        Raises:
            CacheError: `source` is not such a cache or damaged.
        """

    def import_checkpoint(self, source: Path, base: str | None, out: Path) -> ImportReport:
        """Convert the checkpoint at `source` to a packed one in `out`, completely or not at all.

        `base` is the float model that it was made from; None for the one that `source` names.

        Raises:
            CheckpointError: `source` is not such a checkpoint, damaged, or not made from `base`.
        """


def load_importer(name: str) -> Importer:
    """Return the importer called `name`.

    Raises:
        ConfigError: its extension is not installed.
    """
    return extension("qat.importers", name)
