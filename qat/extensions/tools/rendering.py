"""Check that a chat template writes the tools of a chat, their calls and their answers."""

from collections.abc import Callable

from qat.data.documents import CALLABLE, Message
from qat.data.template import MARK
from qat.errors import DataError


def check_complete(messages: list[Message], render: Callable[[list[Message]], str]) -> None:
    """Refuse a chat if its template, by which `render` works, leaves out something of its tools.

    The names of tools and calls and the tools' answers are replaced by marks, which must all be in
    the rendered text: the names themselves may be in it for other reasons.

    Raises:
        DataError: a mark is not in the text, or the template rejects the chat.
    """
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"{MARK}-{len(marks)}-")
        return marks[-1]

    def named(functions: list[dict]) -> list[dict]:
        return [each | {"function": each["function"] | {"name": mark()}} for each in functions]

    text = render(
        [
            turn
            | {field: named(turn[field]) for field in CALLABLE if field in turn}
            | ({"content": mark()} if turn["role"] == "tool" else {})
            for turn in messages
        ]
    )
    if not all(mark in text for mark in marks):
        raise DataError(
            "the chat template leaves out tools, their calls or their answers in the chat that "
            f"begins {messages[0]['content']!r:.60}, expected one that writes them all; take the "
            "tokenizer of a model that calls tools, or join the messages without the template by "
            "--thinking none"
        )
