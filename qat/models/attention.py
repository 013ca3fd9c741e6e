"""Attention of a model by its configuration: dense, or of an extension behind one interface.

A definition of the extension's attention is in config.json under the extension's name. Only such a
model, or a user who names another attention than `dense`, loads the extension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from qat.config import Settings
from qat.errors import CheckpointError
from qat.hooks import extension
from qat.quant.spec import KvSpec

if TYPE_CHECKING:  # hf_quantizer needs this file while transformers is still being imported
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from qat.backend.base import Backend

DENSE = "dense"
"""The name of attention without a definition."""
SPARSE = "nsa"
"""The extension with sparse attention, the key of its definition in config.json, and the module of
each attention module that holds its parameters."""

NAME = "qat"
"""The attention implementation of `qat.models.document_attention`."""
KV = {f"{NAME}-kv{bits}": KvSpec(bits=bits) for bits in (8, 4)}
"""Attention implementations that quantize keys and values, by name."""
BUILT_IN = {None, "eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm", "qat"}
"""Implementations of attention and of experts that need no external kernel."""


@dataclass(frozen=True)
class LayerFit:
    """The distance of one layer's attention from dense attention of the same input."""

    name: str
    error_before: float
    """`|sparse - dense| / |dense|` of the attention's output, Frobenius norms over all tokens."""
    error_after: float


class SparseAttention(Protocol):
    """The interface of the module that an entry point of the group `qat.attention` names.

    A student is a `qat.models.language_model.LanguageModel`, a batch a
    `qat.convert.calibrate.TokenBatch`, a finding a `qat.train.preflight.RunFinding`: all of them
    import this file.
    """

    def read(self, name: str) -> Settings:
        """Return the definition called `name`, or of the TOML file at that path.

        Raises:
            ConfigError: it is neither, or a setting is out of range.
        """

    def swap_in(self, model: PreTrainedModel, definition: Settings) -> None:
        """Change the attention of `model` in place from dense to `definition`.

        Raises:
            CheckpointError: the attention is of an unsupported kind, or sparse already.
            ConfigError: `definition` names layers that the model does not have.
        """

    def swap_out(self, model: PreTrainedModel) -> None:
        """Change the attention of `model` back to dense and drop the parameters of sparse one."""

    def restore(self, model: PreTrainedModel) -> None:
        """Swap in what the configuration of `model` defines, before its weights are loaded.

        Raises:
            CheckpointError, ConfigError: as `swap_in`, or the definition is invalid.
        """

    def layers(self, config: PreTrainedConfig) -> Collection[int]:
        """Return the decoder layers with sparse attention."""

    def mean_keys(self, config: PreTrainedConfig, length: int) -> float:
        """Return how many keys a query of those layers reads on average in rows of `length`."""

    def choose_backend(self, model: PreTrainedModel, length: int, device: torch.device) -> str:
        """Choose, log and return the implementation for rows of `length`: compiled layers cannot.

        Raises:
            ConfigError: the requested implementation does not support them.
        """

    def fit(self, student: Any, batches: Sequence[Any], *, steps: int) -> list[LayerFit]:
        """Train new parameters of sparse attention towards dense attention of the same input."""

    def natural_size(self, name: str, parameter: Tensor) -> float:
        """Return the size of one of its parameters, to which learning rates are relative."""

    def measure(self, student: Any, batch: Any) -> dict[str, object]:
        """Return measures of every layer on a batch, under names that start with `nsa_`."""

    def count_reads(self, student: Any, batch: Any, event: Any) -> dict[str, float]:
        """Return what the selections of a step read and should; report a difference to `event`."""

    def checks(self, layers: list[dict[str, Any]]) -> Iterable[Any]:
        """Return health checks of a run whose layers measure so."""

    def table(self, layers: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
        """Return titles and cells of a report's table about these measures of layers."""

    def findings(
        self, learn: str, student: PreTrainedConfig, length: int, backend: Backend
    ) -> Iterable[Any]:
        """Return preflight findings about rows of `length`; raise what `choose_backend` does."""

    def run_benchmark(
        self, config: Settings, out: Path | None
    ) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
        """Time dense and sparse attention; return the results' file, the rows, the crossovers."""


def load_sparse_attention() -> SparseAttention:
    """Return the extension with sparse attention.

    Raises:
        ConfigError: it is not installed.
    """
    return cast(SparseAttention, extension("qat.attention", SPARSE))


def attends_sparsely(model: nn.Module | PreTrainedConfig) -> bool:
    """Return whether a model, or the model of a configuration, has sparse attention."""
    return getattr(getattr(model, "config", model), SPARSE, None) is not None


def sparse_attention(model: nn.Module | PreTrainedConfig) -> SparseAttention | None:
    """Return the extension that computes the attention of a model; None: it is dense.

    Raises:
        ConfigError: the extension is not installed.
    """
    return load_sparse_attention() if attends_sparsely(model) else None


def is_all_sparse(config: PreTrainedConfig) -> bool:
    """Return whether every layer of a model with this configuration has sparse attention."""
    sparse = sparse_attention(config)
    if sparse is None:
        return False
    return set(range(config.get_text_config().num_hidden_layers)) <= set(sparse.layers(config))


def read_attention(name: str) -> Settings | None:
    """Return the definition of attention that a user names; None for `dense`.

    Raises:
        ConfigError: there is none of that name, or the extension is not installed.
    """
    return None if name == DENSE else load_sparse_attention().read(name)


def change_attention(model: PreTrainedModel, definition: Settings | None) -> None:
    """Change the attention of `model` in place; None: dense. Do nothing if it is that already.

    Raises:
        CheckpointError, ConfigError: see `SparseAttention.swap_in`.
    """
    if definition is None:
        if attends_sparsely(model):
            load_sparse_attention().swap_out(model)
    elif getattr(model.config, SPARSE, None) != definition.model_dump(mode="json"):
        load_sparse_attention().swap_in(model, definition)


def kv_spec(config: PreTrainedConfig) -> KvSpec | None:
    """Return the format of keys and values by a model's configuration; None if unquantized."""
    return KV.get(config.get_text_config()._attn_implementation)


def check_attention(config: PreTrainedConfig) -> None:
    """Refuse a configuration with which transformers would download and run a kernel.

    Raises:
        CheckpointError: an implementation is named that is not built in.
    """
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for part in (config, *parts):
        for key in ("_attn_implementation", "_experts_implementation"):
            value = getattr(part, key, None)
            if not isinstance(value, str | None) or value not in BUILT_IN:
                raise CheckpointError(
                    f"config.json of {config.name_or_path or 'the model'} names "
                    f"{key[1:]}={value!r}, which transformers may fetch as a program, expected "
                    "eager, sdpa or none; remove that key"
                )
