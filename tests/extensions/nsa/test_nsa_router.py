"""Which backend is taken, what it says, and that routes agree."""

import logging

import pytest
import torch

from qat.errors import ConfigError
from qat.extensions.nsa.kernels import fla, flex, gather, router
from qat.extensions.nsa.kernels.config import NSAConfig
from qat.extensions.nsa.kernels.select import Inputs, pool, select

SMALL = dict(
    compress_block=8, compress_stride=4, select_block=16, num_selected=4, window=12, select_tile=16
)
CPU = torch.device("cpu")


def inputs_of(config: NSAConfig, S: int, *, K: int = 2, group: int = 2) -> Inputs:
    query = torch.randn(2, K * group, S, 16)
    key, value = torch.randn(2, 2, K, S, 16)
    gates = None if config.mode == "merged" else torch.rand(2, S, K * group, 3)
    pooled = pool(key, config), pool(value, config)
    return Inputs(query, key, value, *pooled, gates, None, 0.25)


def choose(config: NSAConfig, length: int, device: torch.device = CPU) -> router.Route:
    return router.choose(config, length=length, group=2, head_dim=16, device=device)


def test_cpu_takes_the_reference_and_says_why() -> None:
    assert choose(NSAConfig(), 100) == (
        "auto",
        "reference",
        "flex cannot: it has no kernels for cpu",
    )
    assert choose(NSAConfig(backend="reference"), 100)[:2] == ("reference", "reference")


def test_a_merged_row_within_reach_is_dense_and_the_same() -> None:
    config = NSAConfig(mode="merged", **SMALL)
    assert choose(config, config.reach).backend == "dense"
    assert choose(config, config.reach + 1).backend == "reference"
    inputs = inputs_of(config, config.reach)
    by_reference = router.Route("reference", "reference", "")
    expected = router.attend(inputs, config, by_reference)
    torch.testing.assert_close(router.attend(inputs, config, choose(config, 64)), expected)


def test_documents_are_kept_apart_by_the_dense_route() -> None:
    config = NSAConfig(mode="merged", **SMALL)
    first = torch.where(torch.arange(50) < 21, 0, 21).expand(2, -1)
    inputs = inputs_of(config, 50)._replace(first=first)
    expected = router.attend(inputs, config, router.Route("reference", "reference", ""))
    torch.testing.assert_close(router.attend(inputs, config, choose(config, 50)), expected)


def test_min_len_asks_for_dense() -> None:
    route = choose(NSAConfig(min_len=8192), 8191)
    assert route == ("auto", "dense", "min_len is 8192")
    assert choose(NSAConfig(min_len=8192), 8192).backend == "reference"


@pytest.mark.parametrize("name", ["flex", "gather", "fla"])
def test_a_pinned_backend_that_cannot_says_which_can(name: str) -> None:
    with pytest.raises(ConfigError, match=f"backend={name}.*no kernels for cpu; choose reference"):
        choose(NSAConfig(backend=name), 100)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that all kernels are there for, though none runs."""
    monkeypatch.setattr(router, "HAS_TRITON", True)
    monkeypatch.setattr(fla, "IS_INSTALLED", True)
    monkeypatch.setattr(gather, "shared_memory", lambda device: 160 * 1024)
    monkeypatch.setattr(flex, "check", lambda device: None)
    return torch.device("cuda")


def test_cuda_takes_flex(cuda: torch.device) -> None:
    for name in ("auto", "flex"):
        assert choose(NSAConfig(backend=name), 100, cuda).backend == "flex"


def test_cuda_gathers_where_few_queries_share_a_choice(cuda: torch.device) -> None:
    for tile, name in ((1, "gather"), (64, "gather"), (128, "flex")):
        assert choose(NSAConfig(select_tile=tile), 100, cuda).backend == name
    wide = NSAConfig(select_tile=1, select_block=256)
    assert choose(wide, 100, cuda).backend == "flex"
    with pytest.raises(ConfigError, match="select_block=256 is no power of two from 16 to 128"):
        choose(NSAConfig(**{**wide.model_dump(), "backend": "gather"}), 100, cuda)


def test_a_device_without_room_for_a_block_does_not_gather(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "shared_memory", lambda device: 8 * 1024)
    assert choose(NSAConfig(select_tile=1), 100, cuda).backend == "flex"
    small = NSAConfig(select_tile=1, select_block=64)
    assert choose(small, 100, cuda).backend == "gather"


def test_sizes_that_flex_cannot_do_are_the_references(cuda: torch.device) -> None:
    odd = NSAConfig(select_block=192, select_tile=192)
    route = choose(odd, 100, cuda)
    assert route[1:] == (
        "reference",
        "flex cannot: select_tile=192 and 128 do not divide one another",
    )


@pytest.mark.parametrize("group", [2, 24])
def test_groups_that_fla_cannot_do_say_who_can(cuda: torch.device, group: int) -> None:
    with pytest.raises(
        ConfigError, match=f"{group} query heads.*choose gather or flex or reference"
    ):
        router.choose(NSAConfig(backend="fla"), length=9, group=group, head_dim=64, device=cuda)
    route = router.choose(NSAConfig(backend="fla"), length=9, group=16, head_dim=64, device=cuda)
    assert route == ("fla", "fla", "asked for")


def test_fla_refuses_packed_documents() -> None:
    config = NSAConfig(mode="merged", **SMALL)
    inputs = inputs_of(config, 50)._replace(first=torch.zeros(2, 50, dtype=torch.long))
    with pytest.raises(ConfigError, match="several documents; use backend=flex"):
        fla.attend(inputs, config)


def test_fla_is_given_every_querys_blocks() -> None:
    config = NSAConfig(mode="merged", **SMALL)
    selection = select(inputs_of(config, 100), config)
    indices = fla.indices_of(selection, 100, config)
    assert indices.shape == (2, 100, 2, 4)
    found = torch.zeros(2, 100, 2, 8, dtype=torch.bool)
    found.scatter_(-1, torch.where(indices < 0, 7, indices).long(), True)
    expected = selection.repeat_interleave(16, 2)[:, :, :100].transpose(1, 2)
    assert torch.equal(found[..., :7], expected)


def test_a_given_selection_is_used() -> None:
    config = NSAConfig(mode="merged", **SMALL)
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
