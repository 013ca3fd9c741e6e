"""Chats with tools as a template renders them, and which of their tokens count."""

import json
from itertools import groupby

import pytest
from tiny import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from qat.data.text import encode, num_characters, render, render_prompt
from qat.errors import DataError
from qat.extensions.decode.prompts import Prompt, row_text

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "find the cat"}}
    for name in ("find", "find_all")
]


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "user", "content": "find the cat", "tools": TOOLS},
    {"role": "assistant", "content": "", "tool_calls": [call("find", what="the cat")]},
    {"role": "tool", "content": "the mat\nthe dog", "name": "find"},
    {
        "role": "assistant",
        "content": "the dog",
        "tool_calls": [call("find_all", most=2), call("find", what="a caf\u00e9")],
        "reasoning_content": "so",
    },
    {"role": "tool", "content": "no cat"},
    {"role": "tool", "content": "no dog"},
    {"role": "assistant", "content": "on the mat"},
    {"role": "user", "content": "and the dog"},
    {"role": "assistant", "content": "the same"},
]
FIRST = '<call>find {"what": "the cat"}</call>'
SECOND = '<call>find_all {"most": 2}</call>\n<call>find {"what": "a caf\u00e9"}</call>'

LISTED = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
)
LOOP = "{% for m in messages %}"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n{% endif %}"
CALLED = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}"
    "{{ '\n' }}{% endif %}<call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
)
TEMPLATES = {
    "as ChatML": LISTED
    + LOOP
    + f"<|{{{{ m.role }}}}|>\n{THOUGHT}{{{{ m.content }}}}{CALLED}<|end|>\n",
    "trims and escapes": LISTED
    + LOOP
    + "<|{{ m.role }}|>{% if m.role == 'tool' %}{{ m.content | trim | tojson }}"
    + f"{{% else %}}{THOUGHT}{{{{ m.content }}}}{CALLED}{{% endif %}}<|end|>\n",
}
TEMPLATES = {name: text + "{% endfor %}" for name, text in TEMPLATES.items()}
WITHIN = (  # what a tool answers is a part of the turn that called it
    LISTED
    + LOOP
    + "{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
    + CALLED
    + "{% if m.tool_calls %}{% for t in messages if t.role == 'tool' %}{{ t.content }}{% endfor %}"
    "{% endif %}<|end|>{% endif %}{% endfor %}"
)
AFTER_CALLS = (  # a tool answers only after a call
    LISTED
    + LOOP
    + "{% if m.role == 'tool' and loop.index0 and not loop.previtem.tool_calls and "
    + "loop.previtem.role != 'tool' %}{{ raise_exception('no call') }}{% endif %}"
    + "<|{{ m.role }}|>{{ m.content }}"
    + CALLED
    + "<|end|>{% endfor %}"
)


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def counted(chat: list[dict], tokenizer: PreTrainedTokenizerFast, mode: str = "true") -> list[str]:
    """The stretches of tokens that count, as text."""
    ((ids, is_target),) = encode(render(chat, tokenizer, mode, "assistant"), tokenizer)
    pairs = groupby(zip(ids, is_target, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([each for each, _ in own]) for is_said, own in pairs if is_said]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_with_tools_is_what_transformers_renders(name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    ((ids, _),) = encode(render(CHAT, tokenizer, "true", "assistant"), tokenizer)
    messages = [{field: turn[field] for field in turn if field != "tools"} for turn in CHAT]
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
    assert tokenizer.decode(expected[len(ids) :]).strip() == ""
    assert ids == expected[: len(ids)]
    assert counted(CHAT, tokenizer) == [
        FIRST + "<|end|>",
        f"<think>so</think>\nthe dog\n{SECOND}<|end|>",
        "on the mat<|end|>",
        "the same<|end|>",
    ]
    assert counted(CHAT, tokenizer, "false")[1] == f"the dog\n{SECOND}<|end|>"


def test_turns_of_weight_0_do_not_count() -> None:
    tokenizer = tokenizer_with(TEMPLATES["as ChatML"])
    chat = [turn | ({"weight": 0} if n in (1, 6) else {}) for n, turn in enumerate(CHAT)]
    assert counted(chat, tokenizer) == [*counted(CHAT, tokenizer)[1::2]]
    assert render(chat, tokenizer, "true")[0].text == render(CHAT, tokenizer, "true")[0].text
    with pytest.raises(DataError, match="has no assistant's turn that counts"):
        render(chat[:3], tokenizer, "true", "assistant")


def test_without_a_template_tools_and_calls_are_their_json() -> None:
    tokenizer = tokenizer_with(LOOP + "{% endfor %}")
    (rendering,) = render(CHAT, tokenizer, "none", "assistant")
    assert '"name": "find_all", "description"' in rendering.text
    first, second, *_ = counted(CHAT, tokenizer, "none")
    assert first.strip() == json.dumps(CHAT[1]["tool_calls"][0])
    assert second.strip() == "\n".join(["the dog", *map(json.dumps, CHAT[3]["tool_calls"])])
    assert num_characters(CHAT) == len(rendering.text) - 2 * (len(CHAT) - 1)


@pytest.mark.parametrize(
    ("left_out", "instead"),
    [
        (LISTED, ""),
        (CALLED, ""),
        (CALLED, CALLED.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")),
        ("{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}"),
    ],
)
def test_a_template_that_leaves_out_tools_is_refused(left_out: str, instead: str) -> None:
    template = TEMPLATES["as ChatML"]
    assert left_out in template
    tokenizer = tokenizer_with(template.replace(left_out, instead))
    with pytest.raises(DataError, match="leaves out tools.* chat that begins 'find the cat'"):
        render(CHAT, tokenizer, "true")
    with pytest.raises(DataError, match="leaves out tools"):
        render_prompt(CHAT[:6], tokenizer, "false")


@pytest.mark.parametrize("template", [WITHIN, AFTER_CALLS])
def test_an_answer_of_a_tool_never_counts_as_said(template: str) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(DataError, match="where the assistant speaks in .* cannot be told"):
        render(CHAT, tokenizer, "true", "assistant")
    assert render(CHAT, tokenizer, "true", "all")[0].text.count("no cat") >= 1


def test_templates_for_tools_come_by_name() -> None:
    named = {"default": TEMPLATES["as ChatML"], "tool_use": TEMPLATES["trims and escapes"]}
    tokenizer = tokenizer_with(named)
    for chat in (CHAT, CHAT[-2:]):
        messages = [{field: turn[field] for field in turn if field != "tools"} for turn in chat]
        text = tokenizer.apply_chat_template(
            messages, tools=chat[0].get("tools"), tokenize=False, enable_thinking=True
        )
        assert render(chat, tokenizer, "true")[0].text == text


def test_a_sampled_row_holds_its_tools_beside_its_turns() -> None:
    tokenizer = tokenizer_with(TEMPLATES["as ChatML"])
    prompt = Prompt([1, 2], CHAT[:3], "true")
    row, _ = row_text(prompt, tokenizer("the dog").input_ids, tokenizer)
    assert row["tools"] == TOOLS
    assert [set(turn) & {"tools"} for turn in row["messages"]] == [set()] * 4
    assert row["messages"][1:] == [*CHAT[1:3], {"role": "assistant", "content": "the dog"}]
