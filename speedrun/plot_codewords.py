"""Draws pairs of neighbouring weights of a model, and the codewords that `v3a3` fits to them.

python speedrun/plot_codewords.py MODEL --out docs/codewords.png
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from qat.models.load import load_model
from qat.nn.swap import linear_names
from qat.observe.charts import SERIES, Chart
from qat.quant.fit import fit_weight
from qat.quant.spec import PRESETS
from qat.quant.weight import expand_scales

LINEAR = "mlp.up_proj"
WIDTH = 1.7
"""Of the picture, over its height."""
DOTS = 3500
"""Pairs that are drawn, of all that the codewords are fitted to."""


def main() -> None:
    """Fit the first `up_proj` of a model alone and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = load_model(arguments.model, device="cpu", dtype="fp32").model
    name = next(name for name in linear_names(model) if name.endswith(LINEAR))
    pairs, codewords = fitted(model.get_submodule(name).weight.detach(), name)
    title = f"{len(codewords)} codewords over pairs of weights"
    chart = Chart("codewords", title, name, lambda axes: paint(axes, pairs, codewords))
    arguments.out.write_bytes(chart.render("png"))
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e3:.0f} kB")


def fitted(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """`(N, 2)` pairs of a weight over its scales, and the `(C, 2)` codewords, both in float32."""
    spec = PRESETS["v3a3"].spec_for(name)
    spec = spec.model_copy(update={"group_size": math.gcd(weight.shape[1], spec.group_size)})
    found = fit_weight(weight, spec)
    S = expand_scales(found.scales, weight.shape[1])
    pairs = (weight / S)[S > 0].view(-1, spec.vector_size)  # a scale is shared by whole vectors
    return pairs, found.codebook


def paint(axes: Axes, pairs: Tensor, codewords: Tensor) -> None:
    """Some of the pairs as dots below rings for codewords."""
    some = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:DOTS]
    axes.plot(*pairs[some].T, ".", color=SERIES[0], markersize=2, alpha=0.35, mew=0)
    axes.plot(*codewords.T, "o", color=SERIES[1], markersize=5, mfc="none", mew=1.4)
    edge = 1.15 * codewords.abs().max().item()
    axes.set_ylim(-edge, edge)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlim(-WIDTH * edge, WIDTH * edge)
    axes.set(xlabel="a weight over its scale", ylabel="its right neighbour")


if __name__ == "__main__":
    main()
