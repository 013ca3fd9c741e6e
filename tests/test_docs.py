"""Pages that agree with each other and with the project."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS, *(ROOT / d / "README.md" for d in ("caches", "notebooks"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEMO_TIME = "bout three minutes on two CPU cores"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)", index))
    assert linked == {page.name for page in DOCS} - {"README.md"}
    assert "(docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/README.md", "docs/colab.md"])
def test_pages_name_the_oldest_python_and_torch(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (torch,) = (each for each in PROJECT["dependencies"] if each.startswith("torch>"))
    assert f"Python {PROJECT['requires-python'].replace('>=', '>= ')}" in text
    assert torch.replace(">=", " >= ") in text


def test_the_index_has_every_extra() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = index.partition("| extra | for |")[2]
    cells = " ".join(row.split("|")[1] for row in table.strip().splitlines())
    assert set(re.findall(r"`([\w-]+)`", cells)) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("page", ["README.md", "docs/colab.md", "qat/cli/demo.py"])
def test_the_demo_takes_the_same_time_everywhere(page: str) -> None:
    assert DEMO_TIME in (ROOT / page).read_text(encoding="utf-8")


def test_promises_name_tests_that_there_are() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    table = text.partition("| what is promised |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test
