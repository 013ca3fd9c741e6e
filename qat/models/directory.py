"""Checkpoint directories that appear whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from qat.errors import CheckpointError
from qat.files import whole_directory
from qat.models.checksums import listed_files


@contextmanager
def atomic_directory(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory to fill, which becomes `out` when the block ends and vanishes when it fails.

    With `replace`, an older `out` stays until the new one is complete; then it goes, but for files
    that qat did not write.

    Raises:
        ConfigError: `out` is not empty, or no longer, and `replace` is false.
        CheckpointError: the disk is full, or `out` cannot be written for another reason.
    """
    try:
        with whole_directory(out, replace=replace, written=listed_files) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{out}: writing stopped ({error}); nothing new was left there: free some space or "
            "choose another --out"
        ) from error
