"""A student, a teacher and its cache whose heads are padded to different numbers of words."""

from pathlib import Path
from typing import NamedTuple

import torch
from cache_case import TOKENIZER, build, info
from quantized import SPECS, tiny_quantized
from tiny import VOCAB, tiny_model
from train_case import config, make_trainer

from qat.models.checkpoint import save_checkpoint
from qat.models.language_model import LanguageModel
from qat.models.load import load_teacher, model_identity
from qat.train.loop import Trainer

MORE = VOCAB + 8


class Pair(NamedTuple):
    """A student, its teacher and the teacher's cache on disk."""

    place: Path

    def trainer(self, out: Path, **values: object) -> Trainer:
        return make_trainer(config(self.place, **values), self.place / "student", out)

    def teacher(self) -> LanguageModel:
        return load_teacher(str(self.place / "teacher"), device="cpu", dtype="fp32")


SIZES = {"less": (VOCAB, MORE), "more": (MORE, VOCAB)}
"""Words of a student and of its teacher."""


def make_pair(place: Path, sizes: tuple[int, int]) -> Pair:
    """Write models whose words beyond those of both are likelier than most others."""
    torch.manual_seed(3)
    teacher = tiny_model(vocab_size=sizes[1])
    teacher.lm_head.weight.data *= 20
    teacher.lm_head.weight.data[VOCAB:] *= 2
    teacher.save_pretrained(place / "teacher")
    TOKENIZER.save_pretrained(place / "teacher")
    known = info(
        name=str(place / "teacher"),
        identity=model_identity(str(place / "teacher")),
        vocab_size=sizes[1],
    )
    build(place / "cache", teacher=LanguageModel(teacher), info=known)
    student = tiny_quantized("qwen3", SPECS["lut2"], num_hidden_layers=1, vocab_size=sizes[0])
    student.lm_head.weight.data[VOCAB:] *= 40
    save_checkpoint(student, TOKENIZER, place / "student")
    return Pair(place)
