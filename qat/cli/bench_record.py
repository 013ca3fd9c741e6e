"""`qat bench record`: keeps a result where records are kept."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

RECORDS = Path("speedrun/records")


def record(
    slug: str,
    /,
    *,
    from_: Annotated[Path, Parameter(name="--from")],
    records: Path = RECORDS,
    date: str = "",
) -> dict[str, object]:
    """Freeze a result into RECORDS/DATE_SLUG: recipe, raw samples, environment, figures, page.

    Args:
        slug: two or three lower-case words, joined by hyphens.
        from_: directory of results; every case needs three samples or runs at least.
        records: where records are kept.
        date: day of the measurement as YYYY-MM-DD; today by default.
    """
    from qat.bench.record import write_record

    return {"record": write_record(slug, from_, records, date or None)}
