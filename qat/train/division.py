"""Which part of a step is a rank's, and what all ranks decide together."""

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from qat.backend.device import Backend
from qat.config import fingerprint
from qat.data.sampler import sequence_indices
from qat.errors import ConfigError, TrainingError
from qat.ranks import Ranks
from qat.train.config import TrainConfig


def divide(config: TrainConfig, world: int) -> TrainConfig:
    """The settings of each of `world` ranks: `grad_accum_steps` follows from the global batch.

    Raises:
        ConfigError: the global batch cannot be divided so.
    """
    if not config.global_batch_size:
        return config
    unit = world * config.batch_size
    if config.global_batch_size % unit:
        raise ConfigError(
            f"global_batch_size={config.global_batch_size} does not divide by {world} ranks x "
            f"batch_size={config.batch_size}; expected a multiple of {unit}: use --batch-size N or "
            "another number of ranks"
        )
    return config.model_copy(update={"grad_accum_steps": config.global_batch_size // unit})


def rank_indices(config: TrainConfig, step: int, num_sequences: int, ranks: Ranks) -> np.ndarray:
    """The sequences of a step that are this rank's: `(grad_accum_steps, batch_size)` int64.

    All ranks together see what one rank with as many times their micro-batches would, so a run may
    go on with another number of ranks at the same global batch.
    """
    count = config.sequences_per_step * ranks.size
    indices = sequence_indices(config.seed, step, count, num_sequences)
    return indices.reshape(-1, ranks.size, config.batch_size)[:, ranks.rank]


class Agreement:
    """What the ranks decided some steps ago, so that no host waits for its device to know it."""

    def __init__(self, backend: Backend, ranks: Ranks) -> None:
        self._backend = backend
        self._lag = backend.decision_lag() if ranks.size > 1 else 0
        self._under_way: deque[tuple[Tensor, Callable[[], None]]] = deque()

    def settle(self, wishes: Tensor) -> bool:
        """Whether anybody wished it: in this step, or in the one `decision_lag` steps before.

        Args:
            wishes: how many ranks wish it in this step, a sum over all, on the device.
        """
        self._under_way.append((self._backend.to_host(wishes), self._backend.finished()))
        if len(self._under_way) <= self._lag:
            return False
        decided, wait = self._under_way.popleft()
        wait()
        return bool(decided)


def digest(tensors: Iterable[Tensor]) -> str:
    """12 hex digits of the bits of float tensors, of their order and shapes; waits for the device.

    Bits are summed as integers, so that what sums them in another order finds the same.
    """
    words = {4: torch.int32, 2: torch.int16}
    tensors = [tensor.detach() for tensor in tensors]
    sums = [tensor.view(words[tensor.itemsize]).sum() for tensor in tensors]
    bits = torch.stack(sums).tolist() if sums else []
    return fingerprint([[tuple(tensor.shape) for tensor in tensors], bits])


def check_alike(tensors: Iterable[Tensor], step: int, ranks: Ranks) -> None:
    """Make sure that all ranks have learned the same, bit for bit.

    Raises:
        TrainingError: one has not: equal sums moved weights differently.
    """
    if ranks.size == 1:
        return
    said = ranks.texts(digest(tensors))
    for rank, other in enumerate(said):
        if other != said[0]:
            raise TrainingError(
                f"after step {step} rank {rank} has other weights than rank 0, expected the same "
                "bits; use devices of one kind and go on from the last checkpoint with --resume"
            )
