"""The audit passes where all is known, or where the network does not answer, and nowhere else."""

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import requests
from packaging.version import Version

SPEEDRUN = Path(__file__).resolve().parents[2] / "speedrun"
PACKAGES = {name: Version("1") for name in ("a", "b", "weak")}


class Audit:
    """The script, of three packages, whose database gives the answers of a test."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
        self.script, self._patch, self._capsys = script, monkeypatch.setattr, capsys
        self.printed = ""

    def __call__(self, **answers: Exception | list[str] | None) -> object:
        """The exit code; a package has weaknesses, is not in the database (None) or raises."""
        service = self.script.service

        class Database:
            def query(self, asked: object) -> tuple[object, list]:
                answer = answers.get(asked.name, [])
                if isinstance(answer, Exception):
                    raise answer
                if answer is None:
                    return service.SkippedDependency(asked.name, "not there"), []
                make = service.VulnerabilityResult
                return asked, [make(each, "", [Version("3")], set()) for each in answer]

        self._patch(service, "PyPIService", lambda timeout: Database())
        code = 0
        try:
            self.script.main()
        except SystemExit as ended:
            code = ended.code
        self.printed = self._capsys.readouterr().out
        return code

    def excuse(self, *names: str, days: int = 9) -> None:
        until = datetime.date.today() + datetime.timedelta(days)
        rows = (f'[{name}]\nuntil = {until}\nreason = "x"\n' for name in names)
        self.script.KNOWN.write_text("".join(rows))


@pytest.fixture
def audit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: object) -> Iterator[Audit]:
    monkeypatch.syspath_prepend(str(SPEEDRUN))
    import audit

    monkeypatch.setattr(audit, "KNOWN", tmp_path / "known.toml")
    monkeypatch.setattr(audit, "installed", lambda: PACKAGES)
    (tmp_path / "known.toml").touch()
    yield Audit(audit, monkeypatch, capsys)
    sys.modules.pop("audit")


def test_a_weakness_fails(audit: Audit) -> None:
    assert audit(weak=["CVE-1", "CVE-2"])
    assert "WEAK: weak 1: CVE-1, fixed in 3" in audit.printed
    assert "; 2 not excused" in audit.printed


@pytest.mark.parametrize(("days", "fails"), [(10, False), (-1, True), (0, True)])
@pytest.mark.parametrize(("name", "answer"), [("CVE-1", ["CVE-1"]), ("weak", None)])
def test_an_excuse_has_an_end(
    audit: Audit, name: str, answer: object, days: int, fails: bool
) -> None:
    audit.excuse(name, days=days)
    assert bool(audit(weak=answer)) is fails


def test_an_excuse_needs_a_reason(audit: Audit) -> None:
    audit.script.KNOWN.write_text("[CVE-1]\nuntil = 2030-01-01\n")
    with pytest.raises(SystemExit, match=r"\[CVE-1\] needs until"):
        audit.script.excuses(audit.script.KNOWN)


def test_a_package_that_is_not_in_the_database_is_counted_and_fails(audit: Audit) -> None:
    assert audit(b=None)
    assert "UNKNOWN: b is not in the database" in audit.printed
    said = "2 of 3 packages audited: 0 weaknesses, 1 packages unknown; 1 not excused"
    assert said in audit.printed


@pytest.mark.parametrize("error", [requests.ConnectionError(), requests.ReadTimeout(), None])
def test_a_network_that_does_not_answer_passes(audit: Audit, error: Exception | None) -> None:
    error = error or audit.script.service.ConnectionError("timed out")
    assert audit(a=error) == 0
    assert audit.printed == "3 packages not audited: nobody answered\n"
    assert audit(b=error) == 0
    assert "nobody answered about 2 packages\n1 of 3" in audit.printed
    assert audit(a=["CVE-1"], b=error), "what was found before counts"


@pytest.mark.parametrize("unknown", [("a",), ("a", "b")])
def test_what_is_not_in_the_database_fails_though_the_network_drops_then(
    audit: Audit, unknown: tuple[str, ...]
) -> None:
    answers = dict.fromkeys(PACKAGES, requests.ConnectionError()) | dict.fromkeys(unknown)
    assert audit(**answers)
    assert "UNKNOWN: a is not in the database" in audit.printed
    left = len(PACKAGES) - len(unknown)
    assert f"nobody answered about {left} packages\n0 of 3 packages audited" in audit.printed
    audit.excuse(*unknown)
    assert audit(**answers) == 0


def test_a_mirror_without_the_database_passes(audit: Audit) -> None:
    assert audit(a=None, b=None, weak=None) == 0
    assert "3 packages not audited: who answered knows none of them" in audit.printed


@pytest.mark.parametrize("at", ["a", "b"])
@pytest.mark.parametrize(
    "error",
    [requests.JSONDecodeError("<html>", "", 0), requests.exceptions.SSLError("forged"), None],
)
def test_an_answer_that_is_not_the_databases_fails(
    audit: Audit, error: Exception | None, at: str
) -> None:
    error = error or audit.script.service.ServiceError("503")
    assert "not the database answered" in audit(**{at: error})


def test_it_does_not_wait_for_ever(audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit.script, "TIME_S", 0)
    assert audit() == 0 and "nobody answered" in audit.printed


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
