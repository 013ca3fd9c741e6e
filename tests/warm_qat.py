"""A `qat` that answers at once: a process with the libraries loaded forks for each command.

`WarmQat(directory)` puts a program `qat` there. It hands its arguments, directory and open files
to the process, which runs the ordinary command line in a child. What is saved are the start of
Python, the imports, and all but the first sweep of a conversion.
"""

import importlib
import json
import os
import pkgutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import qat
from qat.cli import main
from qat.errors import ConfigError
from qat.quant import error_feedback

PROGRAM = """#!{python} -SE
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(request)
    server.shutdown(socket.SHUT_WR)
    sys.exit(int(server.recv(16)))
"""


class WarmQat:
    """Runs while its `with` block does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = directory / "socket"

    def __enter__(self) -> "WarmQat":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(self.address))
        server.listen()
        program = self.directory / "qat"
        program.write_text(PROGRAM.format(python=sys.executable, address=str(self.address)))
        program.chmod(0o755)
        command = [sys.executable, __file__, str(server.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[server.fileno()])
        server.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


def serve(listener: socket.socket) -> None:
    """Answer for ever, one command after the other."""
    for module in pkgutil.walk_packages(qat.__path__, "qat."):
        if not module.name.endswith("__main__"):
            with suppress(ConfigError, ModuleNotFoundError):  # of an extra that is not installed
                importlib.import_module(module.name)
    error_feedback.SWEEPS = 1
    while True:
        connection, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        arguments, directory, environment = json.load(connection.makefile())
        child = os.fork()
        if child == 0:
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.chdir(directory)
            os.environ.update(environment)
            os._exit(run(arguments))
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def run(arguments: list[str]) -> int:
    """The command line's exit status."""
    sys.argv = ["qat", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
