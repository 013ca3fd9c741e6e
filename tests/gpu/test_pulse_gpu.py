"""The pulse on CUDA: times by the device's clock, memory, and what NVML tells."""

import time

import pytest
import torch

from qat.backend import device as backends
from qat.logs import read_json_lines
from qat.ranks import ALONE
from qat.train.pulse import Pulse

pytestmark = pytest.mark.gpu
N, STEPS = 4096, 20


def test_a_heartbeat_tells_what_the_device_does(tmp_path) -> None:
    backend = backends.select("cuda")
    matrix = torch.randn(N, N, device="cuda")
    matrix = torch.tanh(matrix @ matrix)  # the library is loaded
    with Pulse(tmp_path, backend, ALONE, stall_s=600.0, flops_share=None) as pulse:
        before = time.perf_counter()
        for step in range(1, STEPS + 1):
            for _ in range(10):
                matrix = torch.tanh(matrix @ matrix)
            pulse.stepped(step, 100)
        backend.synchronize()
        seconds = (time.perf_counter() - before) / STEPS
        pulse.beat(STEPS, loss_nats=1.0, grad_norm=1.0, facts={})
    (line,) = read_json_lines(tmp_path / "heartbeat-rank0.jsonl")
    # the host runs ahead of the device; the steps' ends are the device's all the same
    assert line["step_s"] == pytest.approx(seconds, rel=0.1)
    assert 0.5 * seconds < line["step_s_p50"] < 1.5 * seconds
    assert line["mem_alloc_mib"] >= N * N * 4 / 2**20 <= line["mem_reserved_mib"]
    assert line["mem_reserved_gib"] == line["mem_reserved_mib"] / 1024
    assert line["alloc_retries"] >= 0 and line["alloc_failures"] >= 0
    assert line["mem_alloc_gib"] == pytest.approx(line["mem_alloc_mib"] / 1024)


def test_noting_a_step_does_not_wait_for_the_device(tmp_path) -> None:
    backend = backends.select("cuda")
    with Pulse(tmp_path, backend, ALONE, stall_s=600.0, flops_share=None) as pulse:
        for step in range(1, 100):  # the first events are made
            pulse.stepped(step, 1)
        backend.synchronize()
        before = time.perf_counter()
        for step in range(100, 1100):
            pulse.stepped(step, 1)
        assert (time.perf_counter() - before) / 1000 < 1e-4


def test_the_driver_tells_load_power_and_temperature() -> None:
    found = backends.select("cuda").health()
    assert 5 < found["gpu_temp_c"] < 110 and 10 < found["gpu_power_w"] < 2000
    assert 0 <= found["gpu_util_pct"] <= 100
