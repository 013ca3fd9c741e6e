"""Read what only imported caches hold.

Shapes: B sequences, S positions, R random tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from qat.data.cache import Split
from qat.data.codec import id_bits, unpack_bits
from qat.data.reader import TeacherCache


class ImportedCache(TeacherCache):
    """A cache imported with `--keep-negatives`."""

    def negatives(
        self, indices: Sequence[int] | np.ndarray, split: Split = "train"
    ) -> tuple[Tensor, Tensor]:
        """Return random tokens, `(B, S - 1, R)` int64, and their float16 logits.

        They are uniform, with repetition, and may be among the top K. R is 0 if none were kept.

        Raises:
            IndexError, CacheError: see `TeacherCache.batch`.
        """
        R, S = self.manifest.negatives, self.sequence_length
        if R == 0:
            nothing = torch.zeros(len(indices), S - 1, 0)
            return nothing.long(), nothing.half()
        rows, _ = self._read(indices, split, ["negative_ids", "negative_logits"])
        bits = id_bits(self.manifest.teacher.vocab_size)
        ids = self._valid_ids(unpack_bits(rows["negative_ids"], bits, (S - 1) * R).long())
        return ids.view(-1, S - 1, R), self._finite(rows["negative_logits"], "logit")
