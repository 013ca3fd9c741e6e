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
    monkeypatch.setattr(sys, "argv", [str(example)])
    with pytest.raises(SystemExit, match=f"python examples/{example.name} MODEL"):
        runpy.run_path(str(example), run_name="__main__")
    monkeypatch.setattr(sys, "argv", [str(example), *arguments_of(example, cache, tmp_path / "q2")])
    runpy.run_path(str(example), run_name="__main__")
    opened = qat.load(tmp_path / "q2", device="cpu")
    assert torch.isfinite(opened(torch.arange(8)[None]).logits).all()


DRIVER = """
import runpy, sys
from accelerate import PartialState
from accelerate.utils import DistributedType

own = PartialState.__init__

def init(self, *args, **named):
    is_first = not PartialState._shared_state
    own(self, *args, **named)
    if is_first:
        self.distributed_type = DistributedType.MULTI_GPU

PartialState.__init__ = init
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program whose processes accelerate takes for those of GPUs: it divides models over these
alone, and on CPUs would leave them whole."""


def launch(place: Path, cache: str, *flags: str, driver: str | None = None) -> tuple[Path, dict]:
    """Run the trainer's example on two ranks; return the student and the state of its run."""
    example = ROOT / "examples" / "trainer.py"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    if driver is not None:
        (place / "driver.py").write_text(driver)
        command += [str(place / "driver.py")]
    ran = subprocess.run(
        [*command, str(example), *arguments_of(example, cache, place / "q2")],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    (state,) = (place / "q2-run").glob("checkpoint-*/trainer_state.json")
    return place / "q2", json.loads(state.read_text())


@pytest.mark.slow
def test_accelerate_launches_the_trainer_on_two_ranks(cache: str, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("ddp", "fsdp2")]
    for place in places:
        place.mkdir()
    # its launcher of several processes without mpirun is that of several GPUs
    flags = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    flags += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    whole, state = launch(places[0], cache, *flags)
    # two epochs, and twice the rows of one process in a step
    assert state["global_step"] == 2 * math.ceil(len(qat.CacheDataset(cache)) / (2 * 8))
    configuration = ("--config_file", str(ROOT / "examples" / "fsdp2.yaml"))
    divided, other = launch(places[1], cache, *configuration, driver=DRIVER)
    assert other["global_step"] == state["global_step"]
    assert [*(places[1] / "q2-run").glob("checkpoint-*/pytorch_model_fsdp.bin")]  # it was divided
    files = [each / "model.safetensors" for each in (whole, divided)]
    assert files[0].read_bytes() == files[1].read_bytes()
