"""Thinking modes, tokenisation and the tokenizer's hash."""

import subprocess
import sys

import pytest
from tiny import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from qat.data.chat import Rendering, render
from qat.data.text import begin_token, encode, end_token, tokenizer_hash
from qat.errors import ConfigError

CHAT = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe dog"},
]
THINKING = "<|user|>the cat<|end|><|assistant|><think>\nhm\n</think>\n\nthe dog<|end|>"
SILENT = "<|user|>the cat<|end|><|assistant|>the dog<|end|>"
RAW = "the cat\n\n<think>\nhm\n</think>\n\nthe dog"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("true", [THINKING]),
        ("false", [SILENT]),
        ("both", [THINKING, SILENT]),
        ("none", [RAW]),
        ("all", [THINKING, SILENT, RAW]),
    ],
)
def test_thinking_modes(mode: str, expected: list[str]) -> None:
    assert [r.text for r in render(CHAT, tiny_tokenizer(), mode)] == expected


def test_separate_reasoning_is_dropped_without_thinking() -> None:
    message = {"role": "assistant", "content": "the dog", "reasoning_content": "hm"}
    (rendering,) = render([CHAT[0], message], tiny_tokenizer(), "false")
    assert rendering.text == SILENT


def test_text_is_rendered_once_in_every_mode() -> None:
    assert [r.text for r in render("words", tiny_tokenizer(), "all")] == ["words"]


def test_documents_end_with_exactly_one_end_token() -> None:
    tokenizer = tiny_tokenizer()
    end = end_token(tokenizer)
    for rendering in [*render(CHAT, tokenizer, "true"), *render("the cat", tokenizer, "true")]:
        (ids,) = encode([rendering], tokenizer)
        assert ids[-1] == end != ids[-2]


def test_a_chat_without_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert render(CHAT, tokenizer, "none")
    with pytest.raises(ConfigError, match="thinking=true needs a chat template"):
        render(CHAT, tokenizer, "true")


def test_only_a_token_that_the_tokenizer_puts_itself_begins_a_text() -> None:
    tokenizer = tiny_tokenizer()
    assert begin_token(tokenizer) is None
    tokenizer.bos_token = "<|system|>"
    assert begin_token(tokenizer) is None
    pair = [("<|system|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|system|> $A", None, pair)
    assert begin_token(tokenizer) == tokenizer.bos_token_id


def test_a_tokenizer_without_end_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        end_token(tokenizer)


def test_tokenizer_hash_sees_vocabulary_merges_and_special_tokens(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    first = tokenizer_hash(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(type(tokenizer).from_pretrained(tmp_path)) == first
    assert tokenizer_hash(tiny_tokenizer(270)) != first
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    second = tokenizer_hash(tokenizer)
    assert second != first
    tokenizer.add_special_tokens({"pad_token": "the"})
    assert tokenizer_hash(tokenizer) not in (first, second)


@pytest.mark.slow
def test_tokenizer_hash_is_equal_in_another_process() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from tiny import tiny_tokenizer\n"
        "from qat.data.text import tokenizer_hash\n"
        "sys.stdout.write(tokenizer_hash(tiny_tokenizer()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == tokenizer_hash(tiny_tokenizer())


def test_a_tokenizer_that_truncates_and_pads_encodes_all() -> None:
    tokenizer = tiny_tokenizer()
    texts = [Rendering("the cat sat on the mat", False), Rendering("a", False)]
    plain = encode(texts, tokenizer)
    tokenizer.backend_tokenizer.enable_truncation(2)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    assert encode(texts, tokenizer) == plain
