"""The part of a report about sparse attention: health checks, and a table of layers."""

from collections.abc import Iterator

from qat.files import parse_toml
from qat.observe.health import Check, percent
from qat.observe.page import number
from qat.observe.runs import TrainingRun

LEAST_RECALL_FRAC, LEAST_SELECTED_FRAC = 0.9, 0.05
"""Least recall of sparse attention (dense mass in the chosen blocks), and least gate share of the
selected branch."""
MOST_COLLAPSED_FRAC = 0.5  # of a layer's gates, which give one branch almost all the weight

LAYER_COLUMNS = (  # health of a sparse attention layer: keys and titles
    ("layer", "layer"),
    ("route", "computed by"),
    ("recall_frac", "block recall, %"),
    ("limit_frac", "blocks left out, % of queries"),
    ("compressed_frac", "compressed, %"),
    ("selected_frac", "selected, %"),
    ("window_frac", "window, %"),
    ("gate_entropy_frac", "entropy, %"),
    ("gate_largest_frac", "largest gate, %"),
    ("collapse_frac", "collapsed, %"),
)


def checks(run: TrainingRun, layers: list[dict]) -> Iterator[Check]:
    """Yield the checks of a run's `layers`, as `health_numbers` of its last evaluation has them."""
    yield _least("block recall", layers, "recall_frac", LEAST_RECALL_FRAC)
    acts = max(layers, key=lambda layer: layer["limit_frac"])["limit_frac"]
    found = f"{percent(acts)} of queries"
    yield Check("blocks left out", "ok" if acts else "look", found, "more than none")
    if gated := [layer for layer in layers if layer.get("selected_frac") is not None]:
        yield _least("selected branch", gated, "selected_frac", LEAST_SELECTED_FRAC)
        yield _collapsed(run, gated)
    slow = [layer["layer"] for layer in layers if layer["is_fallback"]]
    names = f"layers {', '.join(map(str, slow[:5]))}{', ...' if len(slow) > 5 else ''}"
    found = f"{names}: {layers[slow[0]]['route']}" if slow else "none"
    yield Check("attention fallbacks", "look" if slow else "ok", found, "none")


def _collapsed(run: TrainingRun, layers: list[dict]) -> Check:
    """Check the layer with the most collapsed gates, which give one branch almost all the weight.

    All gates are collapsed at initialization, which is fine if gates are not trained.
    """
    worst = max(layers, key=lambda layer: layer["collapse_frac"])
    share = worst["collapse_frac"]
    kinds = parse_toml(run.recipe).get("train", {}).get("learn", "").split(",")
    found = f"{percent(share)} in layer {worst['layer']}"
    if share > MOST_COLLAPSED_FRAC and "gates" not in kinds:
        return Check("collapsed gates", "ok", f"{found}, where they began", "of gates that learn")
    state = "ok" if share <= MOST_COLLAPSED_FRAC else "look"
    return Check("collapsed gates", state, found, f"at most {percent(MOST_COLLAPSED_FRAC)}")


def _least(name: str, layers: list[dict], key: str, limit: float) -> Check:
    lowest = min(layers, key=lambda layer: layer[key])
    state = "ok" if lowest[key] >= limit else "look"
    found = f"{percent(lowest[key])} in layer {lowest['layer']}"
    return Check(name, state, found, f"at least {percent(limit)}")


def table(layers: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells of a report's table about `layers`."""
    return [name for _, name in LAYER_COLUMNS], [
        [_cell(key, layer.get(key)) for key, _ in LAYER_COLUMNS] for layer in layers
    ]


def _cell(key: str, value: float | str | None) -> str:
    is_share = key.endswith("_frac") and value is not None
    return number(100 * value if is_share else value)
