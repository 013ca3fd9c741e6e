"""Draws tokens/s against batch, sequence length and model size from the rows of `qat bench`.

python speedrun/plot_scaling.py runs/bench/*/results.jsonl --out scaling.svg
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

KINDS = ("step", "max")
WIDTH, HEIGHT = 13.0, 4.0

Points = dict[str, list[tuple[float, float]]]
"""Curves by label: x and tokens per second."""


def main() -> None:
    """Read every file named and write one figure of three panels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [row for path in arguments.results for row in read_rows(path)]
    if not rows:
        raise SystemExit("no measured row in these files; give results.jsonl of 'qat bench'")
    draw(rows, arguments.out)
    print(f"{arguments.out}: {len(rows)} rows")


def read_rows(path: Path) -> list[dict]:
    """The rows that were timed to the end."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["kind"] in KINDS and row.get("tokens_per_s")]


def draw(rows: list[dict], out: Path) -> None:
    """Write the figure; the suffix of `out` chooses its format."""
    figure, axes = plt.subplots(1, 3, figsize=(WIDTH, HEIGHT), sharey=True, layout="constrained")
    panels = (
        (against_batch(rows), "sequences a batch"),
        (against_length(rows), "positions a sequence"),
        (against_size(rows), "billion parameters"),
    )
    for panel, (curves, label) in zip(axes, panels, strict=True):
        _plot(panel, curves, label)
    axes[0].set_ylabel("tokens/s")
    figure.suptitle(", ".join(sorted({f"{row['device']}, {row['dtype']}" for row in rows})))
    figure.savefig(out, dpi=150)
    plt.close(figure)


def against_batch(rows: list[dict]) -> Points:
    """One curve per student, length and way of recomputing, over its batch sizes."""
    curves = defaultdict(dict)
    for row in _of_panel(rows, "batch"):
        recomputes = ", recomputing" if row["gradient_checkpointing"] else ""
        label = f"{_student(row)}, L = {row['seq_len']}{recomputes}"
        _keep_best(curves[label], row["batch_size"], row)
    return {label: sorted(points.items()) for label, points in curves.items() if len(points) > 1}


def against_length(rows: list[dict]) -> Points:
    """One curve per student: its fastest row at each length."""
    curves = defaultdict(dict)
    for row in _of_panel(rows, "length"):
        _keep_best(curves[_student(row)], row["seq_len"], row)
    return {label: sorted(points.items()) for label, points in curves.items() if len(points) > 1}


def against_size(rows: list[dict]) -> Points:
    """One curve per length: the fastest row of each student, by its billions of parameters."""
    curves = defaultdict(dict)
    for row in _of_panel(rows, "size"):
        _keep_best(curves[f"L = {row['seq_len']}"], row["parameters"] / 1e9, row)
    return {label: sorted(points.items()) for label, points in curves.items() if len(points) > 1}


def _of_panel(rows: list[dict], panel: str) -> list[dict]:
    """Rows that say which `panels` they were measured for are drawn there alone."""
    return [row for row in rows if panel in row.get("panels", (panel,))]


def _student(row: dict) -> str:
    return Path(row["student"]).name


def _keep_best(points: dict[float, float], x: float, row: dict) -> None:
    points[x] = max(points.get(x, 0.0), row["tokens_per_s"])


def _plot(panel: Axes, curves: Points, label: str) -> None:
    for name, points in curves.items():
        panel.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.2, label=name)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel(label)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g} k")
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if curves:
        panel.legend(frameon=False, fontsize=7)


if __name__ == "__main__":
    main()
