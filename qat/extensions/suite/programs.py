"""Run the programs that a model writes, each in a process of its own with limits.

The limits stop accidents: an endless loop, too much memory or output, a download. They are no wall
against an attacker: a program can read the files that its user can read.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from qat.logs import progress
from qat.process import cores

SECONDS = 8.0
"""Wall-clock limit of a program, with the start of Python."""
MEMORY_BYTES = 2**30
"""Limit of a program's address space."""
FILE_BYTES = 2**20
"""Limit of a file that a program writes."""
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
"""A fenced block of an answer; one that was cut off has no end."""

CHILD = r"""
import ctypes, json, os, resource, sys
asked = json.loads(sys.stdin.read())
pipe = int(sys.argv[1])
# CLONE_NEWUSER | CLONE_NEWNET: a network of its own, without any device
blocked = not sys.platform.startswith("linux") or ctypes.CDLL(None).unshare(0x50000000) != 0
os.write(pipe, b"socket\n" if blocked else b"namespace\n")
for name, limit in asked["limits"].items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
if blocked:
    def refuse(event, _):
        if event.startswith("socket."):
            raise PermissionError("a program of a task may use no network")
    sys.addaudithook(refuse)
word = asked["word"].encode()
program, asked = asked["program"], None
exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
os.write(pipe, word)
os._exit(0)
"""
"""The program of the child process.

Only a program that reaches its end has the secret word written: an exit code of 0 or a printed word
proves nothing."""


class Outcome(NamedTuple):
    """The outcome of running a program."""

    passed: bool
    """Whether it ran to its end without an exception."""
    network: str
    """The way in which the network was cut off: `namespace` by the system, `socket` by an audit
    hook."""


def run_program(program: str, *, seconds: float = SECONDS) -> Outcome:
    """Run a program to its end, or until it exceeds a limit; all of its processes then end."""
    word = secrets.token_hex(16)
    limits = {
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_CORE": 0,
    }
    asked = json.dumps({"program": program, "word": word, "limits": limits})
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder, os.fdopen(reading, "rb") as answer:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", CHILD, str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        os.close(writing)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(asked.encode(), timeout=seconds)
        with suppress(ProcessLookupError):  # it ended, and left no other process
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        os.set_blocking(reading, False)  # a process outside the group may hold the other end
        said = (answer.read() or b"").decode().split("\n")
    return Outcome(said[-1] == word, said[0])


def answered_code(answer: str) -> str:
    """Return the first fenced block of an answer; the whole answer without one."""
    block = BLOCK.search(answer)
    return answer if block is None else block[1]


def program_of(problem: Mapping[str, str], code: str) -> str:
    """Return the imports of a problem's prompt, the code, its tests and their call."""
    before, _, _ = problem["prompt"].partition(f"def {problem['entry_point']}")
    return f"{before}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"


class Attempt(NamedTuple):
    """An answer whose program ran."""

    answer: str
    """The code."""
    outcome: Outcome


def run_answers(
    answers: Iterable[Sequence[str]], problems: Sequence[Mapping[str, str]]
) -> list[list[Attempt]]:
    """Run the tests of all answers, as many at once as there are cores: a filter of lm-eval."""
    codes = [answered_code(given[0]) for given in answers]
    programs = [program_of(*pair) for pair in zip(problems, codes, strict=True)]
    found = []
    with (
        ThreadPoolExecutor(cores()) as pool,
        progress("running programs", len(programs), "programs") as ticker,
    ):
        for code, outcome in zip(codes, pool.map(run_program, programs), strict=True):
            found.append([Attempt(code, outcome)])
            ticker.advance()
    return found


def score(_: Mapping[str, str], found: Sequence[Attempt]) -> dict[str, float]:
    """Return the measures of one problem: lm-eval's `process_results`."""
    return {"passed": float(found[0].outcome.passed)}
