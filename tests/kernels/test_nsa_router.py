"""Which backend is taken, what it says, and that routes agree."""

import logging

import pytest
import torch

from qat.errors import ConfigError
from qat.kernels.nsa import router
from qat.kernels.nsa.config import NSAConfig
from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.select import pool, select

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
    assert choose(NSAConfig(), 100) == ("auto", "reference", "no kernel for cpu")
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


@pytest.mark.parametrize("name", ["flex", "fla"])
def test_a_pinned_backend_that_cannot_says_which_can(name: str) -> None:
    with pytest.raises(ConfigError, match=f"backend={name}.*reference"):
        choose(NSAConfig(backend=name), 100)


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


def test_a_route_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    config = NSAConfig(min_len=12345)
    with caplog.at_level(logging.INFO, "qat.kernels.nsa.router"):
        before = router.routes_taken()
        route = choose(config, 7)
        choose(config, 8)
    assert router.routes_taken()[route] - before[route] == 2
    assert [record.getMessage() for record in caplog.records] == [
        "nsa: dense (asked: auto): min_len is 12345"
    ]
