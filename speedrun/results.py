"""Write speedrun/records/results.md, every measured figure of the records, and cards.md beside it.

    python speedrun/results.py
    python speedrun/results.py wishes    # how many wishes of other projects' users are served

`results.toml` beside this script says in words what each figure is, and in which order.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path

from cyclopts import App
from figures import record

from qat.extensions.lab.commands import current
from qat.extensions.lab.leaderboard import RecordEntry, by_device, by_figure, read_records
from qat.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("results.toml")
RECORDS = ROOT / "speedrun" / "records"
PAGE = RECORDS / "results.md"
CARDS = WORDS.with_name("cards.toml")
INTRO = """\
# What was measured

All figures that this project has measured, each with its goal and the command that measures it
again. Goals that were missed are marked. The page is written by one command and never by hand:

    python speedrun/results.py

A row is the newest value of a figure on a device. Older ones are in
[the records](README.md), and on one page with curves after
`qat report --leaderboard --out leaderboard.html`. `DIR` and `FILE` in a command are places of
yours. A commit stands behind a command whose script or flags are gone: `git show COMMIT:PATH`
prints the script.
{met} of the {bound} goals that are bounds are met.
"""
ENGINE = [
    f"engine_{model}{{}}_{way}_{figure}"
    for model in ("", "coder_")
    for way in ("exact", "default")
    for figure in ("top1", "kl")
]
"""Figures of an engine, whose name fills the gap: as exact as it computes, then by default."""
COLUMNS = ("figure", "value", "unit", "goal", "", "device", "record", "command")
BAR = "\\|"  # a bar inside a cell of Markdown
MET = {True: "met", False: "**missed**", None: ""}

app = App(help=__doc__)


@app.default
def main(*, out: Path = PAGE) -> None:
    """Write the page about all records to OUT, and that of cards to `cards.md` beside it."""
    write_atomically(out, page(RECORDS))
    write_atomically(out.with_name("cards.md"), cards(RECORDS))


def cards(records: Path) -> str:
    """Return the page of cards in Markdown."""
    from qat.extensions.lab.cards import page as page_of_cards  # imports a model's shape

    newest = newest_of(read_records(records)).values()
    return page_of_cards(records, CARDS, [entry for entries in newest for entry in entries])


@app.command
def wishes(
    table: Path = RECORDS / "2026-11-29_release" / "wishes.md", *, figures: Path | None = None
) -> None:
    """Count the rows of TABLE that are served in full; what they name as a proof must be there."""
    served = Counter()
    for line in table.read_text(encoding="utf-8").splitlines():
        if (found := re.match(r"\| (\d+) \| .* \| (full|partly|no) \| (.*) \|$", line)) is None:
            continue
        served[found[2]] += 1
        named = re.findall(r"`((?:tests|docs|speedrun)/[\w/.-]+)(?:::(\w+))?`", found[3])
        assert named or found[2] != "full", f"wish {found[1]} names nothing that shows it"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") or not test, test
    print(dict(served))
    record(figures, "ecosystem_wishes_served", served["full"], "wishes", ">= 36")


def page(records: Path) -> str:
    """The page in Markdown."""
    newest = newest_of(read_records(records))
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    topics = words["topics"]
    named = {name for topic in topics for name in topic["figures"]}
    named |= {part.format(name) for name in words["engines"]["rows"] for part in ENGINE}
    unnamed = {name: f"`{name}`" for name in newest if name not in named}
    others = {"title": "Others", "about": "Figures without a description.", "figures": unnamed}
    judged = [entry.figure.is_met for entries in newest.values() for entry in entries]
    intro = INTRO.format(met=judged.count(True), bound=len(judged) - judged.count(None))
    texts = [section(topic, newest) for topic in topics]
    texts += [engines(words["engines"], newest), section(others, newest)]
    return "\n".join([intro, *filter(None, texts)])


def engines(topic: dict, newest: dict[str, list[RecordEntry]]) -> str:
    """Heading, sentences and table of the engines that ran a student, a row each."""
    lines = []
    for name, words in topic["rows"].items():
        entries = [newest.get(part.format(name), [])[-1:] for part in ENGINE]
        values = [" ".join(digits(each.figure.value) for each in found) for found in entries]
        judged = [each for found in entries for each in found if each.figure.goal]
        if judged:
            met = MET[all(each.figure.is_met for each in judged)]
            record = f"{judged[0].day}_{judged[0].record}"
            cells = words, *values, met, f"[{judged[0].record}]({record})"
            lines.append(f"| {' | '.join(cells)} |")
    head = [topic["columns"], f"|---{'|---:' * len(ENGINE)}|---|---|"]
    return "\n".join([f"## {topic['title']}\n", topic["about"].strip(), "", *head, *lines, ""])


def newest_of(entries: list[RecordEntry]) -> dict[str, list[RecordEntry]]:
    """Return the newest entry of each figure on each device."""
    found: dict[str, list[RecordEntry]] = {}
    for of_device in by_device(entries).values():
        for name, in_order in by_figure(of_device).items():
            found.setdefault(name, []).append(in_order[-1])
    return found


def section(topic: dict, newest: dict[str, list[RecordEntry]]) -> str:
    """Heading, sentences and table of one topic; "" where nothing of it was measured."""
    lines = [
        row(words, entry)
        for name, words in topic["figures"].items()
        for entry in newest.get(name, [])
    ]
    if not lines:
        return ""
    head = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---|---|---|---|---|---|"]
    return "\n".join([f"## {topic['title']}\n", topic["about"].strip(), "", *head, *lines, ""])


def row(words: str, entry: RecordEntry) -> str:
    """One line of a table."""
    figure = entry.figure
    folder = f"{entry.day}_{entry.record}"
    spread = "" if not figure.spread else f" +- {digits(figure.spread, 2)}"
    cells = (
        words,
        f"{digits(figure.value)}{spread}",
        "" if figure.unit == "1" else figure.unit,
        figure.goal,
        MET[figure.is_met],
        figure.device,
        f"[{entry.record}]({folder})",
        figure.command and shown(figure.command),
    )
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def shown(command: str) -> str:
    """Return the cell of a command, with the last commit that had it if it is gone."""
    now, commit = current(command, ROOT)
    return f"`{now}`{commit and f' at `{commit}`'}"


def digits(value: float, significant: int = 4) -> str:
    """A few significant digits; thousands are grouped."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{significant}g}"


if __name__ == "__main__":
    app()
