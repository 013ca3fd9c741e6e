"""Hugging Face's `Trainer` for prepared students: data sets are caches, or texts with a teacher.

    args = TrainingArguments("runs/mine", per_device_train_batch_size=16, max_steps=500)
    trainer = QatTrainer(student, args, train_dataset=CacheDataset("caches/mine"))
    trainer.train()
    trainer.save_model("students/mine")

A checkpoint of the trainer holds what learns, to resume from; `save_model` writes the packed model.
"""

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import default_collate
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from qat.errors import ConfigError
from qat.extensions.integrations.datasets import CacheDataset, as_batch
from qat.extensions.integrations.finish import check_whole, finish
from qat.extensions.integrations.losses import Totals, totals
from qat.extensions.integrations.losses import loss as loss_of
from qat.extensions.integrations.optimizer import AdamW
from qat.extensions.integrations.student import (
    as_teacher,
    has_adapter,
    param_groups,
    unwrapped,
)
from qat.models.checkpoint import write_checkpoint

ABSOLUTE = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim")
"""Settings of an optimizer whose rates are not relative to the sizes of tensors."""


class StudentMixin:
    """The learning rates and files by which a trainer handles a prepared student.

    Put it before a trainer's class: `class Mine(StudentMixin, SFTTrainer)`.
    """

    def __init__(self, *args: Any, rates: dict[str, float] | None = None, **named: Any) -> None:
        self.rates = rates or {}
        """Flags of 'qat train': `lr`, `lr_scales`, `lr_codebook`, `beta2`, `weight_decay`, ..."""
        super().__init__(*args, **named)
        self._whole = None
        """A copy of the student to save from, on the first rank if FSDP divides it over ranks."""
        if self.is_fsdp_enabled and not has_adapter(self.model):
            version = self.accelerator.state.fsdp_plugin.fsdp_version
            if version != 2:
                raise ConfigError(
                    f"fsdp_version={version} in the configuration of accelerate would flatten the "
                    "parameters of a student, expected 2; set fsdp_version: 2"
                )
            if self.is_world_process_zero():
                self._whole = copy.deepcopy(unwrapped(self.model))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return `qat.AdamW` with the groups of `qat.param_groups`; the schedule is the arguments'.

        Raises:
            ConfigError: the arguments name a rate or an optimizer of their own.
        """
        if has_adapter(self.model):  # the factors of peft have rates of their own
            return super().create_optimizer(model)
        if self.optimizer is None:
            usual = {field.name: field.default for field in fields(self.args)}
            for name in ABSOLUTE:
                if (given := getattr(self.args, name)) != usual[name]:
                    raise ConfigError(
                        f"{name}={given} is given among the arguments, but rates of a student are "
                        "relative to the sizes of its tensors; leave it out, or use rates={'lr': "
                        "5e-3, ...} of the trainer"
                    )
            groups = param_groups(self.model if model is None else model, **self.rates)
            self.optimizer = AdamW(groups)
        return self.optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the packed student to `output_dir`, by default the run's own directory."""
        if _internal_call:  # a checkpoint to resume from
            super().save_model(output_dir, _internal_call=True)
            return
        model, saves = unwrapped(self.model), self.args.should_save
        if self.is_fsdp_enabled and not has_adapter(self.model):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = get_model_state_dict(self.model, options=options)  # all ranks exchange it
            model, saves = self._whole, self._whole is not None
            if saves:
                model.load_state_dict(state)
        else:
            check_whole(model)
        if has_adapter(self.model):
            model = finish(copy.deepcopy(self.model))
        if saves:
            directory = Path(output_dir or self.args.output_dir)
            directory.mkdir(parents=True, exist_ok=True)
            write_checkpoint(model, self.processing_class, directory)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """Write what learns, and all other parameters, for a checkpoint to resume from."""
        if has_adapter(self.model):
            super()._save(output_dir, state_dict)
            return
        if not self.args.should_save:
            return
        model, directory = unwrapped(self.model), Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        state = model.state_dict() if state_dict is None else state_dict
        own = {name: t.contiguous() for name, t in state.items() if name not in _tied(model)}
        save_file(own, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Read what `_save` wrote."""
        if self.is_fsdp_enabled or has_adapter(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._read_student(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """Read the best checkpoint."""
        if self.is_fsdp_enabled or has_adapter(self.model):
            super()._load_best_model()
            return
        self._read_student(self.state.best_model_checkpoint)

    def _read_student(self, directory: str) -> None:
        model, path = unwrapped(self.model), Path(directory) / SAFE_WEIGHTS_NAME
        if not path.is_file():
            raise ConfigError(
                f"{path} is not there, expected what this trainer writes to a checkpoint; name a "
                "checkpoint-N directory of a run with the same student"
            )
        state = load_file(path)
        state |= {name: state[source] for name, source in _tied(model).items() if source in state}
        model.load_state_dict(state)


class QatTrainer(StudentMixin, Trainer):
    """Trains a prepared student on a cache, or on texts with a teacher that runs beside.

    Callbacks, gradient accumulation, resuming and 'accelerate launch' are the `Trainer`'s.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        teacher: PreTrainedModel | None = None,
        loss: str | None = None,
        temperature: float = 1.0,
        **named: Any,
    ) -> None:
        """Take what `Trainer` takes, and more.

        Args:
            model: a student that `qat.prepare` returned.
            args: without rates and mixed precision, which `rates` and `qat.prepare(dtype=)` name.
            teacher: a float model over the same words, for losses over all of them; without it the
                rows must be those of a `CacheDataset`.
            loss: see `qat.loss`.
            temperature: see `qat.loss`.
            named: `rates`, and all other parameters of `Trainer`.

        Raises:
            ConfigError: the model is not prepared, or an argument does not go with it.
        """
        student = unwrapped(model)
        args = copy.copy(args) if args is not None else TrainingArguments("tmp_trainer")
        if args.n_gpu > 1:
            raise ConfigError(
                f"{args.n_gpu} GPUs are there for one process, expected one each; start the "
                "program by 'accelerate launch' or torchrun, or show it one GPU"
            )
        if args.bf16 or args.fp16:
            raise ConfigError(
                f"bf16={args.bf16}, fp16={args.fp16} among the arguments would cast what losses "
                "are computed from, expected neither; use qat.prepare(dtype='bf16')"
            )
        args.remove_unused_columns = False  # targets are no parameters of forward
        args.prediction_loss_only = True
        if isinstance(named.get("train_dataset"), CacheDataset):
            named.setdefault("data_collator", default_collate)
        self.loss, self.temperature = loss, temperature
        self._totals: Totals
        """The totals of the present step."""
        super().__init__(model, args, **named)
        self.model_accepts_loss_kwargs = True
        self.teacher = None
        if teacher is not None:
            self.teacher = as_teacher(teacher.to(args.device), dtype=student.prepared.dtype)
        self._cut_to_common_words()

    def _cut_to_common_words(self) -> None:
        """Compute losses over the words that student, teacher and caches all have.

        Models of a family may pad their heads to different numbers of words.
        """
        languages = [unwrapped(self.model).prepared.language]
        if self.teacher is not None:
            languages.append(self.teacher.prepared.language)
        held_out = (
            self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        )
        caches = [
            data.cache
            for data in (self.train_dataset, *held_out.values())
            if isinstance(data, CacheDataset)
        ]
        words = [language.config.vocab_size for language in languages]
        words += [cache.manifest.teacher.vocab_size for cache in caches]
        for each in (*languages, *caches):
            each.num_words = min(words)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return the micro-batches of a step, and the valid tokens in those of all ranks."""
        samples, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not samples:
            return samples, None
        batches, how = [*map(as_batch, samples)], {"with_teacher": self.teacher is not None}
        self._totals = totals(self.model, batches, loss=self.loss, **how)
        return samples, self._totals.num_tokens

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return the loss in nats per valid token of the step, and the student's output if asked.

        Raises:
            ConfigError: the rows hold no targets, and there is no teacher.
        """
        batch = as_batch(inputs)
        if self.teacher is None and not batch.topk_ids.shape[-1] + batch.sample_ids.shape[-1]:
            raise ConfigError(
                "the rows of a step hold no targets of a teacher, expected those of a "
                "CacheDataset; give one, or teacher="
            )
        how = {"position_ids": batch.position_ids, "with_logits": False}
        teacher = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher = self.teacher(batch.input_ids, **how)
        output = model(batch.input_ids, **how)
        given = {"loss": self.loss, "temperature": self.temperature}
        if model.training:
            given["totals"] = self._totals
        loss = loss_of(output, batch, teacher=teacher, **given)
        if model.training:
            loss = loss * self.args.world_size  # wrappers average gradients over ranks
        return (loss, output) if return_outputs else loss


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Return the names of parameters that are others by another name."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})
