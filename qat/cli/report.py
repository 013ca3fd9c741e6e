"""`qat report`: what runs and conversions came to, as one page."""

from pathlib import Path


def report(*runs: Path, out: Path | None = None) -> dict[str, object]:
    """Write one self-contained HTML page, and its pictures as PNG, about RUNS.

    Parameters
    ----------
    runs
        Directories made by `qat train` (runs) or `qat convert` (checkpoints), in any mix.
    out
        The page; by default `report.html` in the first directory.
    """
    from qat.errors import ConfigError
    from qat.report.page import write_report

    if not runs:
        raise ConfigError("no RUN was named; expected at least one run or converted checkpoint")
    written = write_report(list(runs), out or runs[0] / "report.html")
    return dict(page=written.page, pictures=[str(path) for path in written.pictures])
