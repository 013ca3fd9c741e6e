"""Where things lie in a directory of results."""

from dataclasses import dataclass
from pathlib import Path

from qat.bench.quality.config import Table
from qat.bench.quality.plan import cache_key, conversion_key


@dataclass(frozen=True)
class Places:
    """The parts of one directory of results."""

    out: Path

    @property
    def shared(self) -> Path:
        """What all its rows have in common."""
        return self.out / "quality.json"

    @property
    def timing(self) -> Path:
        """Step times that set budgets."""
        return self.out / "timing.json"

    def cache(self, table: Table) -> Path:
        """The teacher cache of these settings."""
        return self.out / "caches" / cache_key(table)

    def student(self, convert: Table, cache: Table) -> Path:
        """The teacher converted by these settings, which may calibrate on that cache."""
        return self.out / "students" / conversion_key(convert, cache_key(cache))

    def job(self, label: str) -> Path:
        """What a job's process reads."""
        return self.out / "jobs" / f"{label}.json"

    def rows(self, label: str) -> Path:
        """What a finished job leaves."""
        return self.out / "rows" / f"{label}.json"

    def run(self, label: str) -> Path:
        """The training runs of a job."""
        return self.out / "runs" / label

    def log(self, label: str) -> Path:
        """What a job said."""
        return self.out / "logs" / f"{label}.log"
