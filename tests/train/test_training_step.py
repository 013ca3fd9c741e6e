"""A step by itself: facts about compiling, and the fallback where that fails."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import TOKENIZER, build
from quantized import SPECS, tiny_quantized
from torch import Tensor
from train_case import (
    config,
    make_place,
    pretend_recording,
    put_tables,
    trainer_of,
    visiting,
)

from qat.backend.base import GIB, Backend
from qat.errors import ConfigError
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import MeasureConfig
from qat.extensions.bench.student import open_student, without_learning
from qat.models.checkpoint import save_checkpoint
from qat.models.step_memory import step_bytes
from qat.nn.lut_embedding import QuantTable
from qat.nn.quant_linear import quant_linears
from qat.nn.quant_weight import LatentWeight
from qat.nn.swap import decoder_layers, table_names
from qat.train.learnable import weights_in_scope
from qat.train.loop import Trainer
from qat.train.start import check_dtype, make_trainable
from qat.train.step import HELD_SHARE, TrainingStep


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("step"))


def batches(trainer: Trainer) -> list:
    return [trainer.cache.batch(np.arange(4))]


def test_a_failing_compiler_warns_once_and_the_layers_run_as_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object, **_kwargs: object) -> object:
        def run(*_args: object, **_kwargs: object) -> object:
            raise torch._dynamo.exc.Unsupported("no such instruction\nmore of it")

        return run

    expected = trainer_of(place, tmp_path / "plain")
    wanted = expected.take_step(batches(expected), 0)
    monkeypatch.setattr(torch, "compile", broken)
    trainer = trainer_of(place, tmp_path / "broken", compile="on")
    with caplog.at_level(logging.WARNING):
        results = [trainer.take_step(batches(trainer), step) for step in range(3)]
    warnings = [r.message for r in caplog.records if "cannot be compiled" in r.message]
    assert len(warnings) == 1
    facts = trainer.take_step.compile_facts()
    assert not facts["compiled"] and "no such instruction" in facts["fallback"]
    assert results[0].sums["loss"].item() == pytest.approx(wanted.sums["loss"].item(), rel=1e-5)
    assert results[2].sums["loss"] < results[0].sums["loss"]


def course(trainer: Trainer, accumulate: int) -> list[float]:
    losses = []
    for step in range(5):
        rows = np.arange(4 * accumulate).reshape(accumulate, 4)
        found = trainer.take_step([trainer.cache.batch(part + step) for part in rows], step)
        losses.append(found.sums["loss"].item() / int(found.valid_tokens))
    return losses


@pytest.mark.parametrize(("accumulate", "form"), [(1, "whole"), (2, "whole"), (2, "layer")])
def test_a_replayed_step_is_the_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int, form: str
) -> None:
    settings = {"max_steps": 9, "grad_accum_steps": accumulate, "form": form}
    expected = course(trainer_of(place, tmp_path / "plain", **settings), accumulate)
    trainer = trainer_of(place, tmp_path / "recorded", **settings)
    replays = pretend_recording(monkeypatch, trainer)
    assert course(trainer, accumulate) == pytest.approx(expected, rel=1e-6)
    assert len(replays) == 3 * accumulate
    assert trainer.take_step.compile_facts()["cuda_graph"]


def test_a_step_that_waits_is_not_recorded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def waits(_backend: Backend) -> Iterator[list[str]]:
        found: list[str] = []
        yield found
        found.append("experts.py:12")

    expected = course(trainer_of(place, tmp_path / "plain"), 1)
    trainer = trainer_of(place, tmp_path / "waits")
    replays = pretend_recording(monkeypatch, trainer)
    monkeypatch.setattr(Backend, "waits", waits)
    with caplog.at_level(logging.INFO):
        assert course(trainer, 1) == expected
    assert not replays and not trainer.take_step.compile_facts()["cuda_graph"]
    said = [r.message for r in caplog.records if "recorded" in r.message]
    assert said == ["steps are not recorded: the host waits in experts.py:12"]


def test_other_shapes_and_packed_rows_are_not_replayed(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(place, tmp_path)
    replays = pretend_recording(monkeypatch, trainer)
    monkeypatch.setattr("qat.train.step.MAX_TILE", 4)  # so that packed or not makes a difference
    whole = batches(trainer)[0]
    alone = torch.arange(whole.position_ids.shape[1]).expand_as(whole.position_ids)
    unpacked = whole._replace(position_ids=alone)
    for step in range(3):
        trainer.take_step([unpacked], step)
    assert len(replays) == 1
    packed = alone % 5
    trainer.take_step([whole._replace(position_ids=packed)], 3)
    trainer.take_step([type(whole)(*(tensor[:2] for tensor in unpacked))], 4)
    assert len(replays) == 1
    trainer.take_step([unpacked], 5)
    assert len(replays) == 2


def test_a_shape_that_was_never_run_is_not_recorded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recording it would compile within a recording, which a GPU refuses."""
    trainer = trainer_of(place, tmp_path)
    replays = pretend_recording(monkeypatch, trainer)
    whole = batches(trainer)[0]
    S = whole.mask.shape[1]
    short = [type(whole)(*(t[:, : S - 4 * k] for t in whole)) for k in range(3)]
    for step, batch in enumerate([*short, *short[::-1], short[1]]):
        trainer.take_step([batch], step)
        # the first that returns is looked at for waits, the next is recorded
        assert trainer.take_step.compile_facts()["cuda_graph"] == (step >= 4)
    assert len(replays) == 2


def test_more_than_the_host_has_is_not_pinned(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qat.train.start.available_gib", lambda: 1e-9)
    for offload in ("moments", "latents"):
        message = rf"offload={offload} pins .* GiB of host memory, but 1e-09 GiB are free there"
        with pytest.raises(ConfigError, match=message):
            trainer_of(place, tmp_path, latent_dtype="bf16", offload=offload)


def test_closing_leaves_the_model_as_it_was(place: Path, tmp_path: Path) -> None:
    trainer = trainer_of(place, tmp_path, gradient_checkpointing=True, dtype="bf16")
    trainer.take_step(batches(trainer), 0)
    trainer.take_step.close()
    layers = decoder_layers(trainer.student.model)
    assert not any("forward" in vars(layer) for layer in layers)
    assert not trainer.student.model.get_input_embeddings()._forward_hooks


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_auto_becomes_the_dtype_that_it_means(place: Path) -> None:
    settings = config(place, dtype="auto")
    assert check_dtype(settings).dtype == "fp32"


def bits_of(shape: str, form: str, **values: object) -> tuple[list[torch.Tensor], TrainingStep]:
    """Losses, norms of gradients and all that learned in three steps of a random student."""
    wished = {"to": "q2a4", "device": "cpu", "dtype": "fp32", "batch_size": 2, **values}
    settings = MeasureConfig(form=form, seq_len=16, top_k=4, **wished)
    student = open_student(shape, settings)
    rates = dict.fromkeys(("lr", "lr_scales", "lr_codebook", "lr_lora", "lr_norms"), 1e-2)
    chosen = without_learning(settings).model_copy(update=rates)
    torch.manual_seed(0)
    data, backend = open_source(settings, student), Backend(torch.device("cpu"))
    optimizer = make_trainable(student.model, chosen)
    step = TrainingStep(student, optimizer, chosen)
    found = []
    for number in range(3):
        parts = range(settings.grad_accum_steps)
        result = step([data.batch(2, 10 * number + part, backend) for part in parts], number)
        found += [result.sums["loss"].clone(), result.grad_norm.clone()]
    return [*found, *(tensor.clone() for tensor in optimizer.state().values())], step


AGAIN = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        ("tiny", {"grad_accum_steps": 2}),
        ("tiny", {"dtype": "bf16", "latent_dtype": "bf16", **AGAIN}),
        ("tiny", {"mlp_only": True, "to": "v2a4"}),
        ("tiny", {"to": "q4a4_r4", "dtype": "bf16", "checkpoint_every": 2}),
        ("tiny-moe", {"learn": "scales,codebook", "attention_only": True}),
        *(
            pytest.param(shape, values, marks=pytest.mark.slow)
            for shape, values in (
                ("tiny", {"learn": "scales,codebook,norms", "dtype": "bf16"}),
                ("tiny", {"learn": "lora,scales", "grad_accum_steps": 2, **AGAIN}),
                ("tiny-moe", {"dtype": "bf16", **AGAIN}),
                ("tiny", {"compile": "on", "dtype": "bf16", **AGAIN}),
            )
        ),
    ],
)
def test_weights_formed_by_layer_take_the_steps_of_weights_formed_at_once(
    shape: str, values: dict[str, object]
) -> None:
    (expected, whole), (found, step) = (bits_of(shape, f, **values) for f in ("whole", "layer"))
    assert step.forms_by_layer and not whole.forms_by_layer
    assert len(found) == len(expected) > 6
    assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))
    linears = [*quant_linears(step.student.model).values()]
    buffers = {
        id(linear.shared_buffer.buffers) for linear in linears if linear.shared_buffer is not None
    }
    assert len(buffers) == 1, "all layers write into the same ones"
    step.close()
    assert all(linear.shared_buffer is None and linear.formed is None for linear in linears)


@pytest.mark.parametrize(
    ("shape", "values"),
    [
        pytest.param("tiny", {"to": "q2a4", "grad_accum_steps": 2}, marks=pytest.mark.slow),
        ("tiny", {"to": "v2a4", "dtype": "bf16", **AGAIN}),
        ("tiny", {"to": "q4a4_r4", "learn": "weights,norms"}),
        pytest.param("tiny-moe", {"mlp_only": True}, marks=pytest.mark.slow),
    ],
)
def test_latent_weights_on_the_host_take_the_steps_of_those_on_the_device(
    shape: str, values: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "visiting", visiting)
    kept = {"latent_dtype": "bf16", **values}
    expected, _ = bits_of(shape, "whole", **kept)
    for form in ("whole", "layer"):
        found, step = bits_of(shape, form, offload="latents", **kept)
        assert step.forms_by_layer == (form == "layer") and step.optimizer.hosted
        assert len(found) == len(expected) > 6
        assert all(torch.equal(mine, its) for mine, its in zip(found, expected, strict=True))


def test_auto_forms_by_layer_what_would_hold_too_much_of_the_device(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainer_of(place, tmp_path)
    model, settings = trainer.student.model, trainer.config
    learning = weights_in_scope(model, settings.scope, settings.kinds)
    held = step_bytes(model, learning, settings, torch.float32).total(by_layer=False)
    for factor, is_by_layer in ((0.99, True), (1.01, False), (None, False)):
        gib = None if factor is None else factor * held / HELD_SHARE / GIB
        monkeypatch.setattr(type(trainer.backend), "memory_gib", lambda _, gib=gib: gib)
        with caplog.at_level(logging.INFO, "qat.train.step"):
            step = TrainingStep(trainer.student, trainer.optimizer, settings)
        assert step.forms_by_layer == is_by_layer
        assert step.compile_facts()["forms_by_layer"] == is_by_layer
        step.close()
    said = [r.message for r in caplog.records if "a layer at a time" in r.message]
    assert len(said) == 1 and "(--form)" in said[0] and "GiB if all were formed" in said[0]


@pytest.mark.parametrize(
    "values", [{}, {"grad_accum_steps": 2}, {"latent_dtype": "bf16"}, {"learn": "scales"}]
)
def test_gradients_of_a_head_that_are_to_be_added_are_counted(
    values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, real = [], QuantTable.take_gradient_

    def watched(table: QuantTable, dW: Tensor) -> None:
        real(table, dW)
        own = table.weight.grad if isinstance(table, LatentWeight) else None
        held.append(dW.nbytes + (0 if own is None or own is dW else own.nbytes))

    model = tiny_quantized("qwen3", SPECS["lut2"], tie_word_embeddings=True)
    put_tables(model)
    build(tmp_path / "cache")
    save_checkpoint(model, TOKENIZER, tmp_path / "student")
    trainer = trainer_of(tmp_path, tmp_path / "run", **{"max_steps": 1, **values})
    monkeypatch.setattr(QuantTable, "take_gradient_", watched)
    trainer.train()
    settings, (name,) = trainer.config, table_names(model)
    learning = weights_in_scope(trainer.student.model, settings.scope, settings.kinds)
    others = trainer.optimizer.parameters.items()
    others = sum(p.nbytes for n, p in others if n != f"{name}.weight")
    counted = step_bytes(trainer.student.model, learning, settings, torch.float32)
    assert counted.gradients == others + max(held)


def test_a_device_that_compiles_whole_steps_refuses_to_form_by_layer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(place, form="layer")
    monkeypatch.setattr(Backend, "is_traced", True)
    with pytest.raises(ConfigError, match="form=layer, but device=cpu"):
        check_dtype(settings)
