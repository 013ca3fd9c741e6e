"""A quantized student with sparse attention takes the same step however its layers run."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import TOKENIZER, build
from nsa_model_case import opened_model, small
from quantized import SPECS, with_random_codes
from torch import Tensor
from train_case import config, make_trainer

from qat.models.checkpoint import save_checkpoint

TINY = {
    "compress_block": 2,
    "compress_stride": 1,
    "select_block": 4,
    "select_tile": 4,
    "num_selected": 3,
    "window": 3,
}
"""Settings that are sparse within the 16 positions of the cache."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache, and a student of each mode."""
    place = tmp_path_factory.mktemp("sparse")
    build(place / "cache")
    for mode in ("residual", "merged"):
        torch.manual_seed(7)
        model = with_random_codes(opened_model(small(**TINY, mode=mode)), SPECS["lut2"])
        save_checkpoint(model.eval(), TOKENIZER, place / mode)
    return place


def step(place: Path, out: Path, mode: str, **values: object) -> tuple[Tensor, dict[str, Tensor]]:
    """A step's loss, and what it made of the weights."""
    settings = config(place, **values)
    trainer = make_trainer(settings, place / mode, out / "run")
    loss = trainer.take_step([trainer.cache.batch(np.arange(4))], 0).sums["loss"]
    if settings.compile == "on":
        facts = trainer.take_step.compile_facts()
        assert facts["compiled"] and facts["fallback"] is None
    trainer.take_step.close()
    return loss, trainer.student.model.state_dict()


RECOMPUTED = {"gradient_checkpointing": True}
COMPILED = {"compile": "on"}


@pytest.mark.filterwarnings("ignore")  # of the compiler, about itself
@pytest.mark.parametrize("mode", ["residual", "merged"])
@pytest.mark.parametrize(
    "ways",
    [
        RECOMPUTED,
        pytest.param(COMPILED, marks=pytest.mark.slow),
        pytest.param(COMPILED | RECOMPUTED, marks=pytest.mark.slow),
    ],
)
def test_compiled_or_recomputed_it_is_the_same_step(
    place: Path, tmp_path: Path, monkeypatch, mode, ways
) -> None:
    learn = "weights,scales,gates" if mode == "residual" else "weights,scales"
    expected, weights = step(place, tmp_path / "plain", mode, learn=learn)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    loss, moved = step(place, tmp_path / "other", mode, learn=learn, **ways)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert moved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, rtol=1e-3, atol=1e-5)
