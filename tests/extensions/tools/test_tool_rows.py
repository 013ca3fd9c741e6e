"""Rows whose chats hold more than turns of text."""

import json
from pathlib import Path

import pytest

from qat.data.sources import open_source
from qat.errors import DataError

FUNCTION = {"name": "find", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"city": "Rome"}}}
AS_TEXT = {"name": "find", "arguments": '{"city": "Rome"}'}
USER, SYSTEM = {"role": "user", "content": "Where?"}, {"role": "system", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "Here."}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "tool", "content": "Italy"}


def documents(path: Path, row: object) -> list:
    (path / "a.jsonl").write_text(json.dumps(row))
    return list(open_source(str(path / "a.jsonl")).documents)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, CALLING, TOLD, ANSWER]}, [USER, CALLING, TOLD, ANSWER]),
        ({"messages": [USER, {**CALLING, "content": None}]}, [USER, CALLING]),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, [USER, CALLING]),
        ({"messages": [USER, {**CALLING, "tool_calls": [{"function": AS_TEXT}]}]}, [USER, CALLING]),
        ({"messages": [USER, {**CALLING, "tool_calls": json.dumps([AS_TEXT])}]}, [USER, CALLING]),
        ({"messages": [USER, {**ANSWER, "function_call": AS_TEXT}]}, [USER, CALLING | ANSWER]),
        (
            {"messages": [USER, {**CALLING, "tool_calls": [{**CALL, "id": "a1"}]}]},
            [USER, {**CALLING, "tool_calls": [{**CALL, "id": "a1"}]}],
        ),
        (
            {"messages": [USER, {**CALLING, "tool_calls": [{"function": {"name": "now"}}]}]},
            [
                USER,
                CALLING
                | {
                    "tool_calls": [
                        {"type": "function", "function": {"name": "now", "arguments": {}}}
                    ]
                },
            ],
        ),
        (
            {"messages": [USER, {**TOLD, "role": "function", "name": "find", "more": 1}]},
            [USER, {**TOLD, "name": "find"}],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Where?"},
                    {"from": "function_call", "value": json.dumps(AS_TEXT)},
                    {"from": "observation", "value": "Italy"},
                ],
                "tools": json.dumps([FUNCTION]),
                "system": "Be kind.",
            },
            [{**SYSTEM, "tools": [TOOL]}, USER, CALLING, TOLD],
        ),
        ({"messages": [USER], "tools": [TOOL]}, [{**USER, "tools": [TOOL]}]),
        ({"messages": [USER], "functions": [FUNCTION]}, [{**USER, "tools": [TOOL]}]),
        ({"messages": [{**SYSTEM, "role": "developer"}, USER]}, [SYSTEM, USER]),
        ({"messages": [SYSTEM, USER], "system": "Be kind."}, [SYSTEM, USER]),
        ({"messages": [USER], "system_prompt": "Be kind."}, [SYSTEM, USER]),
        (
            {"instruction": "Where?", "output": "Here.", "history": [["a", "b"]]},
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER, ANSWER],
        ),
        ({"prompt": "Where?", "completion": "Here.", "history": [SYSTEM]}, [SYSTEM, USER, ANSWER]),
        (
            {"messages": [{**USER, "content": [{"type": "text", "text": "Whe"}, {"text": "re?"}]}]},
            [USER],
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, [USER, {**ANSWER, "weight": 0}]),
        ({"messages": [{**USER, "weight": 0}, {**ANSWER, "weight": 1}]}, [USER, ANSWER]),
    ],
)
def test_what_a_row_holds_is_in_its_chat(tmp_path: Path, row: dict, expected: list) -> None:
    assert documents(tmp_path, row) == [expected]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{**USER, "role": "x"}]}, "has role='x', expected one of .*tool"),
        ({"messages": [{**USER, "content": None}]}, "has content=None, expected text"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "has a part .*image.*of text"),
        ({"messages": [{**USER, "content": ["Where?"]}]}, "has a part 'Where.' in its 'content'"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, "has weight=0.5, expected 0 or 1"),
        ({"messages": [{**CALLING, "tool_calls": "find"}]}, "tool_calls='find', expected objects"),
        ({"messages": [{**CALLING, "tool_calls": [{"id": "a"}]}]}, "has the tool {'id': 'a'}"),
        (
            {"messages": [{**CALLING, "tool_calls": [{"name": "f", "arguments": "x"}]}]},
            "has arguments='x', expected objects",
        ),
        (
            {"messages": [{**CALLING, "tool_calls": [{"name": "f", "arguments": [{}, {}]}]}]},
            r"has arguments=\[{}, {}\], which would be left out",
        ),
        ({"messages": [USER], "tools": ["find"]}, r"has tools=\['find'\], expected objects"),
        ({"messages": [USER], "tools": [{"type": "web"}]}, "has the tool .*{'type': 'web'}"),
        ({"messages": [SYSTEM, USER], "system": "Be brief."}, "has system='Be brief.', which"),
        ({"messages": [USER], "system": 3}, "has system=3, expected text"),
        ({"messages": [USER], "history": [["a"]]}, "has history=.*, which would be left out"),
        ({"messages": [USER], "history": [["a", 1]]}, "has assistant=1, expected text"),
        ({"messages": [USER], "chat_template_kwargs": {"a": 1}}, "has chat_template_kwargs=.*left"),
        ({"messages": [{**CALLING, "content": "\ud83d"}]}, "half of a surrogate pair"),
    ],
)
def test_what_a_chat_would_lose_is_named(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(DataError, match=f"a.jsonl row 1 .*{message}"):
        documents(tmp_path, row)
