"""The seam between the cache's batches and the losses' targets."""

from qat.data.packing import Batch
from qat.losses.targets import Targets


def to_targets(batch: Batch) -> Targets:
    """A batch's targets, `(B, S)` flattened to `(T,)`: views where the batch is contiguous."""
    return Targets(**{name: getattr(batch, name).flatten(0, 1) for name in Targets._fields})
