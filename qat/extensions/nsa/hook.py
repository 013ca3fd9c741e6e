"""Native Sparse Attention as the core sees it: `qat.models.attention.SparseAttention`.

Functions import what they need: a name is read before torch is loaded, and a model that only
generates needs neither the fit nor the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qat.config import read_toml
from qat.errors import ConfigError, nearest
from qat.extensions.nsa.kernels.config import PRESETS, NSAConfig
from qat.models.attention import DENSE, LayerFit

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from qat.backend.base import Backend
    from qat.convert.calibrate import TokenBatch
    from qat.extensions.bench.config import AttentionConfig
    from qat.models.language_model import LanguageModel
    from qat.observe.health import Check
    from qat.train.preflight import RunFinding


def read(name: str) -> NSAConfig:
    """Return the definition called `name`: a preset, or a TOML file of settings.

    Raises:
        ConfigError: it is neither, or a setting is out of range.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.is_file():
        known = (DENSE, *PRESETS)
        found = nearest(name, known)
        hint = f"; did you mean {found[0]}?" if found else ""
        raise ConfigError(
            f"attention={name} is neither a file nor known; use one of {', '.join(known)}{hint}"
        )
    values = read_toml(path, f"attention={path}", "settings of sparse attention")
    return NSAConfig.parse(values, str(path))


def swap_in(model: PreTrainedModel, definition: NSAConfig) -> None:
    """Change the attention of `model` in place: see `qat.extensions.nsa.swap`."""
    from qat.extensions.nsa.swap import swap_attention

    swap_attention(model, definition)


def swap_out(model: PreTrainedModel) -> None:
    """Change the attention of `model` back to dense."""
    from qat.extensions.nsa.swap import unswap_attention

    unswap_attention(model)


def restore(model: PreTrainedModel) -> None:
    """Swap in what the configuration of `model` defines."""
    from qat.extensions.nsa.swap import nsa_config, swap_attention

    swap_attention(model, nsa_config(model))


def layers(config: PreTrainedConfig) -> Collection[int]:
    """Return the decoder layers with sparse attention."""
    from qat.extensions.nsa.swap import nsa_config

    chosen = nsa_config(config).layers
    return range(config.get_text_config().num_hidden_layers) if chosen is None else chosen


def mean_keys(config: PreTrainedConfig, length: int) -> float:
    """Return the mean number of keys that a query reads, pooled ones included.

    The keys that it reads to choose its blocks are left out: few queries do.
    """
    from qat.extensions.nsa.swap import nsa_config
    from qat.models.flops import mean_within

    sparse = nsa_config(config)
    selected = mean_within(sparse.selected_keys, length)
    if sparse.mode == "merged":
        return selected
    compressed = sum(map(sparse.num_compressed, range(1, length + 1))) / length
    return selected + mean_within(sparse.window, length) + compressed


def choose_backend(model: PreTrainedModel, length: int, device: torch.device) -> str:
    """Choose, log and return the backend for rows of `length`."""
    from qat.extensions.nsa.swap import log_route

    return log_route(model, length, device)


def fit(student: LanguageModel, batches: Sequence[TokenBatch], *, steps: int) -> list[LayerFit]:
    """Fit gates and pooling weights to dense attention, if these rows show a difference."""
    from qat.extensions.nsa.fit import fit_attention

    return fit_attention(student, batches, steps=steps)


def natural_size(name: str, parameter: Tensor) -> float:
    """Return the natural size of a gate or a pooling weight."""
    from qat.extensions.nsa import fit

    return fit.natural_size(name, parameter)


def measure(student: LanguageModel, batch: TokenBatch) -> dict[str, object]:
    """Return the health of every layer on a batch."""
    from qat.extensions.nsa.checks import warn
    from qat.extensions.nsa.fit import attention_health, health_numbers

    numbers = health_numbers(attention_health(student, batch))
    warn(student.model, numbers["nsa_layers"])
    return numbers


def count_reads(
    student: LanguageModel, batch: TokenBatch, event: Callable[..., None]
) -> dict[str, float]:
    """Return the mean number of blocks that a query reads, and that is predicted, on a batch."""
    from qat.extensions.nsa.reads import step_numbers

    return step_numbers(student, batch, event)


def checks(layers: list[dict[str, Any]]) -> Iterable[Check]:
    """Return the health checks of a run's layers, as `measure` left them."""
    from qat.extensions.nsa.checks import checks

    return checks(layers)


def table(layers: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of a report's table about a run's layers."""
    from qat.extensions.nsa.checks import table

    return table(layers)


def findings(
    learn: str, student: PreTrainedConfig, length: int, backend: Backend
) -> Iterable[RunFinding]:
    """Return what preflight says of a run on sequences of `length`."""
    from qat.extensions.nsa import preflight

    return preflight.findings(learn, preflight.plan_of(student, length, backend))


def run_benchmark(
    config: AttentionConfig, out: Path | None
) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """Time dense and sparse attention."""
    from qat.extensions.nsa.bench import run_attention

    return run_attention(config, out)
