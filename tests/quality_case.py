"""A tiny teacher, two texts and a recipe file in the current directory: a case for quality runs."""

import json
from pathlib import Path

import cli_case
import pytest
import tomli_w
from cache_case import TOKENIZER, teacher, texts
from transformers.utils import logging as hf_logging

TRAIN = {"warmup_steps": 1, "eval_sequences": 2, "log_every": 1, "save_every": 2, "dtype": "fp32"}


def make_teacher_and_texts() -> None:
    hf_logging.disable_progress_bar()
    teacher().model.save_pretrained("teacher")
    TOKENIZER.save_pretrained("teacher")
    for name, count, seed in (("learn", 60, 3), ("judge", 12, 5)):
        lines = [json.dumps({"text": text}) + "\n" for text in texts(count, seed)]
        Path(f"{name}.jsonl").write_text("".join(lines))


def write(*recipes: dict, **values: object) -> None:
    recipe = {
        "name": "case",
        "teacher": "teacher",
        "max_steps": 3,
        "batch_size": 2,
        "sequence_length": 16,
        "report_sequences": 6,
        "kd_sequences": 4,
        "generate_samples": 2,
        "generate_tokens": 6,
        "generate_prompts": ["the cat", "a dog sat on"],
        "texts": {"distil": "learn.jsonl", "report": {"own": "judge.jsonl", "split": "held_out"}},
        "cache": {"top_k": 5, "held_out": 0.2},
        "convert": {"to": "q2a4", "group_size": 16},
        "train": TRAIN,
        "recipes": list(recipes),
        **values,
    }
    Path("recipe.toml").write_text(tomli_w.dumps(recipe))


def call(monkeypatch: pytest.MonkeyPatch, *more: str, device: str = "cpu") -> int:
    words = ["bench", "quality", "recipe.toml", "--out", "out", "--device", device]
    return cli_case.call(monkeypatch, *words, *more)
