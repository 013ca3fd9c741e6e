"""`qat bench targets`: kernels are compiled for GPUs that are only described."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qat
from qat.backend.device import on
from qat.errors import BenchError, ConfigError
from qat.extensions.lab.config import ARCHITECTURES, TargetsConfig
from qat.extensions.lab.kernels import targets as module
from qat.extensions.lab.kernels.described import GPUS, STAND_IN, Gpu, standing_in
from qat.extensions.lab.kernels.resources import Compiled
from qat.extensions.lab.kernels.targets import FALLBACKS, TargetsReport, run_targets

pytest.importorskip("triton")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is here answers")
T4, H100 = GPUS[0], GPUS[4]
ROOT = Path(qat.__file__).parent
REACHED, LEFT_OUT = "kernels.glu._forward_kernel", "kernels.attention._forward_kernel"


def report(*, failures: list[str] | None = None, kernels: tuple[str, ...] = ()) -> TargetsReport:
    """Two GPUs; on the T4 one kernel is left to its fallback."""
    small, large = Compiled(REACHED, 4, 32, 0, 2048, 75), Compiled(REACHED, 8, 28, 0, 512, 90)
    tile = Compiled(LEFT_OUT, 4, 255, 0, 49_152, 90)
    return TargetsReport(
        (T4, H100),
        (LEFT_OUT, REACHED, *kernels),
        {T4: [small], H100: [small, large, tile]},
        {T4: failures or [], H100: []},
    )


def test_a_row_holds_the_most_that_a_kernel_takes() -> None:
    of_attention, of_glu = report().rows()
    assert of_attention == {
        "case": LEFT_OUT,
        "sm_90": "255 / 0 / 48",
        "fallback": "PyTorch's attention",
    }
    assert of_glu == {"case": REACHED, "sm_75": "32 / 0 / 2", "sm_90": "32 / 0 / 2"}
    *_, line = report().page().splitlines()
    assert line == f"| `{REACHED}` | 32 / 0 / 2 | 32 / 0 / 2 |  |"


def test_gpus_count_without_failures_and_unreached_kernels() -> None:
    whole, failed = report(), report(failures=["slots, 256: out of resource"])
    unreached = report(kernels=("kernels.new._kernel",))
    assert [each.figures()[0]["value"] for each in (whole, failed, unreached)] == [2, 1, 0]
    spills = {T4: [Compiled(REACHED, 4, 255, 8, 0, 75)]}
    spilling = replace(whole, compiled={**whole.compiled, **spills})
    assert spilling.figures()[0]["value"] == 1 and REACHED in spilling.problems(T4)[0]
    whole.check()
    with pytest.raises(BenchError, match="sm_75.*slots, 256: out of resource"):
        failed.check()
    with pytest.raises(BenchError, match=r"2 problems.*kernels\.new\._kernel"):
        unreached.check()


def test_the_flag_names_the_gpus() -> None:
    assert tuple(gpu.architecture for gpu in GPUS) == ARCHITECTURES
    assert TargetsConfig().architectures == ARCHITECTURES
    with pytest.raises(ConfigError, match="sm_61.*choose among sm_75"):
        TargetsConfig.parse({"only": "sm_61"}, "flags")


def test_interpreted_kernels_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "interprets", lambda: True)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        run_targets(TargetsConfig())


@needs_no_gpu
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.architecture)
def test_a_described_gpu_answers_as_one_that_is_here(gpu: Gpu) -> None:
    with standing_in(gpu, lambda compiled: None):
        made = torch.zeros(4, 8, device=STAND_IN)
        assert made.is_cuda and made[1:].device == STAND_IN == (made @ made.T).device
        assert on(STAND_IN).shared_memory_bytes() == gpu.shared_bytes
        assert on(STAND_IN).name() == gpu.name
        half = torch.float16 if gpu is T4 else torch.bfloat16
        assert on(STAND_IN).dtype("auto") == half
        assert not torch.zeros(2).is_cuda
    assert not torch.zeros(2, device="meta").is_cuda


def test_kernels_are_where_they_are_looked_for() -> None:
    for path in ROOT.rglob("*.py"):
        if "\n@triton.jit" in path.read_text(encoding="utf-8"):
            assert path.parent.name == "kernels", path


def compiled(*arguments: str) -> subprocess.CompletedProcess:
    """Run Python in a process that compiles kernels instead of interpreting them."""
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT.parent), str(Path(__file__).parents[2])])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, check=False, env=known | {"PYTHONPATH": path},
    )  # fmt: skip


PLANTED = """
import triton, torch
from broken_kernel import launch
from large_kernel import squared
from qat.extensions.lab.kernels.described import GPUS, STAND_IN, NotCompiledError, standing_in
found = []
for room in (1024, GPUS[4].shared_bytes):
    with standing_in(GPUS[4]._replace(shared_bytes=room), found.append):
        x = torch.zeros(64, 64, device=STAND_IN, dtype=torch.float16)
        for run in (lambda: launch({"x": x}, {"N": 10}), lambda: squared(x)):
            try:
                run()
            except (NotCompiledError, triton.OutOfResources) as error:
                print(type(error).__name__, error)
for each in found:
    print(each.kernel, each.warps, each.registers > 0, each.shared > 1024, each.target)
"""


@pytest.mark.slow  # another process, which imports Triton's compiler
@needs_no_gpu
def test_what_does_not_compile_or_fit_is_noticed() -> None:
    broken, large, again, fitting = compiled("-c", PLANTED).stdout.splitlines()
    assert broken == again and broken.startswith("NotCompiledError broken_kernel._kernel")
    assert large.startswith("OutOfResources") and "shared memory of large_kernel._kernel" in large
    assert fitting == "large_kernel._kernel 4 True True 90"


@pytest.mark.slow  # minutes: all kernels for all GPUs
@needs_no_gpu
def test_every_kernel_runs_on_every_gpu_that_it_is_chosen_on(tmp_path: Path) -> None:
    page, figures = tmp_path / "kernels.md", tmp_path / "figures.jsonl"
    ran = compiled(
        "-m", "qat", "bench", "targets", "--page", str(page), "--figures", str(figures)
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert json.loads(figures.read_text(encoding="utf-8"))["value"] == len(GPUS)
    rows = [line.strip("| ").split(" | ") for line in page.read_text("utf-8").splitlines()[2:]]
    cells = {row[0].strip("`"): row[1 : len(GPUS) + 1] for row in rows}
    # a fallback that is never needed is out of date
    assert {name for name, row in cells.items() if "-" in row} == set(FALLBACKS)
    assert all(any(cell != "-" for cell in row) for row in cells.values())
