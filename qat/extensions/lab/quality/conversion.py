"""A conversion that several jobs start from, in its own process.

`python -m qat.extensions.lab.quality.conversion JOB.json` runs one; it ends when its standard input
closes.
"""

from pathlib import Path
from typing import ClassVar, get_args

import torch

from qat.config import Settings
from qat.convert.checkpoint import convert_checkpoint
from qat.convert.shipping import Shipping
from qat.errors import ConfigError
from qat.export.config import TargetName
from qat.export.targets import shipping_to
from qat.extensions.lab.jobs import JobFiles, run_as_process
from qat.extensions.lab.quality.plan import FOR, Table, cache_dir, convert_config, student_dir


class Conversion(JobFiles, Settings):
    """The teacher in the format of some recipes, possibly calibrated on a cache."""

    module: ClassVar[str] = "qat.extensions.lab.quality.conversion"
    teacher: str
    convert: Table
    cache: Table
    """Settings of the cache."""
    out: Path
    """The directory of results."""
    device: str
    threads: int = 0
    """Number of CPU threads; 0 keeps the current number."""

    @property
    def student(self) -> Path:
        """The directory of the converted student, which is written atomically."""
        return student_dir(self.out, self.convert, self.cache)

    @property
    def label(self) -> str:
        """The name that its files share."""
        return f"convert-{self.student.name}"

    def make(self) -> None:
        """Convert the teacher, unless it is done."""
        if not self.student.exists():
            config = convert_config(self.convert, cache_dir(self.out, self.cache), self.device)
            convert_checkpoint(self.teacher, config, self.student, shipping_of(self.convert))


def shipping_of(table: Table) -> Shipping | None:
    """Return what the targets hold that `for`, a list of names, gives a conversion's table.

    Raises:
        ConfigError: it names no target.
    """
    names, known = table.get(FOR, []), get_args(TargetName)
    if not isinstance(names, list) or not set(names) <= set(known):
        raise ConfigError(
            f"for={names!r} of a conversion, expected a list of targets; choose among "
            f"{', '.join(known)}"
        )
    return shipping_to(names)


def main(job: Conversion) -> None:
    """Convert with this job's number of threads."""
    torch.set_num_threads(job.threads)
    job.make()


if __name__ == "__main__":
    run_as_process(Conversion, main)
