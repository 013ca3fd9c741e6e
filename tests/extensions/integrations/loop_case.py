"""A loop of a user's own, as one would write it, beside the steps of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import tiny_model
from torch import Tensor, nn
from train_case import trainer_of
from transformers import PreTrainedModel

import qat
from qat.convert.config import ConvertConfig
from qat.convert.convert import convert_model
from qat.data.packing import Batch
from qat.data.reader import TeacherCache
from qat.models.language_model import LanguageModel
from qat.ranks import Ranks
from qat.train.optim import lr_share
from qat.train.step_config import OptimConfig

STEPS = 3
LEARN = ("learn", "mlp_only", "attention_only", "lora_rank", "dtype")
RATES = ("lr", "lr_scales", "lr_codebook", "lr_norms", "lr_lora", "beta2", "weight_decay")


def with_tables(**overrides: object) -> PreTrainedModel:
    """A tiny model whose linears and tables are quantized and learn."""
    model = tiny_model("llama", **overrides)
    settings = ConvertConfig(to="q2a2", group_size=16, embedding_bits=3, device="cpu")
    convert_model(LanguageModel(model), settings)
    return model


def batches_of(cache: TeacherCache, step: int, accumulate: int, rows: int = 4) -> list[Batch]:
    """The micro-batches of a step, which overlap with those of the next."""
    return [cache.batch(np.arange(rows) + rows * m + step) for m in range(accumulate)]


def steps_of_run(place: Path, **settings: object) -> tuple[PreTrainedModel, OptimConfig]:
    """The student after the steps of a run, still learning, and the settings."""
    trainer = trainer_of(place, place / f"run-{abs(hash(str(settings)))}", **settings)
    for step in range(STEPS):
        accumulate = trainer.config.grad_accum_steps
        trainer.take_step(batches_of(trainer.cache, step, accumulate), step)
    trainer.take_step.close()
    return trainer.student.model, trainer.config


def prepared(place: Path, config: OptimConfig) -> PreTrainedModel:
    """The student of a `place`, prepared as a run with these settings would."""
    model = qat.load(place / "student", device="cpu", dtype="fp32")
    return qat.prepare(model, None, **{name: getattr(config, name) for name in LEARN})


def optimizer_of(student: nn.Module, config: OptimConfig) -> tuple[Any, Any]:
    """The optimizer and the schedule that a run with these settings has."""
    rates = {name: getattr(config, name) for name in RATES}
    optimizer = qat.AdamW(qat.param_groups(student, **rates))

    def share(step: int) -> float:
        return lr_share(
            step,
            config.max_steps,
            schedule=config.schedule,
            warmup_steps=config.warmup_steps,
            min_ratio=config.min_lr_ratio,
        )

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def steps_of_loop(
    student: nn.Module, cache: TeacherCache, config: OptimConfig, *, with_logits: bool = False
) -> list[Tensor]:
    """Take the same steps; return the losses."""
    optimizer, schedule = optimizer_of(student, config)
    losses = []
    for step in range(STEPS):
        batches = batches_of(cache, step, config.grad_accum_steps)
        totals = qat.totals(student, batches)
        found = []
        for batch in batches:
            how = {"position_ids": batch.position_ids, "with_logits": with_logits}
            loss = qat.loss(student(batch.input_ids, **how), batch, totals=totals)
            loss.backward()
            found.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(student.parameters(), config.clip_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(torch.stack(found).sum())
    return losses


def steps_of_rank(
    student: nn.Module, cache: TeacherCache, config: OptimConfig, ranks: Ranks
) -> list[Tensor]:
    """Take the same steps on several ranks, each with its micro-batch; return the losses of all."""
    optimizer, schedule = optimizer_of(student, config)
    losses = []
    for step in range(STEPS):
        batch = batches_of(cache, step, ranks.size)[ranks.rank]
        out = student(batch.input_ids, position_ids=batch.position_ids, with_logits=False)
        loss = qat.loss(out, batch, totals=qat.totals(student, [batch]))
        (loss * ranks.size).backward()  # wrappers average gradients over ranks
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        ranks.sum_([total])
        losses.append(total)
    return losses


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Make sure that two sets of tensors hold the same bits."""
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
