"""`qat report`: what runs and conversions came to, as one page, and as entries of a log."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from qat.files import described
from qat.hooks import extension

LOG, RECORDS = Path("speedrun/LOG.md"), Path("speedrun/records")


def report(
    *runs: Path,
    out: Path | None = None,
    log: Annotated[bool, Parameter(negative=())] = False,
    log_file: Path = LOG,
    leaderboard: Annotated[bool, Parameter(negative=())] = False,
    records: Path = RECORDS,
) -> dict[str, object]:
    """Write one self-contained HTML page, and its pictures as PNG, about RUNS.

    Args:
        runs: Directories made by `qat train` (runs), `qat convert` (checkpoints) or `qat eval
            --suite`, in any mix; or one made by `qat run` or `qat demo`, for all that it holds.
        out: The page; by default `report.html` in the first directory.
        log: Put an entry about each of RUNS, newest first, into the log too.
        log_file: The log: Markdown with a line `## Entries`.
        leaderboard: Instead of RUNS, one page of all records over time, per device.
        records: Where records are kept, for the leaderboard.
    """
    if leaderboard:
        return _leaderboard(runs, out, records)
    append_entry: Any = extension("qat.reports", "log") if log else None
    from qat.cli.inputs import check_inputs
    from qat.errors import ConfigError
    from qat.observe.runs import read_directory, read_exam, with_stages

    if not runs:
        raise ConfigError(
            "RUNS is missing, expected at least one run or converted checkpoint; for example: "
            "qat report runs/q2"
        )
    if len(runs) > 1 or not read_exam(runs[0]):
        for run in with_stages(runs):
            read_directory(run)
    out = out or runs[0] / "report.html"
    check_inputs(out=out.absolute().parent)
    if log and not log_file.is_file():
        raise ConfigError(
            f"log_file={log_file} {described(log_file)}, expected a log in Markdown; give "
            "--log-file FILE"
        )
    from qat.observe.page import write_report

    written = write_report(list(runs), out)
    found = dict(page=written.page, pictures=[str(path) for path in written.pictures])
    if not log:
        return found
    entries = [append_entry(log_file, run) for run in runs]
    return {**found, "log": log_file, "entries": entries}


def _leaderboard(runs: tuple[Path, ...], out: Path | None, records: Path) -> dict[str, object]:
    from qat.errors import ConfigError

    if runs or out is None:
        wrong = f"RUNS={runs[0]}" if runs else "no --out"
        raise ConfigError(
            f"{wrong} with --leaderboard, expected --records and --out alone; write --out page.html"
        )
    return {"page": extension("qat.reports", "leaderboard")(records, out)}
