"""Compilers and wrappers see an ordinary module: the steps are those without them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cache_case import TOKENIZER, build
from loop_case import (
    assert_same,
    batches_of,
    prepared,
    steps_of_loop,
    steps_of_rank,
    values_of,
    with_tables,
)
from quantized import SPECS, tiny_quantized
from ranks_case import run_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from train_case import config

import qat
from qat.backend.cpu import CpuBackend
from qat.data.reader import TeacherCache
from qat.errors import ConfigError
from qat.models.checkpoint import save_checkpoint
from qat.nn.swap import decoder_layers
from qat.ranks import Ranks

WORLD = 2


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
@pytest.mark.parametrize("with_logits", [False, True])
def test_a_compiled_student_takes_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_logits: bool
) -> None:
    monkeypatch.setattr(CpuBackend, "compiles", True)  # joined layers, as on a GPU
    build(tmp_path / "cache")
    save_checkpoint(with_tables(), TOKENIZER, tmp_path / "student")
    cache, course = TeacherCache.open(tmp_path / "cache"), config(tmp_path, dtype="bf16")
    plain, compiled = prepared(tmp_path, course), prepared(tmp_path, course)
    expected = steps_of_loop(plain, cache, course, with_logits=with_logits)
    # without logits the graph ends before the head, whose losses have kernels of their own
    run = torch.compile(compiled, backend="aot_eager", fullgraph=with_logits)
    (batch,) = batches_of(cache, 0, 1)
    run(batch.input_ids, position_ids=batch.position_ids, with_logits=with_logits)
    seen = counters["frames"]["total"]
    losses = steps_of_loop(run, cache, course, with_logits=with_logits)
    assert counters["frames"]["total"] == seen > 0  # no step compiles anything
    assert all(map(torch.equal, losses, expected))
    assert_same(values_of(compiled), values_of(plain))


def shard(student: nn.Module) -> nn.Module:
    for layer in decoder_layers(student):
        fully_shard(layer)
    return fully_shard(student)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": shard,
}


@pytest.mark.slow
@pytest.mark.usefixtures("short_fits")
@pytest.mark.parametrize("kind", ["linears", "tables"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_ranks_take_the_steps_of_one(tmp_path: Path, wrapper: str, kind: str) -> None:
    build(tmp_path / "cache")
    model = with_tables() if kind == "tables" else tiny_quantized("qwen3", SPECS["fours8_s8"])
    save_checkpoint(model, TOKENIZER, tmp_path / "student")
    cache = TeacherCache.open(tmp_path / "cache")
    course = config(tmp_path, grad_accum_steps=WORLD, clip_grad_norm=1e9)
    alone = prepared(tmp_path, course)
    expected = steps_of_loop(alone, cache, course)

    def act(ranks: Ranks) -> list[float]:
        student = WRAPPERS[wrapper](prepared(tmp_path, course))
        losses = steps_of_rank(student, cache, course, ranks)
        if wrapper == "FSDP2":
            with pytest.raises(ConfigError, match="divided over ranks"):
                qat.finish(student)
            whole = StateDictOptions(full_state_dict=True)
            state = get_model_state_dict(student, options=whole)
            student = prepared(tmp_path, course)
            student.load_state_dict(state)
        finished = qat.finish(student)
        if ranks.is_first:
            qat.save(finished, tmp_path / "finished", TOKENIZER)
        return [loss.item() for loss in losses]

    found = run_ranks(WORLD, act, tmp_path / "ranks")
    assert found == [[loss.item() for loss in expected]] * WORLD
    qat.save(qat.finish(alone), tmp_path / "alone", TOKENIZER)
    both = (tmp_path / name / "model.safetensors" for name in ("finished", "alone"))
    assert len({path.read_bytes() for path in both}) == 1
