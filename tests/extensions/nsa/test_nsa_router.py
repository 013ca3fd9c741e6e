"""The choice of a backend, its messages, and the agreement of all routes."""

import logging
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from nsa_case import nsa_inputs, small

from qat.errors import ConfigError
from qat.extensions.lab.kernels.tune import write_entries
from qat.extensions.nsa.kernels import fla, flex, gather, router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, select
from qat.kernels import tuned

CPU = torch.device("cpu")


def inputs_of(config: NSAConfig, S: int, **sizes: object) -> Inputs:
    return nsa_inputs(config, S, width=16, dtype=torch.float32, **sizes)


def choose(config: NSAConfig, length: int, device: torch.device = CPU) -> router.Route:
    return router.choose(config, length=length, group=2, head_dim=16, device=device)


def test_a_merged_row_within_reach_is_dense_and_the_same() -> None:
    config = small(mode="merged")
    assert choose(config, config.reach).backend == "dense"
    assert choose(config, config.reach + 1).backend == "reference"
    documents = torch.where(torch.arange(config.reach) < 21, 0, 21).expand(2, -1)
    for first in (None, documents):
        inputs = inputs_of(config, config.reach, first=first)
        expected = router.attend(inputs, config, router.Route("reference", "reference", ""))
        torch.testing.assert_close(router.attend(inputs, config, choose(config, 64)), expected)


ROUTES = [
    ({}, 100, "cpu", ("auto", "reference", "flex cannot: it has no kernels for cpu")),
    ({"backend": "reference"}, 100, "cpu", ("reference", "reference", "asked for")),
    ({"min_len": 8192}, 8191, "cpu", ("auto", "dense", "min_len is 8192")),
    ({"min_len": 8192}, 8192, "cpu", ("auto", "reference")),
    ({}, 100, "cuda", ("auto", "flex")),
    ({"backend": "flex"}, 100, "cuda", ("flex", "flex")),
    # few queries share a choice
    ({"select_tile": 1}, 100, "cuda", ("auto", "gather")),
    ({"select_tile": 64}, 100, "cuda", ("auto", "gather")),
    ({"select_tile": 128}, 100, "cuda", ("auto", "flex")),
    ({"select_tile": 1, "select_block": 256}, 100, "cuda", ("auto", "flex")),
    (
        {"select_block": 192, "select_tile": 192},
        100,
        "cuda",
        ("auto", "reference", "flex cannot: select_tile=192 and 128 do not divide one another"),
    ),
]


def test_a_route_and_its_reason(cuda: torch.device) -> None:
    for values, length, on, route in ROUTES:
        found = choose(NSAConfig(**values), length, torch.device(on))
        assert found[: len(route)] == route, values


def test_auto_follows_what_was_measured_on_the_device(
    cuda: torch.device, monkeypatch, tmp_path
) -> None:
    merged, each = small(mode="merged"), NSAConfig(select_tile=1)
    chosen = {
        router.threshold_key(merged, 2, 16): router.Threshold(dense=32, flex=0),
        router.threshold_key(each, 2, 16): router.Threshold(dense=0, flex=100),
    }
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    entries = {(router.TABLE, key): limits for key, limits in chosen.items()}
    write_entries(tuned.table_path("some device"), entries, {})
    found = [choose(merged, length).backend for length in (32, 33, merged.reach)]
    assert found == ["dense", "reference", "reference"]
    found = [choose(each, length, cuda).backend for length in (100, 101)]
    assert found == ["flex", "gather"]
    compiled = torch.compile(
        lambda x: x + len(choose(merged, x.shape[0]).backend), backend="eager", fullgraph=True
    )
    assert [compiled(torch.zeros(n)).max().item() for n in (32, 40)] == [5, 9]
    tuned.forget_tables()


def test_a_block_that_gather_cannot_hold_is_refused(cuda: torch.device) -> None:
    config = NSAConfig(select_tile=1, select_block=256, backend="gather")
    with pytest.raises(ConfigError, match="select_block=256 is no power of two from 16 to 128"):
        choose(config, 100, cuda)


@pytest.mark.parametrize("name", ["flex", "gather", "fla"])
def test_a_pinned_backend_that_cannot_says_which_can(name: str) -> None:
    with pytest.raises(ConfigError, match=f"backend={name}.*no kernels for cpu; choose reference"):
        choose(NSAConfig(backend=name), 100)


class Gpu(NamedTuple):
    """What a backend says of its GPU."""

    shared_bytes: int
    is_ampere: bool = True

    def has_bf16(self) -> bool:
        return self.is_ampere

    def shared_memory_bytes(self) -> int:
        return self.shared_bytes


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that all kernels are there for, though none runs."""
    monkeypatch.setattr(router, "HAS_TRITON", True)
    monkeypatch.setattr(fla, "IS_INSTALLED", True)
    monkeypatch.setattr(gather, "on", lambda device: Gpu(160 * 1024))
    monkeypatch.setattr(flex, "check", lambda device: None)
    monkeypatch.setattr(tuned, "on", lambda device: SimpleNamespace(name=lambda: "some device"))
    return torch.device("cuda")


def test_a_device_without_room_for_a_block_does_not_gather(cuda: torch.device, monkeypatch) -> None:
    monkeypatch.setattr(gather, "on", lambda device: Gpu(8 * 1024))
    assert choose(NSAConfig(select_tile=1), 100, cuda).backend == "flex"
    small = NSAConfig(select_tile=1, select_block=64)
    assert choose(small, 100, cuda).backend == "gather"


def test_a_gpu_without_fast_products_does_not_gather(cuda: torch.device, monkeypatch) -> None:
    small = NSAConfig(select_tile=1, select_block=64)
    monkeypatch.setattr(gather, "on", lambda device: Gpu(64 * 1024, is_ampere=False))
    assert choose(small, 100, cuda).backend == "flex"


@pytest.mark.parametrize("group", [2, 24])
def test_groups_that_fla_cannot_do_say_who_can(cuda: torch.device, group: int) -> None:
    with pytest.raises(
        ConfigError, match=f"{group} query heads.*choose gather or flex or reference"
    ):
        router.choose(NSAConfig(backend="fla"), length=9, group=group, head_dim=64, device=cuda)
    route = router.choose(NSAConfig(backend="fla"), length=9, group=16, head_dim=64, device=cuda)
    assert route == ("fla", "fla", "asked for")


def test_fla_refuses_packed_documents() -> None:
    config = small(mode="merged")
    inputs = inputs_of(config, 50, first=torch.zeros(2, 50, dtype=torch.long))
    with pytest.raises(ConfigError, match="several documents; use backend=flex"):
        fla.attend(inputs, config)


def test_fla_is_given_every_querys_blocks() -> None:
    config = small(mode="merged")
    selection = select(inputs_of(config, 100), config)
    indices = fla.indices_of(selection, 100, config)
    assert indices.shape == (2, 100, 2, 4)
    found = torch.zeros(2, 100, 2, 8, dtype=torch.bool)
    found.scatter_(-1, torch.where(indices < 0, 7, indices).long(), True)
    expected = selection.repeat_interleave(16, 2)[:, :, :100].transpose(1, 2)
    assert torch.equal(found[..., :7], expected)


def test_a_given_selection_is_used() -> None:
    config = small(mode="merged")
    inputs = inputs_of(config, 100)
    route = choose(config, 100)
    own = select(inputs, config)
    only_own_block = own & torch.eye(own.shape[-1], dtype=torch.bool)
    assert torch.equal(
        router.attend(inputs, config, route, own), router.attend(inputs, config, route)
    )
    assert not torch.equal(
        router.attend(inputs, config, route, only_own_block), router.attend(inputs, config, route)
    )


def test_a_route_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = NSAConfig(min_len=12345)
    with caplog.at_level(logging.INFO, "qat.extensions.nsa.kernels.router"):
        assert choose(config, 7) == choose(config, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "nsa: dense (asked: auto): min_len is 12345"
    ]
