"""Read chats that hold more than turns of text: tools and their calls, history, parts, weights."""

from typing import Any

from qat.data.documents import ROLES, Message, Place, Row, is_empty, message_of, string
from qat.errors import DataError
from qat.files import parse_json

ALL_ROLES = ROLES | {
    "developer": "system",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def with_beside(place: Place, row: Row, messages: list[Message]) -> list[Message]:
    """Return the chat with the history, the system text and the tools of its row.

    Raises:
        DataError: one of them is not understood, or has no place in the chat.
    """
    messages = [*_history(place, row), *messages]
    for field in ("system", "system_prompt"):
        text = "" if is_empty(row.get(field)) else string(place, row, field)
        if text in ("", *(message["content"] for message in messages)):
            continue
        if messages[0]["role"] == "system":
            raise _left_out(place, row, field)
        messages.insert(0, message_of("system", text))
    if not is_empty(row.get("chat_template_kwargs")):
        raise _left_out(place, row, "chat_template_kwargs")
    tools = [
        each if "function" in each else {"type": "function", "function": each}
        for each in (*_listed(place, row, "tools"), *_listed(place, row, "functions"))
    ]
    if tools:
        functions = [_function(place, each) for each in tools]
        tools = [each | {"function": own} for each, own in zip(tools, functions, strict=True)]
        messages[0]["tools"] = tools
    return messages


def turn_of(place: Place, turn: Row, role_field: str, text_field: str) -> Message:
    """Return a turn that may call tools or answer them, have its text in parts, or a weight.

    Raises:
        DataError: its role is unknown, or what it holds is not understood.
    """
    role = string(place, turn, role_field)
    if role not in ALL_ROLES:
        raise DataError(
            f"{place} has {role_field}={role!r}, expected one of {', '.join(ALL_ROLES)}; "
            "rename it, or leave the row out"
        )
    if role == "function_call":  # its text is the JSON of the calls
        turn = {"tool_calls": turn.get(text_field)}
    calls = [*_listed(place, turn, "tool_calls"), *_listed(place, turn, "function_call")]
    is_silent = bool(calls) and turn.get(text_field) is None
    message = message_of(ALL_ROLES[role], "" if is_silent else _text(place, turn, text_field))
    if calls:
        message["tool_calls"] = [_call(place, each) for each in calls]
    own = ("name", "tool_call_id") if message["role"] == "tool" else ("reasoning_content",)
    message |= {name: turn[name] for name in own if isinstance(turn.get(name), str)}
    if message["role"] == "assistant" and (weight := turn.get("weight")) is not None:
        if weight not in (0, 1):
            raise DataError(f"{place} has weight={weight!r:.60}, expected 0 or 1; mend the row")
        if weight == 0:
            message["weight"] = 0
    return message


def _history(place: Place, row: Row) -> list[Message]:
    """Return the turns before those of the row: messages, or pairs of a question and an answer."""
    found = []
    for each in _listed(place, row, "history", dict, list):
        if isinstance(each, list) and len(each) != 2:
            raise _left_out(place, row, "history")
        pair = ({"user": each[0]}, {"assistant": each[1]}) if isinstance(each, list) else ()
        found += [message_of(role, string(place, turn, role)) for turn in pair for role in turn]
        found += [turn_of(place, each, "role", "content")] if isinstance(each, dict) else []
    return found


def _text(place: Place, turn: Row, field: str) -> str:
    """Return the text of a turn, which may come as a list of parts."""
    if not isinstance(turn.get(field), list):
        return string(place, turn, field)
    for part in turn[field]:
        if not isinstance(part, dict) or part.get("type", "text") != "text":
            raise DataError(
                f"{place} has a part {part!r:.60} in its {field!r}, expected parts of text; leave "
                "the row out, or write what the part says as text"
            )
    return "".join(string(place, part, "text") for part in turn[field])


def _call(place: Place, call: Row) -> dict[str, Any]:
    """Return a call with its arguments as an object, which chat templates expect."""
    function = _function(place, call)
    arguments, *others = _listed(place, function, "arguments") or [{}]
    if others:
        raise _left_out(place, function, "arguments")
    called = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return called | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})


def _function(place: Place, each: Row) -> Row:
    """Return the function of a tool or of a call, which is written with and without its type."""
    function = each.get("function", each)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{place} has the tool {each!r:.60}, expected a function with a name; mend the row"
        )
    return function


def _listed(place: Place, row: Row, field: str, *kinds: type) -> list[Any]:
    """Return the values of a field that holds one of them, a list, or the JSON of either."""
    value = row.get(field)
    if is_empty(value):
        return []
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            value = [value]
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(each, kinds or dict) for each in found):
        raise DataError(
            f"{place} has {field}={row[field]!r:.60}, expected objects or their JSON; mend the row"
        )
    return found


def _left_out(place: Place, row: Row, field: str) -> DataError:
    return DataError(
        f"{place} has {field}={row[field]!r:.60}, which would be left out of the chat, expected "
        "turns that hold all that is said; write it into the turns, remove it, or render the row "
        "into a field 'text'"
    )
