"""Select the backend for a layer's attention; each choice is logged once.

Backends that compile are imported only when used, since that takes seconds.
"""

import logging
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import reference
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, past_blocks, select
from qat.kernels import tuned
from qat.kernels.dispatch import HAS_TRITON

logger = logging.getLogger(__name__)
SHARED = 128
"""Queries per selection from which on FlexAttention reads no block in vain."""


class Route(NamedTuple):
    """The requested backend and the one that is used."""

    requested: str
    """A backend's name, or `auto`."""
    backend: Literal["dense", "reference", "flex", "gather", "fla"]
    reason: str
    """The reason for the choice."""


class Threshold(NamedTuple):
    """Lengths at which `auto` changes what computes, as 'qat bench attention --tune' measured."""

    dense: int
    """Longest rows on which dense attention is at least as fast as any sparse kernel."""
    flex: int
    """Longest rows on which FlexAttention is faster than `gather`."""


TABLE = "nsa_route"
"""The name of the thresholds in a device's table of tuned configurations."""
UNMEASURED = Threshold(dense=2**31 - 1, flex=0)
_logged: set[Route] = set()
_measured: dict[tuple[tuned.Key, torch.device], Threshold] = {}


def threshold_key(config: NSAConfig, group: int, head_dim: int) -> tuned.Key:
    """Return what the speed of a row depends on besides its length."""
    return group, head_dim, config.select_tile, config.selected_keys, int(config.mode == "merged")


@torch.compiler.assume_constant_result
def measured(key: tuned.Key, device: torch.device) -> Threshold:
    """Return the device's thresholds, `UNMEASURED` if its table has none.

    Inside a graph that PyTorch compiles, it is what the last call outside found.
    """
    if not torch.compiler.is_compiling():
        _measured[key, device] = tuned.chosen(TABLE, key, UNMEASURED, device)
    return _measured.get((key, device), UNMEASURED)


def choose(
    config: NSAConfig, *, length: int, group: int, head_dim: int, device: torch.device
) -> Route:
    """Return the backend for rows of `length` positions.

    Dense attention is chosen if it is the same function (branches merged, every block selected)
    and not measured to be slower, or if `min_len` requires it.

    Raises:
        ConfigError: the requested backend does not support this configuration.
    """
    asked = config.backend
    if length < config.min_len:
        return _log_once(Route(asked, "dense", f"min_len is {config.min_len}"))
    limits = measured(threshold_key(config, group, head_dim), device)
    same = config.reach if config.mode == "merged" else 0
    if asked == "auto" and length <= min(same, limits.dense):
        reason = f"every key is selected up to {config.reach} positions"
        return _log_once(Route(asked, "dense", reason))
    if asked == "reference":
        return _log_once(Route(asked, asked, "asked for"))
    facts = {"group": group, "head_dim": head_dim, "device": device}
    names = [asked]
    if asked == "auto":
        names = ["gather", "flex"] if config.select_tile < SHARED else ["flex"]
        names = names[::-1] if length <= limits.flex else names
    refusals = []
    for name in names:
        refusal = _refusal(name, config, **facts)
        if refusal is None:
            if not torch.compiler.is_compiling() and (name != "gather" or config.mode != "merged"):
                from qat.extensions.nsa.kernels import flex

                flex.check(device)
            reason = "reads selected blocks alone" if asked == "auto" else "asked for"
            return _log_once(Route(asked, name, reason))
        refusals.append(f"{name} cannot: {refusal}")
    if asked != "auto":
        others = [name for name in ("gather", "flex", "fla") if name != asked]
        able = [name for name in others if _refusal(name, config, **facts) is None]
        raise ConfigError(
            f"nsa backend={asked} cannot compute this: {refusal}; choose "
            f"{' or '.join([*able, 'reference'])}"
        )
    return _log_once(Route(asked, "reference", "; ".join(refusals)))


def attend(
    inputs: Inputs, config: NSAConfig, route: Route, selection: Tensor | None = None
) -> Tensor:
    """Return attention `(B, S, H, D)`, computed by the backend of `route`, which is from `choose`.

    `selection` `(B, K, T, N)` bool are the blocks to read instead of those that `select` chooses.
    """
    if route.backend == "dense":
        return reference.attend_densely(inputs)
    if route.backend == "flex":
        from qat.extensions.nsa.kernels import flex

        return flex.attend(inputs, config, selection)
    if route.backend == "gather":
        from qat.extensions.nsa.kernels import gather

        return gather.attend(inputs, config, selection)
    if route.backend == "fla":
        from qat.extensions.nsa.kernels import fla

        return fla.attend(inputs, config, selection)
    if selection is None:
        selection = select(inputs, config)
    return reference.attend(inputs, selection, config)


def attend_counted(inputs: Inputs, config: NSAConfig, route: Route) -> tuple[Tensor, Tensor]:
    """Return what `attend` returns, and the number of blocks in each selection, `(B, K, T)`.

    The selection is the backend's own; dense attention reads every block of the past.
    """
    if route.backend == "dense":
        past = past_blocks(inputs, config)[:, None]
        return attend(inputs, config, route), past.expand(*inputs.key.shape[:2], -1)
    if route.backend == "gather":
        from qat.extensions.nsa.kernels import gather

        if gather.has_kernel(config):
            return attend(inputs, config, route), gather.read_by_query(inputs, config)
    selection = select(inputs, config)
    return attend(inputs, config, route, selection), selection.sum(-1)


def _refusal(
    name: str, config: NSAConfig, *, group: int, head_dim: int, device: torch.device
) -> str | None:
    if device.type != "cuda":
        return f"it has no kernels for {device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    from qat.extensions.nsa.kernels import fla, flex, gather

    if name == "flex":
        return flex.refusal(config, head_dim=head_dim)
    if name == "gather":
        return gather.refusal(config, group=group, head_dim=head_dim, device=device)
    return fla.refusal(config, group=group, head_dim=head_dim)


def _log_once(route: Route) -> Route:
    if not torch.compiler.is_compiling() and route not in _logged:  # a graph would guard on it
        logger.info("nsa: %s (asked: %s): %s", route.backend, route.requested, route.reason)
        _logged.add(route)
    return route
