"""Pages that agree with each other and with the project."""

import re
import tomllib
from pathlib import Path

import pytest

from qat.observe.leaderboard import read_records

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*FRONT, *DOCS, *(ROOT / d / "README.md" for d in ("caches", "notebooks"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RECORDS = ROOT / "speedrun" / "records"
QUOTED = {  # figure: the pages that quote it, and how; docs/results.md is generated and has all
    "fast_path/frozen_candidates_tok_s": ("docs/bench.md fast_path", "{:,.0f}"),
    "fast_path/frozen_exact_tok_s": ("docs/bench.md fast_path", "{:,.0f}"),
    "fast_path/frozen_exact_ckpt_tok_s": ("docs/bench.md fast_path", "{:,.0f}"),
    "fast_path/mlp_only_tok_s": ("docs/bench.md fast_path", "{:,.0f}"),
    "fast_path/over_reference": ("CHANGELOG.md", "{:.0f}"),
    "fast_path/max_batch_16gib": ("fast_path", "{:,.0f}"),
    "fast_path/cache_tok_s": ("fast_path", "{:,.0f}"),
    "fast_path/kernel_roofline_min": ("fast_path", "{:.3f}"),
    "generate/generate_over_bf16": ("docs/generate.md generate", "{:.2f}"),
    "generate/generate_tok_s": ("CHANGELOG.md docs/generate.md", "{:.0f}"),
    "long_runs/kills_survived": ("CHANGELOG.md long_runs", "{:.0f}"),
    "spine/cache_bytes_top64": ("caches/README.md", "{:.1f}"),
    "spine/cache_logprob_error_top64": ("caches/README.md spine", "{:.3f}"),
    "spine/cache_logprob_error_top32": ("caches/README.md", "{:.3f}"),
    "spine/stories15m_untruncated_kl_trained": ("spine", "{:.4f}"),
}
ENTRIES = read_records(RECORDS)
DEMO_TIME = "three to five minutes on two CPU cores"


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
    table = text.partition("| threat |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("quoted", QUOTED)
def test_pages_quote_figures_as_they_were_measured(quoted: str) -> None:
    """And where one misses its goal, its line says so and does not print it bold."""
    entry = [e for e in ENTRIES if f"{e.record}/{e.figure.figure}" == quoted][-1]
    pages, form = QUOTED[quoted]
    value = form.format(entry.figure.value)
    for page in pages.split():
        path = ROOT / page if "." in page else record_of(entry.record) / "README.md"
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if re.search(rf"(?<![\d.,]){value}(?!\d)", line)]
        assert found, f"{page} does not say {value}"
        if entry.figure.is_met is False:
            assert all("missed" in line and f"**{value}" not in line for line in found), found


def test_results_are_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number of that page is typed: `python speedrun/results.py` makes it of the records."""
    monkeypatch.syspath_prepend(str(ROOT / "speedrun"))
    import results

    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == results.page(RECORDS)


def test_results_have_every_figure_and_mark_every_miss() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    newest = {(e.figure.figure, e.figure.device): e.figure for e in ENTRIES}.values()
    assert page.count("](../speedrun/records/2") == len(newest)
    assert page.count("**missed**") == sum(figure.is_met is False for figure in newest)


def test_readme_explains_before_it_measures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) - 2 <= 8
    assert sum(map(len, rows)) <= 0.25 * len(text)


def test_the_page_of_the_code_names_files_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:qat|tests)/[\w/.]+)`", text))
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("record", sorted({entry.record for entry in ENTRIES}))
def test_a_record_says_where_a_script_went_that_is_gone(record: str) -> None:
    commands = [entry.figure.command for entry in ENTRIES if entry.record == record]
    named = set(re.findall(r"speedrun/\w+\.(?:py|sh)", " ".join(commands)))
    gone = {script for script in named if not (ROOT / script).exists()}
    page = (record_of(record) / "README.md").read_text(encoding="utf-8") if gone else ""
    assert [script for script in gone if f"`{script}`" not in page] == []


def record_of(name: str) -> Path:
    """The directory of a record, by its name without the day."""
    (found,) = RECORDS.glob(f"*_{name}")
    return found
