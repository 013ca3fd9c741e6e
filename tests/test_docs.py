"""Pages that agree with each other and with the project."""

import re
import tomllib
from pathlib import Path

import pytest

from qat.extensions.lab.leaderboard import read_records

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")]
EXTENSIONS = sorted((ROOT / "qat" / "extensions").glob("*/README.md"))
PAGES = [
    *FRONT,
    ROOT / "llms.txt",
    *DOCS,
    *EXTENSIONS,
    *(ROOT / d / "README.md" for d in ("caches", "notebooks", "speedrun/records")),
    ROOT / "speedrun" / "records" / "results.md",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECORDS = ROOT / "speedrun" / "records"
ENTRIES = read_records(RECORDS)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
        for link in links:
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target), (page, link)


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)", index))
    assert linked == {page.name for page in DOCS} - {"README.md"}
    assert all(f"(../{page.relative_to(ROOT).as_posix()})" in index for page in EXTENSIONS)
    for_programs = (ROOT / "llms.txt").read_text(encoding="utf-8")
    every = [*FRONT, *DOCS, *EXTENSIONS]
    assert all(f"({page.relative_to(ROOT).as_posix()})" in for_programs for page in every)
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_index_has_every_extra() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = index.partition("| extra | for |")[2]
    cells = " ".join(row.split("|")[1] for row in table.strip().splitlines())
    assert set(re.findall(r"`([\w-]+)`", cells)) == set(PROJECT["optional-dependencies"])


def test_promises_name_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = text.partition("| threat |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
    faults = (RECORDS / "2026-11-28_real_models" / "points.toml").read_text(encoding="utf-8")
    for file, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", faults):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.slow  # asks git for scripts that are gone, and counts a model's work
def test_results_are_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python speedrun/results.py` makes both pages from the records, and marks every miss."""
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    import results

    page = (RECORDS / "results.md").read_text(encoding="utf-8")
    assert page == results.page(RECORDS)
    results.wishes()  # every proof that the table names is there
    assert (RECORDS / "cards.md").read_text(encoding="utf-8") == results.cards(RECORDS)
    # what an engine computed is one row of all its figures
    named = tomllib.loads(results.WORDS.read_text(encoding="utf-8"))["engines"]["rows"]
    engines = {part.format(name): name for name in named for part in results.ENGINE}
    rows: dict[object, bool] = {}  # whether something in it is missed
    newest = {(e.figure.figure, e.figure.device): e.figure for e in ENTRIES}
    for (name, device), figure in newest.items():
        at = engines.get(name, (name, device))
        rows[at] = rows.get(at, False) or figure.is_met is False
    assert page.count("](2") == len(rows)
    assert page.count("**missed**") == sum(rows.values())


def test_the_page_of_the_code_names_files_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:qat|tests)/[\w/.]+)`", text))
    assert [path for path in paths if not (ROOT / path).exists()] == []
