"""The backend's facts about a CPU, and the restoring of seeds and generator states."""

import resource

import pytest
import torch

from qat.backend import base
from qat.backend import device as backend
from qat.errors import ConfigError
from qat.process import is_out_of_memory


def test_cpu_computes_in_float32_unless_told() -> None:
    cpu = backend.select("cpu")
    assert cpu.dtype("auto") == torch.float32
    assert cpu.dtype("bf16") == torch.bfloat16
    assert cpu.name() == "cpu"
    cpu.synchronize()


def test_matmul_precision_holds_for_the_block_only() -> None:
    cpu, before = backend.select("cpu"), torch.get_float32_matmul_precision()
    with cpu.matmul_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_autocast_lowers_matmuls_and_float32_means_nothing() -> None:
    cpu, x = backend.select("cpu"), torch.ones(2, 2)
    with cpu.autocast(torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    with cpu.autocast(torch.float32):
        assert (x @ x).dtype == torch.float32


def test_generator_state_comes_back() -> None:
    cpu = backend.select("cpu")
    (generator,) = cpu.generators().values()
    state = generator.get_state()
    first = torch.rand(4)
    generator.set_state(state)
    assert torch.equal(torch.rand(4), first)


def test_seeded_block_leaves_no_trace() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with backend.seeded(7):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with backend.seeded(7):
        assert torch.equal(torch.rand(2), inside)


def test_only_running_out_of_memory_is_running_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("full"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_devices_and_dtypes_that_are_not_there_are_mistakes_of_the_user() -> None:
    assert backend.select("auto").device.type == "cpu"
    for device, message in (
        ("cuda", "device=cuda, but 0 CUDA devices are visible here; use"),
        ("cpu:1", "device=cpu:1, but 1 CPU devices are visible"),
        *((name, f"device={name} is unknown; use auto, cpu") for name in ("gpu", "cuda:first")),
        ("meta", "device=meta is unknown; use auto, cpu"),
    ):
        with pytest.raises(ConfigError, match=message):
            backend.select(device)
    with pytest.raises(ConfigError, match="dtype=tf32, but cpu has no such units; use --dtype fp"):
        backend.select("cpu").dtype("tf32")


def test_process_memory_is_counted_from_where_one_says() -> None:
    cpu = backend.select("cpu")
    block = torch.ones(2**26)
    assert cpu.memory_use().peak_gib >= cpu.memory_use().held_gib - 0.01
    held = cpu.memory_use().held_gib
    del block
    cpu.free_memory()
    cpu.reset_peak_memory()
    assert cpu.memory_use().peak_gib < held - 0.2


def test_memory_is_limited_for_the_block_only() -> None:
    cpu = backend.select("cpu")
    with cpu.limit_memory(cpu.memory_use().held_gib + 0.25):
        assert torch.ones(2**24).sum() == 2**24
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**28)
        assert is_out_of_memory(caught.value)
    assert torch.empty(2**28).shape == (2**28,)


def test_a_session_on_a_cpu_runs_out_of_memory_before_the_machine_does(monkeypatch) -> None:
    cpu = backend.select("cpu")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr("qat.backend.cpu.available_gib", lambda: 0.25)
    with cpu.session(None):
        assert torch.ones(2**24).sum() == 2**24
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**28)
        assert is_out_of_memory(caught.value)
        limit = resource.getrlimit(resource.RLIMIT_DATA)
        with cpu.limit_memory(cpu.memory_use().held_gib + 0.2):
            assert resource.getrlimit(resource.RLIMIT_DATA) <= limit
        assert resource.getrlimit(resource.RLIMIT_DATA) == limit
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("gib", [0.001, 1e6])
def test_an_impossible_memory_limit_is_a_mistake_of_the_user(gib: float) -> None:
    with pytest.raises(ConfigError, match="GiB can be had; choose a limit between them"):
        with backend.select("cpu").limit_memory(gib):
            pass


def test_work_spreads_over_all_gpus_where_none_is_named(monkeypatch) -> None:
    devices = backend.devices
    assert devices("cpu") == ("cpu",) and devices("cuda:1") == ("cuda:1",)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert devices("auto") == devices("cuda") == ("cuda:0", "cuda:1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert devices("auto") == ("auto",)


@pytest.mark.parametrize("workers", [1, 3])
def test_work_side_by_side_keeps_its_order_and_divides_no_operation(workers: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def work(item: int) -> tuple[float, int]:
        return 1 / item, torch.get_num_threads()

    with base.side_by_side(workers) as map_:
        found = list(map_(work, range(1, 20)))
    assert found == [(1 / item, 1) for item in range(1, 20)]
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), base.side_by_side(workers) as map_:
        list(map_(work, [1, 0]))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
