"""Two hosts on one machine: network namespaces that a virtual cable joins."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

import pytest


class Host(NamedTuple):
    """A network of its own, with an address and an interface."""

    enter: list[str]
    """Words before a command that is to run there."""
    address: str
    interface: str


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts that see each other and nothing else; skip the test if that is forbidden.

    The networks need no root where the kernel gives users namespaces of their own, and they are
    gone with the last of their processes.
    """
    missing = [word for word in ("ip", "nsenter", "unshare") if shutil.which(word) is None]
    if missing:
        pytest.skip(f"no {missing[0]}, which makes networks")
    with ExitStack() as stack:  # which kills what is left on the hosts
        first = _namespace(stack, ["unshare", "--user", "--map-root-user", "--net"])
        users = ["nsenter", "--preserve-credentials", "--user", "--target", first]
        second = _namespace(stack, [*users, "unshare", "--net"])
        enter = [[*users, f"--net=/proc/{each}/ns/net"] for each in (first, second)]
        cable = ["link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", second]
        _ip(enter[0], *cable)
        hosts = [Host(each, f"10.77.0.{n + 1}", f"cable{n}") for n, each in enumerate(enter)]
        for host in hosts:
            _ip(host.enter, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip(host.enter, "link", "set", interface, "up")
        yield tuple(hosts)


def _namespace(stack: ExitStack, make: list[str]) -> str:
    """Return the id of a process that keeps a new namespace until the stack is closed."""
    words = [*make, "sh", "-c", "echo $$; exec sleep 3600"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    keeper = stack.enter_context(subprocess.Popen(words, **pipes))
    number = keeper.stdout.readline().strip()
    if not number:
        pytest.skip(f"no networks of a test's own here: {keeper.stderr.read().strip()}")
    stack.callback(_kill_all, number)
    return number


def _kill_all(keeper: str) -> None:
    """Kill the process `keeper` and all others in its network."""
    network = Path(f"/proc/{keeper}/ns/net").readlink()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if (process / "ns/net").readlink() == network:
                os.kill(int(process.name), SIGKILL)


def _ip(enter: list[str], *words: str) -> None:
    made = subprocess.run([*enter, "ip", *words], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no networks of a test's own here: {made.stderr.strip()}")
