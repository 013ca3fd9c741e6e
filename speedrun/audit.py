"""Asks which installed packages have known weaknesses; fails on one that nobody has looked at.

What was looked at stands in audit_known.toml, with a reason and the day until which it holds: a
weakness by its name, a package that the database does not know by the package's. Packages pass that
nobody answered about, because the network does not or does not any more, and all of them where who
answers knows no single one. What was answered before is judged. Without pip-audit, or where
something else answers than the database, this fails.

python speedrun/audit.py
"""

import datetime
import importlib.metadata
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import requests
from packaging.version import Version
from pip_audit import _service as service

KNOWN = Path(__file__).with_name("audit_known.toml")
OWN = "qat-distill"
TIME_S = 180  # time limit in seconds; packages not asked about by then count as not answered


class Weakness(NamedTuple):
    """One entry of the database about an installed package."""

    package: str
    version: str
    name: str
    fixed_in: str

    def __str__(self) -> str:
        """Return the weakness as one line."""
        mend = f"fixed in {self.fixed_in}" if self.fixed_in else "no version is fixed"
        return f"{self.package} {self.version}: {self.name}, {mend}"


class Answers(NamedTuple):
    """The answers of the database about all packages; the first three lists are disjoint."""

    looked_up: list[str]
    not_known: list[str]  # packages that it has no entry of
    not_asked: list[str]  # packages left when the network stopped answering
    found: list[Weakness]


def main() -> None:
    """Print what was found, and exit with 1 if some of it is not known."""
    packages = installed()
    answers = ask(service.PyPIService(timeout=5), packages)
    if answers.not_asked == [*packages]:
        print(f"{len(packages)} packages not audited: nobody answered")
        return
    if answers.not_known == [*packages]:  # a mirror of the packages without the database
        print(f"{len(packages)} packages not audited: who answered knows none of them")
        return
    excused, today = excuses(KNOWN), datetime.date.today()
    names = [*(each.name for each in answers.found), *answers.not_known]
    open_ones = [name for name in names if not excused.get(name, today) > today]
    for each in answers.found:
        print(f"{'WEAK' if each.name in open_ones else 'known'}: {each}")
    for name in answers.not_known:
        print(f"{'UNKNOWN' if name in open_ones else 'known'}: {name} is not in the database")
    if answers.not_asked:
        print(f"nobody answered about {len(answers.not_asked)} packages")
    print(
        f"{len(answers.looked_up)} of {len(packages)} packages audited: {len(answers.found)} "
        f"weaknesses, {len(answers.not_known)} packages unknown; {len(open_ones)} not excused"
    )
    raise SystemExit(len(open_ones) > 0)


def installed() -> dict[str, Version]:
    """The packages of this environment; a build of its own (`+cpu`) counts as its release."""
    found = {each.name: Version(each.version) for each in importlib.metadata.distributions()}
    return {name: Version(found[name].public) for name in sorted(found) if name != OWN}


def ask(database: service.VulnerabilityService, packages: dict[str, Version]) -> Answers:
    """Look up one package after the other until the network does not answer.

    Raises:
        SystemExit: something answered that is not the database, or the database is out of order.
    """
    answers = Answers([], [], [], [])
    end = time.monotonic() + TIME_S
    left = list(packages)
    try:
        while left and time.monotonic() < end:
            name = left[0]
            asked, found = database.query(service.ResolvedDependency(name, packages[name]))
            left.pop(0)
            (answers.not_known if asked.is_skipped() else answers.looked_up).append(name)
            for each in found:
                fixed_in = ", ".join(map(str, each.fix_versions))
                answers.found.append(Weakness(name, str(packages[name]), each.id, fixed_in))
    except service.ConnectionError:
        pass
    except (requests.exceptions.SSLError, requests.JSONDecodeError, service.ServiceError) as error:
        told = f"{error.__cause__ or error}"
        raise SystemExit(f"packages not audited: not the database answered: {told}") from error
    except (requests.ConnectionError, requests.Timeout):
        pass
    answers.not_asked.extend(left)
    return answers


def excuses(path: Path) -> dict[str, datetime.date]:
    """Return the date until which each weakness or unknown package in a file is excused."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, excuse in values.items():
        if not isinstance(excuse.get("until"), datetime.date) or not excuse.get("reason"):
            raise SystemExit(f"{path.name}: [{name}] needs until = YYYY-MM-DD and a reason")
    return {name: excuse["until"] for name, excuse in values.items()}


if __name__ == "__main__":
    main()
