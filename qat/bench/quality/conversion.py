"""One conversion that several jobs begin with, in a process of its own.

`python -m qat.bench.quality.conversion JOB.json` runs one, which ends when its standard input does.
"""

from pathlib import Path
from typing import ClassVar

import torch

from qat.bench.jobs import JobFiles, run_as_process
from qat.bench.quality.plan import Table, cache_dir, convert_config, student_dir
from qat.config import Settings
from qat.convert.convert import convert_checkpoint


class Conversion(JobFiles, Settings):
    """The teacher in the format of some recipes; it may calibrate on a cache."""

    module: ClassVar[str] = "qat.bench.quality.conversion"
    teacher: str
    convert: Table
    cache: Table
    """Settings of the cache."""
    out: Path
    """The directory of results."""
    device: str
    threads: int = 0
    """Of the CPU; 0 leaves them as they are."""

    @property
    def student(self) -> Path:
        """Where it lies when it is made, whole or not at all."""
        return student_dir(self.out, self.convert, self.cache)

    @property
    def label(self) -> str:
        """Name that its files share."""
        return f"convert-{self.student.name}"

    def make(self) -> None:
        """Convert, unless it was done."""
        if not self.student.exists():
            config = convert_config(self.convert, cache_dir(self.out, self.cache), self.device)
            convert_checkpoint(self.teacher, config, self.student)


def main(job: Conversion) -> None:
    """Convert with a share of the cores."""
    torch.set_num_threads(job.threads)
    job.make()


if __name__ == "__main__":
    run_as_process(Conversion, main)
