"""Thinking modes, tokenisation and the tokenizer's hash."""

import subprocess
import sys

import pytest
from tiny import tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from qat.data import template
from qat.data.config import CacheConfig
from qat.data.text import Rendering, begin_token, encode, end_token, render, tokenizer_hash
from qat.errors import ConfigError, DataError

CHAT = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe dog"},
]
THINKING = "<|user|>the cat<|end|><|assistant|><think>\nhm\n</think>\n\nthe dog<|end|>"
SILENT = "<|user|>the cat<|end|><|assistant|><think></think>the dog<|end|>"
RAW = "the cat\n\n<think>\nhm\n</think>\n\nthe dog"


TURNS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe dog "},
    {"role": "user", "content": "the dog<|end|>"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\na caf\u00e9 \U0001f600"},
]
LOOP = "{% for m in messages %}"
TEMPLATES = {
    "a system turn of its own": "<|system|>be good<|end|>\n"
    + LOOP
    + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}",
    "trims": LOOP + "<|{{ m.role }}|>\n\n{{ m.content | trim }}<|end|>{% endfor %}",
    "other names of roles, the end behind a blank": LOOP
    + "{{ 'INST' if m.role == 'user' else '' }} {{ m.content }} "
    "{{ '/INST' if m.role == 'user' else '<|end|>' }}{% endfor %}",
    "nothing but the next turn ends one": LOOP + "<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    "forgets all thoughts but the last one's": LOOP
    + "<|{{ m.role }}|>\n{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% set thought = c.split('</think>')[0].split('<think>')[-1] if '</think>' in c else '' %}"
    "{% if loop.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}<|end|>\n{% endfor %}",
}
PROMPT = (
    "{% if add_generation_prompt %}<|assistant|>\n{% if not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TEMPLATES["prompts for no thoughts"] = (
    TEMPLATES["forgets all thoughts but the last one's"] + PROMPT  # as Qwen3's
)
TEMPLATES["prompts alone for no thoughts"] = (
    TEMPLATES["a system turn of its own"] + PROMPT  # as MiniMind2's
)
TEMPLATES["writes another empty thought than it prompts for"] = (
    LOOP
    + "<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n\n"
    + "{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    + PROMPT
)


def targets_of(tokenizer: PreTrainedTokenizerFast, mode: str, turns: list = TURNS) -> list[str]:
    """The stretches of tokens that count, as text."""
    (rendering,) = render(turns, tokenizer, mode, "assistant")
    (tokens,) = encode([rendering], tokenizer)
    assert tokens.ids == encode([rendering._replace(target_spans=None)], tokenizer)[0].ids
    flags = [False, *tokens.is_target.tolist(), False]
    edges = [i for i in range(len(flags) - 1) if flags[i] != flags[i + 1]]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(tokens.ids[begin:end]) for begin, end in pairs]


LAST = "a caf\u00e9 \U0001f600<|end|>"


@pytest.mark.parametrize(
    ("name", "mode", "expected"),
    [
        ("a system turn of its own", "false", ["the dog <|end|>", LAST]),
        ("trims", "false", ["the dog<|end|>", LAST]),
        (
            "other names of roles, the end behind a blank",
            *("false", [" the dog  <|end|>", "a caf\u00e9 \U0001f600 <|end|>"]),
        ),
        ("nothing but the next turn ends one", "false", ["the dog <|user|>", LAST]),
        (
            "forgets all thoughts but the last one's",
            *("false", ["the dog <|end|>", f"<think>\n\n</think>\n\n{LAST}"]),
        ),
        ("prompts for no thoughts", "false", ["the dog <|end|>", LAST]),
        ("prompts alone for no thoughts", "false", ["the dog <|end|>", LAST]),
        (
            "a system turn of its own",
            "true",
            ["<think>\nhm\n</think>\n\nthe dog <|end|>", f"<think>\nso\n</think>\n\n{LAST}"],
        ),
        (
            "forgets all thoughts but the last one's",
            *("true", ["the dog <|end|>", f"<think>\nso\n</think>\n\n{LAST}"]),
        ),
    ],
)
def test_what_assistants_say_and_its_end_count(name: str, mode: str, expected: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    assert targets_of(tokenizer, mode) == expected


def test_what_assistants_say_counts_without_a_template() -> None:
    first, last = targets_of(tiny_tokenizer(), "none")
    assert first.startswith("<think>\nhm") and first.rstrip("\n") == TURNS[1]["content"]
    assert last == TURNS[3]["content"] + "<|end|>"


def test_an_empty_answer_is_its_end() -> None:
    turns = [TURNS[0], {"role": "assistant", "content": ""}]
    assert targets_of(tiny_tokenizer(), "false", turns) == ["<|end|>"]


def test_an_answer_to_nothing_counts_where_a_template_prompts_for_no_thoughts() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["prompts alone for no thoughts"]
    assert targets_of(tokenizer, "false", TURNS[3:]) == [LAST]


def test_a_chat_whose_answers_cannot_be_found_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LOOP + "{{ m.content | upper }}{% endfor %}"
    with pytest.raises(DataError, match="speaks in the chat that begins 'the cat' cannot be told"):
        render(CHAT, tokenizer, "false", "assistant")
    with pytest.raises(DataError, match="the chat that begins 'the cat' has no assistant's turn"):
        render(CHAT[:1], tokenizer, "false", "assistant")
    assert [r.target_spans for r in render(CHAT[:1], tokenizer, "both")] == [None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('no system here') }}", "begins 'the cat': .*Error: no system here"),
        ("{{ 1 / 0 }}", r"fails \(ZeroDivisionError"),
        ("{{ messages.x.y }}", r"fails \(UndefinedError"),
        ("{% endfor %}", r"fails \(TemplateSyntaxError"),
        ("{{ 'x' * 10 ** 11 }}", r"fails \(MemoryError"),
        ("{{ ''.__class__.__mro__ }}", r"fails \(SecurityError"),
    ],
)
def test_a_template_that_fails_is_one_line(text: str, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    with pytest.raises(DataError, match=message) as caught:
        render(CHAT, tokenizer, "false")
    assert "\n" not in str(caught.value)


def test_a_template_that_never_ends_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ 7 ** (10 ** 9) }}"  # one operation, of C
    bounds = "; from qat.data import template; template.RENDER_S = 0.1; serve()"
    monkeypatch.setattr(template, "CHILD", template.CHILD.replace("; serve()", bounds))
    monkeypatch.setattr(template, "RENDER_S", 0.1)
    template._RENDERER.stop()
    with pytest.raises(DataError, match="takes longer than 0.1 s for one chat"):
        render(CHAT, tokenizer, "false")


def test_what_renders_may_start_early() -> None:
    template._RENDERER.stop()
    template.start_rendering()
    early = template._RENDERER._process.pid
    render(CHAT, tiny_tokenizer(), "false")
    assert template._RENDERER._process.pid == early


def test_templates_have_the_special_tokens_and_come_by_name() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "{{ eos_token }}{{ messages | length }}", "x": "no"}
    assert [r.text for r in render(CHAT, tokenizer, "true")] == [
        f"{tokenizer.eos_token}{len(CHAT)}"
    ]


def test_targets_follow_the_data() -> None:
    config = CacheConfig(teacher="t", data="x", sequence_length=64)
    assert config.settings("plain").targets == "all"
    assert config.settings("alpaca").targets == "assistant"
    everything = config.model_copy(update={"targets": "all"})
    assert everything.settings("alpaca").targets == "all"
    with pytest.raises(ConfigError, match="targets=assistant, but data=x is plain text"):
        config.model_copy(update={"targets": "assistant"}).settings("plain")


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


@pytest.mark.parametrize(
    "name",
    [
        "prompts for no thoughts",
        "prompts alone for no thoughts",
        "writes another empty thought than it prompts for",
    ],
)
@pytest.mark.parametrize("count", [2, 4])
def test_without_thinking_a_chat_begins_as_its_prompt_does(name: str, count: int) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    for answer in ("<b>", "<think>\nhm\n</think>\n\nthe dog"):
        turns = [*TURNS[: count - 1], {"role": "assistant", "content": answer}]
        (rendering,) = render(turns, tokenizer, "false", "assistant")
        without = [turn | {"content": turn["content"].split("</think>\n\n")[-1]} for turn in turns]
        prompt = tokenizer.apply_chat_template(
            without[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert prompt.endswith("<think>\n\n</think>\n\n")
        assert rendering.text == prompt + without[-1]["content"] + "<|end|>\n"
        assert rendering.target_spans[-1][0] == len(prompt)


def test_documents_end_with_exactly_one_end_token() -> None:
    tokenizer = tiny_tokenizer()
    end = end_token(tokenizer)
    texts = [*render(CHAT, tokenizer, "true"), *render("the cat", tokenizer, "true")]
    tokenizer.chat_template = TEMPLATES["trims"].replace("{% endfor %}", "\n{% endfor %}")
    texts += [*render(CHAT, tokenizer, "true"), *render(CHAT, tokenizer, "true", "assistant")]
    for rendering in texts:
        ((ids, is_target),) = encode([rendering], tokenizer)
        assert ids[-1] == end not in ids[-3:-1]
        assert is_target is None or (len(is_target) == len(ids) and is_target[-1])


def test_a_chat_without_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert render(CHAT, tokenizer, "none")
    with pytest.raises(ConfigError, match="thinking=true needs a chat template"):
        render(CHAT, tokenizer, "true")


def test_a_text_begins_with_the_token_for_it_whether_the_tokenizer_puts_it_or_not() -> None:
    tokenizer = tiny_tokenizer()
    assert begin_token(tokenizer) is None
    plain, chat = Rendering("the cat", False, target_spans=((0, 3),)), Rendering("the cat", True)
    ((without, _),) = encode([plain], tokenizer)
    tokenizer.bos_token = "<|end|>"  # the end token as well: texts are not known to begin with it
    assert begin_token(tokenizer) is None
    tokenizer.bos_token = "<|system|>"
    begin = tokenizer.bos_token_id
    assert begin_token(tokenizer) == begin
    named = encode([plain, chat, plain._replace(target_spans=None)], tokenizer)
    assert [ids for ids, _ in named] == [[begin, *without], without, [begin, *without]]
    assert not named[0].is_target[0] and named[0].is_target[1]
    pair = [("<|system|>", begin)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|system|> $A", None, pair)
    assert begin_token(tokenizer) == begin
    assert encode([plain], tokenizer)[0].ids == named[0].ids
    assert encode([plain], tokenizer)[0].is_target.tolist() == named[0].is_target.tolist()


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
