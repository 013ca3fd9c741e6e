"""Programs of answers run with limits, and only one that reaches its end has passed."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qat.extensions.suite import programs
from qat.extensions.suite.programs import (
    MEMORY_BYTES,
    Attempt,
    answered_code,
    program_of,
    run_answers,
    run_program,
    score,
)

PROBLEM = {
    "prompt": 'import math\n\n\ndef root(x: float) -> float:\n    """The root."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(9.0) == 3.0\n",
}


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('PASS'); print('passed'); 1 / 0",
        "raise SystemExit",
        "import os; os.kill(os.getpid(), 9)",
        "import sys\nwhile True: sys.stdin.read(1) or 1 / 0",
        "def (",
        f"x = bytearray({MEMORY_BYTES})",
        "open('much', 'w').write('a' * 2**21)",
    ],
    ids="assertion exit _exit prints raise kill input syntax memory disk".split(),
)
def test_only_the_end_of_a_program_passes(program: str) -> None:
    assert not run_program(program).passed
    assert run_program("x = 1").passed


def test_an_endless_program_and_its_children_are_ended(tmp_path: Path) -> None:
    pulse = tmp_path / "pulse"
    program = (
        "import os, time\nos.fork()\n"
        f"while True:\n    open({str(pulse)!r}, 'a').write('x')\n    time.sleep(0.01)\n"
    )
    began = time.monotonic()
    assert not run_program(program, seconds=0.7).passed
    assert time.monotonic() - began < 5
    size = pulse.stat().st_size
    time.sleep(0.1)
    assert pulse.stat().st_size == size > 2


def test_memory_is_limited_and_not_ours() -> None:
    program = (
        f"try:\n    bytearray({MEMORY_BYTES})\nexcept MemoryError:\n    pass\nelse:\n    1 / 0"
    )
    assert run_program(program).passed
    assert run_program(f"bytearray({MEMORY_BYTES // 2})").passed


@pytest.mark.parametrize("can_unshare", [True, False], ids=["namespace", "socket"])
def test_no_program_reaches_a_network(monkeypatch, can_unshare: bool) -> None:
    """With or without a namespace of its own, a server of this machine gets no connection."""
    if not can_unshare:
        monkeypatch.setattr(programs, "CHILD", programs.CHILD.replace("0x50000000", "-1"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        port = server.getsockname()[1]
        ask = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        subprocess.run([sys.executable, "-c", ask], check=True)
        server.accept()[0].close()  # the same program outside reaches it
        found = run_program(ask)
        assert not found.passed and (can_unshare or found.network == "socket")
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_program_sees_no_variables_and_leaves_no_files(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    place = tmp_path / "place"
    program = (
        "import os\nassert 'SECRET_TOKEN' not in os.environ\nopen('a', 'w').write('b')\n"
        f"open({str(place)!r}, 'w').write(os.getcwd())"
    )
    assert run_program(program).passed
    assert not Path(place.read_text()).exists()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Sure:\n```python\na = 1\n```\nand\n```python\nb\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```py\na = 1", "a = 1"),
        ("a = 1", "a = 1"),
    ],
)
def test_the_first_block_is_the_answer(answer: str, code: str) -> None:
    assert answered_code(answer) == code


def test_answers_are_tested_with_the_imports_of_their_prompt() -> None:
    right = "def root(x):\n    return math.sqrt(x)\n"
    assert program_of(PROBLEM, right).startswith("import math\n\n\n\ndef root")
    answers = [[f"```python\n{right}```"], ["def root(x):\n    return x\n"], ["no code"]]
    found = run_answers(answers, [PROBLEM] * 3)
    assert [score(PROBLEM, each) for each in found] == [{"passed": x} for x in (1.0, 0.0, 0.0)]
    assert [each[0].answer for each in found][1:] == ["def root(x):\n    return x\n", "no code"]
    assert isinstance(found[0][0], Attempt)
