"""The page of all measured figures."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_command_can_be_found() -> None:
    """Its scripts are there, or a commit that had them stands behind it."""
    rows = (ROOT / "speedrun" / "records" / "results.md").read_text(encoding="utf-8").splitlines()
    rows = [row for row in rows if row.startswith("|") and row.endswith("|")]
    found, missing = 0, []
    for row in rows:
        for command, commit in re.findall(r"`([^`]+)`( at `[0-9a-f]{7,}`)? \|$", row):
            folder = re.search(r"\]\((\d{4}-\d\d-\d\d_\w+)\) \|", row)
            for script in re.findall(r"(?<![\w/.])[\w-][\w/.-]*\.(?:py|sh)\b", command):
                places = (ROOT, ROOT / "speedrun" / "records" / folder[1])
                found += 1
                if not commit and not any((place / script).exists() for place in places):
                    missing.append(script)
    assert found > 100
    assert not missing
