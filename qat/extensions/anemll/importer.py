"""Importer of the reference system's files, found by the entry point group `qat.importers`."""

from qat.extensions.anemll.cache import import_cache
from qat.extensions.anemll.checkpoint import import_checkpoint

__all__ = ["import_cache", "import_checkpoint"]
