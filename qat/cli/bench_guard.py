"""`qat bench guard`: a developer's look at what became slower on the CPU."""

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from qat.cli.tables import wide_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from qat.bench.guard.run import Guarded
    from qat.bench.stats import Interval

WIDTH = 120


def guard(*, update: Annotated[bool, Parameter(negative=())] = False) -> dict[str, object]:
    """Time parts of the CPU's work beside frozen twins; say what is over 15 % slower than it was.

    Always exits with 0: a shared machine's clock decides nothing. Takes half a minute at most.

    Args:
        update: let what was measured be what later runs are held against.
    """
    from qat.bench.guard.run import run_guard, write_ratios
    from qat.bench.results import cpu_name

    found = run_guard()
    wide_console(WIDTH).print(guard_table(found))
    if update:
        write_ratios(found, cpu_name())
    slower = [each.name for each in found if each.verdict == "slower"]
    changes = {each.name: round(each.change, 3) for each in found if each.change}
    return {"slower": slower, "changes": changes}


def guard_table(found: "Sequence[Guarded]") -> "Table":
    """A row a part: times, their ratio with its interval, the committed one, the verdict."""
    from rich.table import Table

    table = Table("Part", title="Our time over a frozen twin's, now and as committed")
    for heading in ("Ours ms", "Twin ms", "Ratio now", "Committed", "Change", "CV"):
        table.add_column(heading, justify="right")
    table.add_column("Verdict")
    for each in found:
        table.add_row(
            each.name,
            f"{1e3 * each.ours_s:.3f}",
            f"{1e3 * each.twin_s:.3f}",
            _interval(each.ratio),
            _interval(each.committed) if each.committed else "-",
            f"{each.change:.2f}" if each.change else "-",
            f"{each.variation:.1%}",
            each.verdict,
        )
    return table


def _interval(found: "Interval") -> str:
    return f"{found.median:.3f} [{found.low:.3f}, {found.high:.3f}]"
