"""Asks which installed packages have known weaknesses; fails on one that nobody has looked at.

What was looked at stands in audit_known.toml, with a reason and the day until which it holds.
Where nobody answers (no network, no database) a line says so, and that is no failure.

python speedrun/audit.py
"""

import datetime
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

KNOWN = Path(__file__).with_name("audit_known.toml")
COMMAND = [sys.executable, "-m", "pip_audit", "--format=json", "--progress-spinner=off"]
TIME_S = 180


class Weakness(NamedTuple):
    """One entry of the database about an installed package."""

    package: str
    version: str
    name: str
    fixed_in: str

    def __str__(self) -> str:
        """As a line."""
        mend = f"fixed in {self.fixed_in}" if self.fixed_in else "no version is fixed"
        return f"{self.package} {self.version}: {self.name}, {mend}"


def main() -> None:
    """Print what was found, and exit with 1 if some of it is not known."""
    answer = ask()
    found = None if answer is None else weaknesses(answer)
    if found is None:
        print("packages not audited: nobody answered")
        return
    excused, today = excuses(KNOWN), datetime.date.today()
    open_ones = [each for each in found if not excused.get(each.name, today) > today]
    for each in found:
        print(f"{'WEAK' if each in open_ones else 'known'}: {each}")
    print(f"packages audited: {len(found)} weaknesses, {len(open_ones)} of them not known")
    raise SystemExit(len(open_ones) > 0)


def ask() -> str | None:
    """What pip-audit says as JSON; None if it does not answer in time."""
    try:
        result = subprocess.run(
            [*COMMAND, "--timeout=5", "--skip-editable"],
            capture_output=True,
            text=True,
            timeout=TIME_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return result.stdout


def weaknesses(answer: str) -> list[Weakness] | None:
    """The weaknesses in pip-audit's answer; None if no package was looked up."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError):
        return None
    looked_up = [package for package in packages if "vulns" in package]
    if not looked_up:
        return None
    return [
        Weakness(package["name"], package["version"], v["id"], ", ".join(v["fix_versions"]))
        for package in looked_up
        for v in package["vulns"]
    ]


def excuses(path: Path) -> dict[str, datetime.date]:
    """Until when each weakness in a file is excused."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, excuse in values.items():
        if not isinstance(excuse.get("until"), datetime.date) or not excuse.get("reason"):
            raise SystemExit(f"{path.name}: [{name}] needs until = YYYY-MM-DD and a reason")
    return {name: excuse["until"] for name, excuse in values.items()}


if __name__ == "__main__":
    main()
