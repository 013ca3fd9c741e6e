"""torch_tpu's side of the protocol, on a CPU that stands in for a TPU. Nothing here ran on one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from train_case import config, make_trainer
from xla_case import make_short_place

from qat.backend import device as backend
from qat.backend import tpu as backend_tpu
from qat.errors import ConfigError
from qat.models.devices import device_called
from qat.train.config import TrainConfig
from qat.train.step import check_dtype

CPU = torch.device("cpu")


class StandIn:
    """What `torch.accelerator` and `torch.tpu` would say of a TPU with 16 GiB."""

    def __init__(self) -> None:
        self.waits = 0
        self.generator = torch.Generator()
        self.default_generators = [self.generator]
        self.device: SimpleNamespace | None = SimpleNamespace(type="tpu")

    def current_accelerator(self, check_available: bool = False) -> SimpleNamespace | None:
        assert check_available
        return self.device

    def synchronize(self) -> None:
        self.waits += 1

    def current_device_index(self) -> int:
        return 0

    def memory_allocated(self) -> int:
        return 2 * 2**30

    def max_memory_allocated(self) -> int:
        return 3 * 2**30

    def get_memory_info(self) -> tuple[int, int]:
        return 13 * 2**30, 16 * 2**30

    def _get_cache_misses(self) -> int:
        return 7


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(torch, "accelerator", stand_in)
    monkeypatch.setattr(torch, "tpu", stand_in, raising=False)
    monkeypatch.setattr(backend_tpu, "torch_tpu_obstacle", lambda: None)
    monkeypatch.setattr(backend_tpu, "tpu_name", lambda: "TPU v6 lite")
    backend_tpu.open_backend.cache_clear()
    yield stand_in
    backend_tpu.open_backend.cache_clear()


def test_it_says_that_it_is_experimental(chip: StandIn, caplog, monkeypatch) -> None:
    precisions = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    tpu = backend.select("tpu")
    assert precisions == ["highest"]
    assert tpu.device is chip.device
    assert tpu.name() == "TPU v6 lite"
    assert device_called(tpu.name()).name == "TPU-v6e"  # so its peak is known
    assert caplog.messages == [
        "--device tpu is experimental: written without a TPU, it never ran on one"
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (None, r"this machine has no TPU on its PCI bus; use --device cpu"),
        ("TPU v4", r"torch_tpu did not load with torch beside the TPU v4 that is here; unset"),
    ],
)
def test_no_tpu_that_torch_sees(chip: StandIn, monkeypatch, name: str | None, why: str) -> None:
    chip.device = None
    monkeypatch.setattr(backend_tpu, "tpu_name", lambda: name)
    with pytest.raises(ConfigError, match=f"device=tpu, but {why}"):
        backend.select("tpu")


def test_what_keeps_torch_tpu_from_loading_is_said(chip: StandIn, monkeypatch) -> None:
    monkeypatch.setattr(backend_tpu, "torch_tpu_obstacle", lambda: "it is not here; get it")
    with pytest.raises(ConfigError, match="device=tpu, but it is not here; get it"):
        backend.select("tpu")


def test_several_processes_are_refused(chip: StandIn, monkeypatch) -> None:
    monkeypatch.setattr(backend_tpu, "launched", lambda: backend.Launch(world=4))
    with pytest.raises(ConfigError, match="4 processes were launched, expected one, which uses"):
        backend.select("tpu")


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_dtypes_that_a_tpu_lacks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype={name}, but TPUs have no such units; use"):
        backend_tpu.TpuBackend(CPU).dtype(name)


@pytest.mark.parametrize("values", [{"optimizer": "adamw8bit"}, {"latent_dtype": "bf16"}])
def test_optimizers_that_nobody_made_for_it(chip: StandIn, values: dict[str, str]) -> None:
    settings = TrainConfig(cache_dir=Path("cache"), device="tpu", **values)
    with pytest.raises(ConfigError, match="on TPUs only AdamW over float32 weights is made so"):
        check_dtype(settings)


def test_values_come_together(chip: StandIn) -> None:
    tpu = backend_tpu.TpuBackend(CPU)
    assert tpu.dtype("auto") == torch.bfloat16
    values = [torch.tensor(0.1), torch.tensor(2**40), torch.tensor(True)]
    assert tpu.read(values) == [values[0].item(), 2**40, True]
    assert chip.waits == 1
    shared = torch.ones(2)
    copies, _ = tpu.copied_to_host({"a": shared, "tied": shared, "b": torch.zeros(1)})
    assert copies["a"] is copies["tied"] and copies["a"].data_ptr() != shared.data_ptr()
    assert tpu.equal(shared, copies["a"])


def test_its_generator_comes_back(chip: StandIn) -> None:
    tpu = backend_tpu.TpuBackend(CPU)
    state = tpu.rng_state()
    first = torch.rand(3), torch.rand(3, generator=chip.generator)
    tpu.set_rng_state(state)
    again = torch.rand(3), torch.rand(3, generator=chip.generator)
    assert all(map(torch.equal, first, again))


def test_memory_is_counted_but_not_limited(chip: StandIn) -> None:
    tpu = backend_tpu.TpuBackend(CPU)
    assert (tpu.held_memory_gib(), tpu.peak_memory_gib(), tpu.memory_gib()) == (2, 3, 15)
    assert tpu.is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: 17 GiB of 16"))
    assert not tpu.is_out_of_memory(RuntimeError("INTERNAL"))
    refused = pytest.raises(ConfigError, match="memory_limit=4GiB, but torch_tpu cannot limit a")
    with refused, tpu.limit_memory(4):
        pass
    assert tpu.compile_count() == 7 and tpu.filled_length(65) == 128


def test_placing_ties_again_what_moving_unties(monkeypatch) -> None:
    model = tiny_model(tie_word_embeddings=True, num_hidden_layers=1)

    def untie(_: torch.device) -> None:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    monkeypatch.setattr(model, "to", untie)
    backend_tpu.TpuBackend(CPU).place(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight


class Calls(TorchDispatchMode):
    """Which operators ran, with the shapes and the host's numbers that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            told = tree_map_only(torch.Tensor, lambda t: (t.dtype, t.shape), (args, kwargs))
            self.made.append((str(func), str(told)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "values",
    [
        {"learn": "weights,codebook,scales,norms"},
        pytest.param({"loss": "candidates", "learn": "codebook,scales"}, marks=pytest.mark.slow),
        pytest.param({"loss": "sampled", "learn": "weights"}, marks=pytest.mark.slow),
    ],
    ids=lambda values: "-".join(values),
)
def test_a_course_of_steps(
    chip: StandIn, tmp_path: Path, monkeypatch, values: dict[str, object]
) -> None:
    place = make_short_place(tmp_path)

    def course(name: str) -> tuple[list[float], list[Calls]]:
        settings = config(place, max_steps=4, **values)
        trainer = make_trainer(settings, place / "student", tmp_path / name)
        results, calls = [], []
        for step in range(4):
            with Calls() as made:
                results.append(trainer.take_step([trainer.cache.batch(np.arange(4))], step))
            calls.append(made)
        return [trainer.backend.read([each.sums["loss"]])[0] for each in results], calls

    plain, _ = course("cpu")
    monkeypatch.setattr(backend, "Backend", backend_tpu.TpuBackend)
    adam = sys.modules["torch.optim.adam"]  # which `torch.optim.adam` is not
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda: ["cpu"])
    losses, calls = course("tpu")
    assert losses == pytest.approx(plain, rel=1e-5)
    assert chip.waits == 4  # for what was read, and for nothing else
    # nothing compiles anew: no number of the host changes from step to step
    assert calls[2].made == calls[3].made
