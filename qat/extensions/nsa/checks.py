"""The part of a report about sparse attention: health checks, and a table of layers."""

import logging
import math
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from qat.observe.health import Check, percent
from qat.observe.page import number

logger = logging.getLogger(__name__)

LEAST_RECALL_FRAC, MOST_FULL_FRAC = 0.9, 0.1
"""Least recall of sparse attention (dense mass in the chosen blocks), and largest share of
selections at their limit while recall is below it."""
GATES = (  # name, key, and the least and the largest share of a layer whose gates learn
    ("selected branch", "selected_frac", 0.05, 1.0),
    ("compressed branch", "compressed_frac", 0.05, 1.0),
    ("window branch", "window_frac", 0.05, 1.0),
    ("gate entropy", "gate_entropy_frac", 0.5, 1.0),
    ("largest gate", "gate_largest_frac", 0.0, 0.9),
    ("collapsed gates", "collapse_frac", 0.0, 0.5),
)
"""Gates that do not learn are all collapsed, and none of it is judged."""

LAYER_COLUMNS = (  # health of a sparse attention layer: keys and titles
    ("layer", "layer"),
    ("route", "computed by"),
    ("recall_frac", "block recall, %"),
    ("limit_frac", "blocks left out, % of queries"),
    ("blocks_read", "blocks read"),
    ("blocks_predicted", "predicted"),
    ("full_frac", "at the limit, %"),
    ("compressed_frac", "compressed, %"),
    ("selected_frac", "selected, %"),
    ("window_frac", "window, %"),
    ("gate_entropy_frac", "entropy, %"),
    ("gate_largest_frac", "largest gate, %"),
    ("collapse_frac", "collapsed, %"),
)


_warned: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def warn(model: object, layers: list[dict]) -> None:
    """Log a warning for each check of a model that fails now and did not fail in the last call.

    The first call says nothing: gates are collapsed where they begin.
    """
    failed = {check.name: check for check in checks(layers) if check.state != "ok"}
    before = _warned.get(model)
    _warned[model] = set() if before is None else set(failed)
    for name, check in failed.items() if before is not None else ():
        if name not in before:
            logger.warning("nsa: %s: %s, expected %s", name, check.found, check.limit)


def checks(layers: list[dict]) -> Iterator[Check]:
    """Yield the checks of a run's `layers`, as `health_numbers` of its last evaluation has them."""
    yield _share(layers, "block recall", "recall_frac", least=LEAST_RECALL_FRAC)
    acts = max(layers, key=lambda layer: layer["limit_frac"])["limit_frac"]
    found = f"{percent(acts)} of queries"
    yield Check("blocks left out", "ok" if acts else "look", found, "more than none")
    if counted := [layer for layer in layers if "blocks_read" in layer]:
        yield from _blocks(counted)
    if gated := [layer for layer in layers if layer.get("selected_frac") is not None]:
        yield from (
            _share(gated, name, key, least=least, largest=largest)
            for name, key, least, largest in GATES
        )
    slow = [layer["layer"] for layer in layers if layer["is_fallback"]]
    names = f"layers {', '.join(map(str, slow[:5]))}{', ...' if len(slow) > 5 else ''}"
    found = f"{names}: {layers[slow[0]]['route']}" if slow else "none"
    yield Check("attention fallbacks", "look" if slow else "ok", found, "none")


def _blocks(layers: list[dict]) -> Iterator[Check]:
    """Yield whether as many blocks are read as predicted, and whether the limit costs recall."""
    worst = max(layers, key=lambda layer: abs(layer["blocks_read"] - layer["blocks_predicted"]))
    read, predicted = worst["blocks_read"], worst["blocks_predicted"]
    state = "ok" if math.isclose(read, predicted, rel_tol=1e-6) else "bad"
    found = f"{read:.2f} blocks a query in layer {worst['layer']}"
    yield Check("blocks read", state, found, f"{predicted:.2f}, as predicted")
    full = max(layers, key=lambda layer: layer["full_frac"])
    misses = full["full_frac"] > MOST_FULL_FRAC and full["recall_frac"] < LEAST_RECALL_FRAC
    found = f"{percent(full['full_frac'])} of queries in layer {full['layer']}"
    limit = f"{percent(MOST_FULL_FRAC)}, or recall of {percent(LEAST_RECALL_FRAC)}"
    yield Check("selections at the limit", "look" if misses else "ok", found, limit)


def _share(
    layers: list[dict], name: str, key: str, *, least: float = 0.0, largest: float = 1.0
) -> Check:
    """Check the layer whose share is the least, or the largest if that is what is bounded."""
    choose, limit, words = (min, least, "at least") if least else (max, largest, "at most")
    worst = choose(layers, key=lambda layer: layer[key])
    found = f"{percent(worst[key])} in layer {worst['layer']}"
    if not worst.get("gates_learn", True):
        return Check(name, "ok", f"{found}, where they began", "of gates that learn")
    state = "ok" if least <= worst[key] <= largest else "look"
    return Check(name, state, found, f"{words} {percent(limit)}")


def table(layers: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of a report's table about `layers`."""
    return [name for _, name in LAYER_COLUMNS], [
        [_cell(key, layer.get(key)) for key, _ in LAYER_COLUMNS] for layer in layers
    ]


def _cell(key: str, value: float | str | None) -> str:
    is_share = key.endswith("_frac") and value is not None
    return number(100 * value if is_share else value)
