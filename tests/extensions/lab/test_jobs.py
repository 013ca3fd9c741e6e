"""Jobs of a comparison: which begins when, and what one says that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from qat.extensions.lab import jobs
from qat.extensions.lab.jobs import Ended, run_processes


def test_jobs_start_in_order_and_only_so_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, most = [], []

    class AtOnce:
        """A stand-in for a process, which has ended when it is first polled."""

        def __init__(self, job: str, *_rest: object) -> None:
            self.job = job
            begun.append(job)

        def is_over(self, _timeout_s: float) -> bool:
            return True

        def end(self) -> Ended:
            return Ended(self.job, 0, is_late=False)

    def placed(job: str, busy: list[str]) -> str:
        most.append(len(busy))
        return job

    monkeypatch.setattr(jobs, "_Running", AtOnce)
    every = ["a", "b", "c", "d", "e"]
    run_processes(every, lambda _: True, progress=("running", "jobs"), parallel=2, placed=placed)
    assert begun == every and most == [0, 1, 0, 1, 0]
    run_processes(every, lambda _: False, progress=("running", "jobs"))
    assert begun == [*every, "a"]


def test_a_job_that_runs_out_of_memory_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom qat.config import Settings\n"
        "from qat.extensions.lab.jobs import run_as_process\n"
        "def do(_job):\n    raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "run_as_process(Settings, do)\n"
    )
    (tmp_path / "job.json").write_text("{}")
    command = [sys.executable, "-c", code, str(tmp_path / "job.json")]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.wait() == 1
    with process.stderr as said, process.stdin:
        lines = said.read().splitlines()
    assert lines[-1].startswith("qat: memory ran out; run fewer jobs side by side (--workers of")
    assert "Traceback (most recent call last):" in lines  # for the log
