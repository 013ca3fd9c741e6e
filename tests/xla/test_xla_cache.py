"""Caches built on XLA's CPU client: the CPU's targets, every operator on the device."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

from cache_case import build, teacher

from qat.backend import select
from qat.data.noise import stream, uniforms
from qat.data.reader import TeacherCache

pytestmark = pytest.mark.xla
XLA = select("xla")


def test_a_cache_says_what_the_cpus_does(tmp_path: Path) -> None:
    placed = teacher()
    XLA.place(placed.model)
    compiles, executions = XLA.compile_count(), XLA.execution_count()
    manifest = build(tmp_path / "xla", teacher=placed)
    batches = XLA.execution_count() - executions
    build(tmp_path / "cpu")
    ours, theirs = (TeacherCache.open(tmp_path / name).batch(range(10)) for name in ("xla", "cpu"))
    assert torch.equal(ours.topk_ids, theirs.topk_ids)
    for name in ("topk_logprobs", "tail_logprob"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), atol=1e-5, rtol=0)
    # a point may fall to the other side of a border between two tokens
    assert (ours.sample_counts == theirs.sample_counts).float().mean() > 0.99
    assert XLA.compile_count() - compiles == 1
    assert batches == sum(-(-shard.sequences // 4) for shard in manifest.shards)
    assert not XLA.host_fallbacks()


def test_random_numbers_are_the_cpus() -> None:
    places = torch.arange(1000)
    ours = uniforms(stream(0, "train"), places.to(XLA.device), 3)
    assert torch.equal(XLA.to_host(ours), uniforms(stream(0, "train"), places, 3))
