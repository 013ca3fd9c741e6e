"""Each example runs on the embedded teacher, in no more lines than one reads at a glance."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qat
from qat.cli import run_verb

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEACHER = str(ROOT / "checkpoints" / "tiny-qwen3")
MOST_LINES = 25


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("examples") / "cache"
    words = ["--num-sequences", "40", "--sequence-length", "32", "--out", str(out)]
    run_verb(["cache", "--teacher", TEACHER, "--data", "stdlib", *words])
    return str(out)


def arguments_of(example: Path, cache: str, out: Path) -> list[str]:
    """The words that the example's first line names."""
    known = {"MODEL": TEACHER, "CACHE": cache, "OUT": str(out)}
    usage = example.read_text(encoding="utf-8").splitlines()[0].rpartition(".py ")[2]
    return [known[word] for word in usage.strip('."').split()]


NEEDS = {"peft_lora": "peft", "trl_distillation": "trl"}
"""The library that an example is for, where not everybody has it."""


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: Path
) -> None:
    pytest.importorskip(NEEDS.get(example.stem, "torch"))
    assert len(example.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    monkeypatch.setattr(sys, "argv", [str(example), *arguments_of(example, cache, tmp_path / "q2")])
    runpy.run_path(str(example), run_name="__main__")
    opened = qat.load(tmp_path / "q2", device="cpu")
    assert torch.isfinite(opened(torch.arange(8)[None]).logits).all()


@pytest.mark.slow
def test_accelerate_launches_the_trainer_on_two_ranks(cache: str, tmp_path: Path) -> None:
    example = ROOT / "examples" / "trainer.py"
    # its launcher of several processes without mpirun is that of several GPUs
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    command += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", str(example)]
    ran = subprocess.run(
        [*command, *arguments_of(example, cache, tmp_path / "q2")],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "q2" / "model.safetensors").exists()
    rows = len(qat.CacheDataset(cache))
    (state,) = (tmp_path / "q2-run").glob("checkpoint-*/trainer_state.json")
    # two epochs, and twice the rows of one process in a step
    assert json.loads(state.read_text())["global_step"] == 2 * math.ceil(rows / (2 * 8))
