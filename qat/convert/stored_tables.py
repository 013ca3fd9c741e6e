"""Formats that a student's embedding and head have in the file of the source.

A llama.cpp file may hold one table twice, rounded to different types; the finer one is used for
both.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from transformers import PreTrainedModel

from qat.convert.tables import FLOAT_BITS, StoredTable
from qat.models.directory import GGUF, resolve
from qat.models.gguf import read_rows
from qat.models.gguf_header import read_header
from qat.nn.swap import (
    table_names,
    tie_head,
)

logger = logging.getLogger(__name__)

SAMPLE = 256
"""Rows of a table that are inspected before it is read."""
GGUF_TABLES = ("token_embd.weight", "output.weight")
"""Names of the embedding and the head in llama.cpp."""


def stored_tables(source: str, model: PreTrainedModel) -> dict[str, StoredTable]:
    """Return the tables of `model` in the GGUF file `source`, by the model's names; else nothing.

    Only a few rows are read.
    """
    path = Path(resolve(source))
    if path.suffix != GGUF:
        return {}
    header, found = read_header(path), {}
    for name, stored in zip(table_names(model), GGUF_TABLES, strict=False):  # a tied head has none
        if (tensor := header.get(stored)) is not None:
            rows = range(0, tensor.shape[0], max(1, tensor.shape[0] // SAMPLE))
            found[name] = StoredTable(tensor.bits, read_rows(path, tensor, rows))
    return found


class Twins(NamedTuple):
    """Two roundings of one table."""

    coarse: str
    """The name of the one in fewer bits."""
    fine: str
    words: str
    """Both tables, their bits and their distance in words, for a message."""

    @classmethod
    def among(cls, stored: Mapping[str, StoredTable]) -> Self | None:
        """Return the two tables `stored` if rounding explains their distance, else None.

        A table rounded to b bits has a relative error of about two thirds of `2**(1 - b)`: two
        tables that are further apart are different ones.
        """
        if len(stored) != 2 or max(table.bits for table in stored.values()) >= FLOAT_BITS:
            return None
        coarse, fine = sorted(stored, key=lambda name: stored[name].bits)
        samples = stored[coarse].sample, stored[fine].sample
        if samples[0].shape != samples[1].shape:
            return None
        distance = ((samples[0] - samples[1]).norm() / samples[1].norm()).item()
        if not distance <= 2.0 ** (1 - stored[coarse].index_bits):
            return None
        words = (
            f"the source holds one table twice, as {coarse} in {stored[coarse].bits:.3g} bits and "
            f"as {fine} in {stored[fine].bits:.3g}, {distance:.1%} apart"
        )
        return cls(coarse, fine, words)


def join_tables(
    model: PreTrainedModel, stored: Mapping[str, StoredTable]
) -> dict[str, StoredTable]:
    """Tie the head of `model` to its embedding if both are roundings of one table; return the rest.

    The finer one of the two is kept.
    """
    twins = Twins.among(stored)
    if twins is None:
        return dict(stored)
    tie_head(model, model.get_submodule(twins.fine).weight.detach())
    logger.info("%s: the student has the finer one for both", twins.words)
    return {table_names(model)[0]: stored[twins.fine]}
