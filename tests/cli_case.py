"""Calling the command line as a shell does, for tests of verbs."""

import json
import sys

import pytest

from qat.cli import app, main


def call(monkeypatch: pytest.MonkeyPatch, *tokens: object) -> int:
    """The exit code of `qat TOKENS`."""
    monkeypatch.setattr(app, "config", None)
    monkeypatch.setattr(sys, "argv", ["qat", *map(str, tokens)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def said(capsys: pytest.CaptureFixture[str]) -> dict:
    """Return the JSON that the last command printed on its last line."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])
