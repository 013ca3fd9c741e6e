"""Jobs of a comparison: which begins when, and what one says that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from qat.bench import jobs
from qat.bench.jobs import Ended, run_processes


def test_a_job_waits_for_another_and_is_given_up_when_none_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits_for, begun, done = {"student": "conversion", "orphan": "nobody"}, [], set()

    class AtOnce:
        """A stand-in for a process, which has ended when it is first polled."""

        def __init__(self, job: str, *_rest: object) -> None:
            self.job = job
            begun.append(job)

        def is_over(self, _timeout_s: float) -> bool:
            return True

        def end(self) -> Ended:
            done.add(self.job)
            return Ended(self.job, 0, is_late=False)

    def placed(job: str, _busy: list[str]) -> str | None:
        return job if job not in waits_for or waits_for[job] in done else None

    monkeypatch.setattr(jobs, "_Running", AtOnce)
    every = ["student", "orphan", "conversion", "teacher"]
    run_processes(every, lambda _: True, progress=("running", "jobs"), placed=placed)
    assert begun == ["conversion", "student", "teacher"]
    begun.clear()
    done.clear()
    run_processes(every, lambda _: True, progress=("running", "jobs"), parallel=2, placed=placed)
    assert begun == ["conversion", "teacher", "student"]


def test_a_job_that_runs_out_of_memory_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom qat.bench.jobs import run_as_process\nfrom qat.config import Settings\n"
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
