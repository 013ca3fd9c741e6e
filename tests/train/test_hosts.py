"""Training on two hosts: the weights of two ranks on one host, also after a host was lost."""

import json
import socket
import subprocess
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest
from cli_case import call
from hosts_case import Host, two_hosts
from torchrun_case import LIMIT_S, launch, started
from train_case import config, flags, make_place

LOSE_A_HOST_ONCE = """
    if trainer.step == 5 and rank == 1 and not (place / "lost").exists():
        (place / "lost").touch()
        os.kill(os.getppid(), SIGKILL)
        os.kill(os.getpid(), SIGKILL)
"""
BATCH = {"batch_size": 2, "global_batch_size": 8}


def on_host(
    host: Host, first: Host, place: Path
) -> AbstractContextManager["subprocess.Popen[str]"]:
    """Start the launcher of one of two hosts as docs/running.md has it."""
    how = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3"]
    how += ["--rdzv-backend", "c10d", "--rdzv-id", "run"]
    how += ["--rdzv-endpoint", f"{first.address}:29500", "--local-addr", host.address]
    how += ["--rdzv-conf", f"is_host={int(host is first)}"]
    variables = {"GLOO_SOCKET_IFNAME": host.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    act, settings = LOSE_A_HOST_ONCE, config(place, **BATCH)
    return started(place, settings, how, act=act, enter=host.enter, variables=variables)


@pytest.mark.slow
def test_a_lost_host_comes_back_and_the_run_ends_as_on_one_host(tmp_path: Path) -> None:
    one, two = (make_place(tmp_path / name, layers=1) for name in ("one", "two"))
    with (
        two_hosts() as hosts,
        on_host(hosts[0], hosts[0], two) as first,
        on_host(hosts[1], hosts[0], two) as second,
    ):
        assert second.wait(LIMIT_S) < 0  # killed
        with on_host(hosts[1], hosts[0], two) as again:
            out, errors = first.communicate(timeout=LIMIT_S)
            assert first.returncode == 0, errors
            assert again.wait(LIMIT_S) == 0, again.stderr.read()
    (line,) = (line for line in errors.splitlines() if line.startswith("qat: "))
    assert "another rank is gone" in line and "[rank0]" not in errors  # no traceback of ours
    assert json.loads(out.splitlines()[-1])["steps"] == 6
    facts = json.loads((two / "run" / "run.json").read_text())
    assert [entry["step"] for entry in facts["resumed"]] == [4]
    alone = launch(one, config(one, **BATCH))
    assert alone.returncode == 0, alone.stderr
    for name in ("model.safetensors", "trainer/state.safetensors"):
        files = [place / "run/checkpoints/step-000006" / name for place in (one, two)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_host_that_does_not_come_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("qat.ranks.TIMEOUT", timedelta(milliseconds=200))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = make_place(tmp_path, layers=1)
    words = ["train", place / "student", *flags(place), "--out", place / "run"]
    for rank in (0, 1):
        launched = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**launched, "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        assert call(monkeypatch, *words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("qat: another rank is gone or cannot be reached")
    assert not (place / "run").exists()
