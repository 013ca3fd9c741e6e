"""The audit fails on a weakness that nobody has looked at, and only on that."""

import datetime
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

WEAK = {
    "dependencies": [
        {"name": "sound", "version": "1", "vulns": []},
        {"name": "odd", "skip_reason": "not there"},
        {
            "name": "weak",
            "version": "2",
            "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}, {"id": "CVE-2", "fix_versions": []}],
        },
    ]
}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "speedrun"))
    import audit

    monkeypatch.setattr(audit, "KNOWN", tmp_path / "known.toml")
    (tmp_path / "known.toml").touch()
    yield audit
    sys.modules.pop("audit")


def answer(monkeypatch: pytest.MonkeyPatch, script: ModuleType, text: str | None) -> None:
    monkeypatch.setattr(script, "ask", lambda: text)


def excuse(script: ModuleType, days: int) -> None:
    until = datetime.date.today() + datetime.timedelta(days)
    lines = [f'[{name}]\nuntil = {until}\nreason = "x"\n' for name in ("CVE-1", "CVE-2")]
    script.KNOWN.write_text("".join(lines))


def test_a_weakness_fails(script: ModuleType, monkeypatch: object, capsys: object) -> None:
    answer(monkeypatch, script, json.dumps(WEAK))
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert caught.value.code
    printed = capsys.readouterr().out
    assert "WEAK: weak 2: CVE-1, fixed in 3" in printed and "2 of them not known" in printed


@pytest.mark.parametrize(("days", "fails"), [(10, False), (-1, True), (0, True)])
def test_an_excuse_has_an_end(script: ModuleType, monkeypatch: object, days: int, fails: bool):
    answer(monkeypatch, script, json.dumps(WEAK))
    excuse(script, days)
    with pytest.raises(SystemExit) as caught:
        script.main()
    assert bool(caught.value.code) is fails


def test_an_excuse_needs_a_reason(script: ModuleType) -> None:
    script.KNOWN.write_text("[CVE-1]\nuntil = 2030-01-01\n")
    with pytest.raises(SystemExit, match=r"\[CVE-1\] needs until"):
        script.excuses(script.KNOWN)


@pytest.mark.parametrize("text", [None, "", "no route", '{"dependencies": []}', "{}"])
def test_nobody_answers(script: ModuleType, monkeypatch: object, capsys: object, text: str | None):
    answer(monkeypatch, script, text)
    script.main()
    assert capsys.readouterr().out == "packages not audited: nobody answered\n"


def test_it_does_not_wait_for_ever(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("pip_audit", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert script.ask() is None
