"""The picture of codewords in the documents: what is drawn is what is fitted."""

import plot_codewords
import torch

from qat.observe.charts import Chart
from qat.quant.codebook import nearest_codewords
from qat.quant.fit import fit_weight
from qat.quant.spec import PRESETS


def test_pairs_lie_around_their_codewords() -> None:
    weight = torch.randn(32, 64) * 0.02
    pairs, codewords = plot_codewords.fitted(weight, "layers.0.mlp.up_proj")
    assert pairs.shape == (32 * 32, 2) and codewords.shape == (64, 2)
    found = fit_weight(weight, PRESETS["v3a3"].spec_for("layers.0.mlp.up_proj"))
    assert torch.equal(codewords, found.codebook)
    ones = torch.ones(32, 64)
    error = (
        pairs - codewords[nearest_codewords(pairs.view(32, 64), ones, codewords).int().flatten()]
    )
    assert error.norm() < 0.25 * pairs.norm()


def test_the_picture_is_the_same_each_time() -> None:
    pairs, codewords = torch.randn(500, 2), torch.randn(64, 2)
    chart = Chart("it", "it", "", lambda axes: plot_codewords.paint(axes, pairs, codewords))
    assert chart.render("png") == chart.render("png")
