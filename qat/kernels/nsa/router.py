"""Which backend computes a layer's attention, and why; it is said once and counted."""

import logging
from collections import Counter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qat.errors import ConfigError
from qat.kernels.nsa import dense, reference
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.select import select

logger = logging.getLogger(__name__)


class Route(NamedTuple):
    """What was asked for and what computes."""

    requested: str
    """A backend's name, or `auto`."""
    backend: Literal["dense", "reference", "flex", "fla"]
    reason: str
    """Why it is this one."""


_taken: Counter[Route] = Counter()


def choose(
    config: NSAConfig, *, length: int, group: int, head_dim: int, device: torch.device
) -> Route:
    """The backend for rows of `length` positions.

    Dense attention is chosen where it is the same function (branches merged, every block
    selected), or where `min_len` asks for it.

    Raises:
        ConfigError: the backend that is asked for cannot compute this.
    """
    asked = config.backend
    if length < config.min_len:
        return _said(Route(asked, "dense", f"min_len is {config.min_len}"))
    if asked == "reference":
        return _said(Route(asked, asked, "asked for"))
    if asked != "auto":
        raise ConfigError(
            f"nsa backend={asked} cannot compute on {device.type}; choose reference or auto"
        )
    if config.mode == "merged" and length <= config.reach:
        reason = f"every key is selected up to {config.reach} positions"
        return _said(Route(asked, "dense", reason))
    return _said(Route(asked, "reference", f"no kernel for {device.type}"))


def attend(
    inputs: Inputs, config: NSAConfig, route: Route, selection: Tensor | None = None
) -> Tensor:
    """`(B, S, H, D)`, by the backend of `route`.

    Args:
        inputs: see there.
        config: the definition.
        route: from `choose`.
        selection: `(B, K, T, N)` bool, blocks to read instead of those that `select` chooses.
    """
    if route.backend == "dense":
        return dense.attend(inputs)
    if selection is None:
        selection = select(inputs, config)
    return reference.attend(inputs, selection, config)


def routes_taken() -> Counter[Route]:
    """How often each route was chosen so far in this process, outside compiled graphs."""
    return _taken.copy()


def _said(route: Route) -> Route:
    if not torch.compiler.is_compiling():  # which would guard on the count
        if route not in _taken:
            logger.info("nsa: %s (asked: %s): %s", route.backend, route.requested, route.reason)
        _taken[route] += 1
    return route
