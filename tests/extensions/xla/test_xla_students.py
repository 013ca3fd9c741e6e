"""Whatever a student is made of learns on XLA as on the CPU; what is saved is what it computed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

from train_case import config, make_trainer
from xla_case import (
    batches_of,
    course,
    largest_difference,
    make_adapted_place,
    make_mixed_place,
    make_sparse_place,
    make_taught_place,
)

from qat.backend.device import select
from qat.errors import ConfigError
from qat.models.checkpoint import load_checkpoint
from qat.nn.quant_linear import quant_linears
from qat.train.start import check_dtype

pytestmark = [
    pytest.mark.xla,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32"),
]
XLA = select("xla")
STEPS = 6


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (make_mixed_place, {"learn": "weights,codebook,scales,norms"}),
        (make_mixed_place, {"learn": "norms", "loss": "reverse_kl,jsd,cakld,hard_ce"}),
        (make_adapted_place, {"learn": "lora,norms", "lora_rank": 3}),
        (make_sparse_place, {"learn": "weights,gates"}),
        (make_taught_place, {"loss": "kl,reverse_kl,jsd,cakld,hard_ce"}),
    ],
    ids=["mixed", "losses", "adapted", "sparse", "taught"],
)
def test_steps_are_the_cpus(
    tmp_path: Path, make: Callable[[Path], Path], values: dict[str, object]
) -> None:
    place = make(tmp_path / "place")
    ours, theirs = (course(place, tmp_path, device, STEPS, **values) for device in ("xla", "cpu"))
    assert largest_difference(ours, theirs) <= 1e-5
    assert (ours.compiles, ours.executions, ours.fallbacks) == (2, STEPS, {})


def test_what_is_saved_is_what_was_computed_with(tmp_path: Path) -> None:
    place = make_mixed_place(tmp_path / "place")
    settings = config(place, device="xla", learn="weights,codebook,scales")
    trainer = make_trainer(settings, place / "student", tmp_path / "run")
    for step in range(2):
        trainer.take_step(batches_of(trainer, step), step)
    trainer.saver.save(2, 0.0, is_best=False)
    trainer.saver.finish()
    saved = load_checkpoint(trainer.run.checkpoint_path(2), torch.float32, None)
    ours, theirs = (quant_linears(model) for model in (trainer.student.model, saved))
    for name, linear in ours.items():
        assert torch.equal(XLA.to_host(linear.quantized_weight()), theirs[name].quantized_weight())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "adamw8bit"}, "optimizer=adamw8bit, .* not made for XLA devices; use"),
        ({"latent_dtype": "bf16"}, "latent_dtype=bf16, .* no random bits .*; use"),
        ({"dtype": "fp16"}, "dtype=fp16, .* use --dtype bf16"),
    ],
)
def test_what_xla_cannot_do_is_refused(
    tmp_path: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_dtype(config(tmp_path, device="xla", **values))
