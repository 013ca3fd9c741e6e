"""Caches built on XLA's CPU client: the CPU's targets, every operator on the device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_xla", reason="torch_xla is not installed; .ci/xla runs these tests")

from cache_case import TOKENIZER, build, max_error, teacher, texts
from served_case import free_port

from qat.backend.device import select
from qat.data.codec import stream, uniforms
from qat.data.packing import Batch
from qat.data.reader import TeacherCache

pytestmark = pytest.mark.xla
XLA = select("xla")


def assert_alike(ours: Batch, theirs: Batch) -> None:
    """Make sure that both hold the same teacher, but for the order of sums.

    A distance near the border between two codes may be stored as either, which moves all log-probs
    of its token: on few tokens, and by no more than both codes may err.
    """
    assert torch.equal(ours.topk_ids, theirs.topk_ids)
    torch.testing.assert_close(ours.tail_logprob, theirs.tail_logprob, atol=1e-5, rtol=0)
    found, expected = ours.topk_logprobs, theirs.topk_logprobs
    apart = (found - expected).abs().masked_fill(found == expected, 0.0).amax(-1)
    moved = apart > 1e-5
    assert moved.float().mean() < 0.02
    widest = 1.036 * (expected[..., 0] - expected[..., -1])[moved]
    bounds = [2 * max_error(each, expected.shape[-1]) for each in widest.tolist()]
    assert (apart[moved] <= torch.tensor(bounds)).all()


def test_a_cache_says_what_the_cpus_does(tmp_path: Path) -> None:
    placed = teacher()
    XLA.tracing.place(placed.model, XLA.device)
    compiles, executions = XLA.tracing.counts().compiles, XLA.tracing.counts().executions
    manifest = build(tmp_path / "xla", teacher=placed)
    batches = XLA.tracing.counts().executions - executions
    build(tmp_path / "cpu")
    ours, theirs = (TeacherCache.open(tmp_path / name).batch(range(10)) for name in ("xla", "cpu"))
    assert_alike(ours, theirs)
    # a point may fall to the other side of a border between two tokens
    assert (ours.sample_counts == theirs.sample_counts).float().mean() > 0.99
    assert XLA.tracing.counts().compiles - compiles == 1
    assert batches == sum(-(-shard.sequences // 4) for shard in manifest.shards)
    assert not XLA.tracing.counts().host_fallbacks


def test_random_numbers_are_the_cpus() -> None:
    places = torch.arange(1000)
    ours = uniforms(stream(0, "train"), places.to(XLA.device), 3)
    assert torch.equal(XLA.to_host(ours), uniforms(stream(0, "train"), places, 3))


def test_two_processes_of_two_devices_build_the_cpus_cache(tmp_path: Path) -> None:
    asked = teacher().model
    asked.save_pretrained(tmp_path / "teacher")
    TOKENIZER.save_pretrained(tmp_path / "teacher")
    (tmp_path / "words.txt").write_text("\n\n".join(texts()))
    flags = {
        "data": tmp_path / "words.txt",
        "teacher": tmp_path / "teacher",
        "dtype": "fp32",
        "sequence-length": 16,
        "top-k": 5,
        "shard-size": 6,
        "held-out": 0.2,
    }
    command = [sys.executable, "-c", "from qat.cli import main; main()", "cache"]
    command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    meeting |= {"CPU_NUM_DEVICES": "2"}
    ranks = [
        subprocess.Popen(
            [*command, "--device", "xla", "--out", tmp_path / "xla"],
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    subprocess.run([*command, "--device", "cpu", "--out", tmp_path / "cpu"], check=True)
    assert [rank.wait() for rank in ranks] == [0, 0]
    ours, theirs = (TeacherCache.open(tmp_path / name) for name in ("xla", "cpu"))
    assert [shard.content for shard in ours.manifest.shards] == [
        shard.content for shard in theirs.manifest.shards
    ]
    assert_alike(ours.batch(range(20)), theirs.batch(range(20)))
