"""The audit passes where all is known, or where the network does not answer, and nowhere else."""

import datetime
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import requests
from packaging.version import Version

SPEEDRUN = Path(__file__).resolve().parents[2] / "speedrun"
PACKAGES = {name: Version("1") for name in ("a", "b", "weak")}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import audit

    monkeypatch.setattr(audit, "KNOWN", tmp_path / "known.toml")
    monkeypatch.setattr(audit, "installed", lambda: PACKAGES)
    (tmp_path / "known.toml").touch()
    yield audit
    sys.modules.pop("audit")


def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, **answers: Exception | list[str] | None
) -> object:
    """The exit code; a package has weaknesses, is not in the database (None) or raises."""
    service = script.service

    class Database:
        def query(self, asked: object) -> tuple[object, list]:
            answer = answers.get(asked.name, [])
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                return service.SkippedDependency(asked.name, "not there"), []
            make = service.VulnerabilityResult
            return asked, [make(each, "", [Version("3")], set()) for each in answer]

    monkeypatch.setattr(service, "PyPIService", lambda timeout: Database())
    try:
        script.main()
    except SystemExit as ended:
        return ended.code
    return 0


def excuse(script: ModuleType, name: str, days: int) -> None:
    until = datetime.date.today() + datetime.timedelta(days)
    script.KNOWN.write_text(f'[{name}]\nuntil = {until}\nreason = "x"\n')


def test_a_weakness_fails(script: ModuleType, monkeypatch: object, capsys: object) -> None:
    assert run(script, monkeypatch, weak=["CVE-1", "CVE-2"])
    printed = capsys.readouterr().out
    assert "WEAK: weak 1: CVE-1, fixed in 3" in printed and "; 2 not excused" in printed


@pytest.mark.parametrize(("days", "fails"), [(10, False), (-1, True), (0, True)])
@pytest.mark.parametrize(("name", "answer"), [("CVE-1", ["CVE-1"]), ("weak", None)])
def test_an_excuse_has_an_end(
    script: ModuleType, monkeypatch: object, name: str, answer: object, days: int, fails: bool
) -> None:
    excuse(script, name, days)
    assert bool(run(script, monkeypatch, weak=answer)) is fails


def test_an_excuse_needs_a_reason(script: ModuleType) -> None:
    script.KNOWN.write_text("[CVE-1]\nuntil = 2030-01-01\n")
    with pytest.raises(SystemExit, match=r"\[CVE-1\] needs until"):
        script.excuses(script.KNOWN)


def test_a_package_that_is_not_in_the_database_is_counted_and_fails(
    script: ModuleType, monkeypatch: object, capsys: object
) -> None:
    assert run(script, monkeypatch, b=None)
    printed = capsys.readouterr().out
    assert "UNKNOWN: b is not in the database" in printed
    assert "2 of 3 packages audited: 0 weaknesses, 1 packages unknown; 1 not excused" in printed


@pytest.mark.parametrize("error", [requests.ConnectionError(), requests.ReadTimeout(), None])
def test_a_network_that_does_not_answer_passes(
    script: ModuleType, monkeypatch: object, capsys: object, error: Exception | None
) -> None:
    error = error or script.service.ConnectionError("timed out")
    assert run(script, monkeypatch, a=error) == 0
    assert capsys.readouterr().out == "3 packages not audited: nobody answered\n"
    assert run(script, monkeypatch, b=error) == 0
    assert "nobody answered about 2 packages\n1 of 3" in capsys.readouterr().out
    assert run(script, monkeypatch, a=["CVE-1"], b=error), "what was found before counts"


@pytest.mark.parametrize("unknown", [("a",), ("a", "b")])
def test_what_is_not_in_the_database_fails_though_the_network_drops_then(
    script: ModuleType, monkeypatch: object, capsys: object, unknown: tuple[str, ...]
) -> None:
    answers = dict.fromkeys(PACKAGES, requests.ConnectionError()) | dict.fromkeys(unknown)
    assert run(script, monkeypatch, **answers)
    printed = capsys.readouterr().out
    assert "UNKNOWN: a is not in the database" in printed
    left = len(PACKAGES) - len(unknown)
    assert f"nobody answered about {left} packages\n0 of 3 packages audited" in printed
    script.KNOWN.write_text(
        "".join(f'[{name}]\nuntil = 2999-01-01\nreason = "x"\n' for name in unknown)
    )
    assert run(script, monkeypatch, **answers) == 0


def test_a_mirror_without_the_database_passes(
    script: ModuleType, monkeypatch: object, capsys: object
) -> None:
    assert run(script, monkeypatch, a=None, b=None, weak=None) == 0
    assert "3 packages not audited: who answered knows none of them" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["a", "b"])
@pytest.mark.parametrize(
    "error",
    [requests.JSONDecodeError("<html>", "", 0), requests.exceptions.SSLError("forged"), None],
)
def test_an_answer_that_is_not_the_databases_fails(
    script: ModuleType, monkeypatch: object, error: Exception | None, at: str
) -> None:
    error = error or script.service.ServiceError("503")
    assert "not the database answered" in run(script, monkeypatch, **{at: error})


def test_it_does_not_wait_for_ever(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: object
) -> None:
    monkeypatch.setattr(script, "TIME_S", 0)
    assert run(script, monkeypatch) == 0
    assert "nobody answered" in capsys.readouterr().out


def test_without_pip_audit_it_fails() -> None:
    hidden = "import runpy, sys; sys.modules['pip_audit'] = None; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", hidden, SPEEDRUN / "audit.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode and "pip_audit" in ended.stderr.splitlines()[-1]


def test_a_build_of_a_release_is_looked_up_as_the_release(monkeypatch: object) -> None:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import audit

    found = audit.installed()
    assert "qat-distill" not in found and not any(each.local for each in found.values())
    assert "torch" in found
