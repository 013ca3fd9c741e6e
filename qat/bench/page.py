"""Tables of results in Markdown."""

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """The table in Markdown; all columns but the first are numbers."""
    rule = ["---", *("---:" for _ in headings[1:])]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, rule, *body)]
    return "".join(f"| {' | '.join(row)} |\n" for row in escaped)
