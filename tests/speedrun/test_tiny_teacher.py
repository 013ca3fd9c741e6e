"""The embedded teacher that is committed works."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEACHER = Path(__file__).parents[2] / "checkpoints" / "tiny-qwen3"


@pytest.mark.slow
def test_committed_teacher_knows_its_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    ids = tokenizer("Return a list of all the values of the dictionary.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss.item()
    assert loss < math.log(100)


@pytest.mark.parametrize(("thinking", "ending"), [(True, "t\n"), (False, "</think>\n\n")])
def test_committed_template_knows_thinking(thinking: bool, ending: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )
    assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.endswith(ending)
