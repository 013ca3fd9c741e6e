"""Teacher caches as data sets of PyTorch.

Shapes: B sequences, S positions.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat.data.cache import Split
from qat.data.opening import open_cache
from qat.data.packing import NO_LABEL, Batch
from qat.data.reader import TeacherCache
from qat.errors import ConfigError

Row = dict[str, Tensor]


class CacheDataset(Dataset[Row]):
    """The sequences of a teacher cache, with the teacher's targets.

        trainer = qat.QatTrainer(student, args, train_dataset=CacheDataset("caches/mine"))

    A row has the fields of `Batch` by name, without the dimension of sequences.
    """

    def __init__(self, cache: TeacherCache | str | Path, split: Split = "train") -> None:
        self.cache = cache if isinstance(cache, TeacherCache) else open_cache(str(cache))
        self.split: Split = split

    def __len__(self) -> int:
        """Return the number of sequences."""
        return self.cache.num_sequences(self.split)

    def __getitem__(self, index: int) -> Row:
        """Return one sequence."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return several sequences, which are read from the shards together."""
        batch = self.cache.batch(torch.tensor(indices).numpy(), split=self.split)
        rows = zip(*(tensor.unbind() for tensor in batch), strict=True)
        return [dict(zip(Batch._fields, row, strict=True)) for row in rows]


def as_batch(inputs: dict[str, Tensor]) -> Batch:
    """Return the batch that a data loader made of rows of a `CacheDataset`, or of a text.

    A text has `input_ids`, and `attention_mask` or `labels` or both, as models of transformers take
    them; it has no targets of a teacher.

    Raises:
        ConfigError: the inputs have no token ids.
    """
    if "input_ids" not in inputs:
        raise ConfigError(
            f"the inputs of a step are {', '.join(inputs)}, expected input_ids among them; give "
            "the rows of a CacheDataset, or token ids"
        )
    if "topk_ids" in inputs:
        return Batch(**{name: inputs[name] for name in Batch._fields})
    ids = inputs["input_ids"]
    present = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    labels = inputs.get("labels", ids).masked_fill(~present, NO_LABEL)
    after = torch.full_like(ids, NO_LABEL)
    after[:, :-1] = labels[:, 1:]
    after = after.masked_fill(~present, NO_LABEL)
    none = ids[..., None][..., :0]
    return Batch(
        input_ids=ids,
        position_ids=(present.cumsum(-1) - 1).clamp(min=0),
        mask=after.ne(NO_LABEL),
        labels=after,
        topk_ids=none,
        topk_logprobs=none.float(),
        tail_logprob=torch.full_like(ids, torch.nan, dtype=torch.float32),
        sample_ids=none,
        sample_counts=none.float(),
    )
