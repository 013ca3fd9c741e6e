"""Render chat templates, which are programs shipped with a model, in a sandboxed child process.

Jinja's sandbox denies a template access to files and to Python, but does not limit time and memory.
All chats are therefore rendered by one child process under the operating system's limits: a timer
kills it if a chat takes too long, and its address space is bounded.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from qat.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from qat.data.documents import Message  # the child does without its imports

RENDER_S, MORE_BYTES, MOST_CHARACTERS = 5.0, 2**30, 2**26
"""Limits per chat: seconds, bytes of memory beyond an idle process, characters of output."""
MARK = "qat-3f9c61d2-speaks"
"""Placeholder for what is said: a template does not trim it, and no real text contains it."""
CHILD = "import sys; sys.path[:] = {path!r}; from qat.data.template import serve; serve()"


def templated(
    messages: "list[Message]", tokenizer: "PreTrainedTokenizerBase", **variables: object
) -> str:
    """Render a chat with the tokenizer's own template; `variables` are passed to the template.

    The template also gets the tools that a turn of the chat holds.

    Raises:
        DataError: the template rejects the chat, fails, or takes too long.
    """
    from transformers import PreTrainedTokenizerBase

    variables["tools"] = next((turn["tools"] for turn in messages if "tools" in turn), None)
    own = ("tools", "weight")  # not of transformers' messages
    messages = [{name: turn[name] for name in turn if name not in own} for turn in messages]
    plain = PreTrainedTokenizerBase.apply_chat_template
    if type(tokenizer).apply_chat_template is not plain:  # overridden by trusted code
        return tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        names = ("tool_use", "default") if variables["tools"] else ("default",)
        template = next(filter(None, map(template.get, names)), None)
    if not isinstance(template, str):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path or 'the model'} is no text, expected "
            "one that renders chats; copy the tokenizer's files anew, or do without the template "
            "(--thinking none; --raw of 'qat generate')"
        )
    values = {**tokenizer.special_tokens_map, **variables}
    return _RENDERER.render({"template": template, "messages": messages, "values": values})


def start_rendering() -> None:
    """Start the child process, so that it imports while the caller does, before the first chat."""
    _RENDERER.start()


class _Renderer:
    """The child process that renders, started for the first chat if not before."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def render(self, asked: dict[str, object]) -> str:
        """Render one chat.

        Raises:
            DataError: the template fails, or the process dies.
        """
        with self._lock:
            process = self._started()
            try:
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # an unread answer would be returned for the next chat
                self.stop()
                raise
            if not answer.endswith(b"\n"):
                status = process.wait()
                self.stop()
                is_late = status == -signal.SIGALRM
                late = f"takes longer than {RENDER_S:g} s for one chat"
                answer = json.dumps({"error": late if is_late else f"ended with {status}"})
        found = json.loads(answer)
        if isinstance(found, str):
            return found
        raise DataError(
            f"the chat template {found['error']}, expected one that renders chats; mend the chat, "
            "or do without the template (--thinking none; --raw of 'qat generate')"
        )

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            self._started()

    def stop(self) -> None:
        """Kill the process if this process started it (after a fork it belongs to the parent)."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
        self._process = None

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD.format(path=sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must not reach the child
            )
            self._owner = os.getpid()
        return self._process


_RENDERER = _Renderer()
atexit.register(_RENDERER.stop)


def serve() -> None:
    """Render the chats on standard input, one JSON object per line, until it ends."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        bound = pages * resource.getpagesize() + MORE_BYTES
        # allocating more raises a MemoryError, which is reported below
        resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, RENDER_S)  # no handler: SIGALRM kills the process
        try:
            answer: object = tokenizer.apply_chat_template(
                asked["messages"],
                chat_template=asked["template"],
                tokenize=False,
                **asked["values"],
            )
            if len(answer) > MOST_CHARACTERS:
                answer = {"error": f"makes {len(answer):,} characters of one chat"}
        except Exception as error:  # noqa: BLE001 - a template can raise anything
            words = " ".join(str(error).split())[:300]
            answer = {"error": f"fails ({type(error).__name__}: {words})"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
