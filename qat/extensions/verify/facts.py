"""Read what is known of a model on disk, in any of the file formats."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from qat.models.language_model import LanguageModel


class Finding(NamedTuple):
    """A difference that a file should not have."""

    kind: str
    """One of the kinds that docs/export.md lists."""
    place: str
    """The tensor, setting or token."""
    words: str
    """The value that was found and the one that was expected."""


class Stored(NamedTuple):
    """The type and scales in which a file stores a weight."""

    type: str
    """A name for the format, such as Q4_0 or bfloat16."""
    bits: float
    """Significant bits of each weight, without scales."""
    scales: Tensor | None = None
    """Scales in the dtype of the file, `(O, G)`, of G groups per row; None if there are none."""


class Rules(NamedTuple):
    """The rules by which a tokenizer splits text, under the names of llama.cpp."""

    kind: str
    pre: str
    merges: list[str]


class Tokens(NamedTuple):
    """The tokenizer of a model."""

    names: dict[int, str]
    rules: Rules | None
    """None if llama.cpp has no name for them."""
    encode: Callable[[str], list[int]] | None
    """None for a file that only its own engine can tokenize with."""
    begin: int | None
    """The token that texts begin with; None for none."""
    end: int | None
    """The token that ends an answer."""
    ends: frozenset[int]
    """All tokens that end an answer."""
    template: str | None
    """The chat template."""


@dataclass(frozen=True)
class Side:
    """One of the two models that are compared."""

    source: str
    form: str
    """The kind of file, such as gguf."""
    config: PreTrainedConfig
    weights: dict[str, Tensor]
    """All parameters as floats, by the names of transformers."""
    stored: dict[str, Stored]
    """How they are stored, by the same names; only of what a file says."""
    tokens: Tokens | None
    """None if there is no tokenizer."""
    is_tied: bool
    """True if the head uses the table of the embedding."""
    model: LanguageModel | None = None
    """The model that these weights make; None if it cannot be made."""
    program: Callable[[Tensor], Tensor] | None = None
    """Maps ids `(1, S)` to logits `(1, S, V)` where an engine runs the file; None elsewhere. Its
    `weights` are then those whose names are understood."""
    frequencies: Tensor | None = None
    """The rotary frequencies of a program; of a model they are in its buffers."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The tokenizer in transformers; None if it was not opened."""
