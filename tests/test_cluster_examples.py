"""The examples for clusters: their syntax, and the launches that they come to."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from qat.train.config import TrainConfig
from qat.train.launch import LaunchConfig

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
NODES = ("node7", "node9")
STUBS = {  # what a cluster has and this machine has not; the launcher shows what it was given
    "scontrol": "printf 'node7\\nnode9\\n'",
    "srun": 'shift; exec "$@"',
    "torchrun": 'printf "%s\\n" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"',
}
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal"),
    *("requeue", "open-mode"),
}
SKY = {"name", "num_nodes", "workdir", "resources", "volumes", "envs", "setup", "run"}
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "CMD"}


@pytest.fixture
def launched(tmp_path: Path):
    """Return the launcher's settings and qat's words that a script comes to, with stubs."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(words: list[str], **variables: str):
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        ran = subprocess.run(words, env={**path, **variables}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        shares_no_store, *given = ran.stdout.splitlines()
        assert shares_no_store == "1"
        launch = get_args_parser().parse_args(given)
        assert launch.module and launch.training_script == "qat" and launch.max_restarts > 0
        assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_backend) == ("2", "8", "c10d")
        assert launch.rdzv_endpoint == "node7:29500" and launch.rdzv_id
        return launch, launch.training_script_args

    return run


def assert_trains(words: list[str], student: str, cache: str, out: str) -> None:
    assert words[:2] == ["train", student]
    values = dict(zip(words[2::2], words[3::2], strict=True))
    assert values == {"--cache-dir": cache, "--out": out, "--resume": "auto"}
    flags = {"out"} | TrainConfig.model_fields.keys() | LaunchConfig.model_fields.keys()
    assert {word[2:].replace("-", "_") for word in values} <= flags


def test_the_batch_script_launches_a_rank_on_every_gpu(launched) -> None:
    script = CLUSTER / "train.sbatch"
    flags = re.findall(r"^#SBATCH --([\w-]+)(?:=\S+)?$", script.read_text(), re.M)
    assert {*flags} == SBATCH and script.read_text().count("#SBATCH") == len(flags)
    job = {"SLURM_JOB_NODELIST": "node[7,9]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    words = ["bash", str(script), "my student", "caches/mine", "runs/q2"]
    launch, train = launched(words, SLURM_JOB_ID="42", **job)
    assert launch.rdzv_id == "42"
    assert_trains(train, "my student", "caches/mine", "runs/q2")
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_task_launches_a_rank_on_every_gpu(launched, tmp_path: Path) -> None:
    task = yaml.safe_load((CLUSTER / "train.sky.yaml").read_text())
    assert task.keys() == SKY and task["resources"].keys() == {"accelerators", "use_spot"}
    assert subprocess.run(["bash", "-n", "-c", task["setup"]], check=False).returncode == 0
    (mounted,) = task["volumes"]
    run = task["run"].replace(f"cd {mounted}\n", f"cd {shlex.quote(str(tmp_path))}\n")
    assert run != task["run"]
    for rank, node in enumerate(NODES):
        variables = {**task["envs"], "SKYPILOT_NODE_IPS": "\n".join(NODES)}
        variables |= {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": str(rank)}
        launch, train = launched(["bash", "-c", run], SKYPILOT_NUM_GPUS_PER_NODE="8", **variables)
        assert launch.local_addr == node
        assert f"is_host={int(rank == 0)}" in launch.rdzv_conf.split(",")
        assert_trains(train, *(task["envs"][name] for name in ("STUDENT", "CACHE", "RUN")))


def test_the_image_copies_what_the_package_is_built_from() -> None:
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Containerfile").read_text(), flags=re.M)
    lines = [line.split(maxsplit=1) for line in text.replace("\\\n", " ").splitlines()]
    assert {name for name, _ in lines} == INSTRUCTIONS
    ((_, base),) = (line for line in lines if line[0] == "FROM")
    image, version = base.split(":")
    assert "/" not in image and version != "latest"
    copied = [words for name, given in lines if name == "COPY" for words in given.split()[:-1]]
    assert all((ROOT / each).exists() for each in copied)
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "qat", "checkpoints/tiny-qwen3"}
    assert {*copied} == needed  # those of tests/test_wheel.py
    for name, given in lines:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", given], check=False).returncode == 0
