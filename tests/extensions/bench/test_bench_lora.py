"""A benchmark of adapters measures the step that a run would take."""

import torch

from qat.backend import device as backend
from qat.extensions.bench.batches import open_source
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import Ours, open_student
from qat.nn.quant_linear import quant_linears


def test_adapters_are_added_trained_and_stand_still() -> None:
    config = BenchConfig(
        device="cpu", dtype="fp32", seq_len=16, top_k=8, learn="lora", lora_rank=4, mlp_only=True
    )
    student = open_student("tiny", config)
    batch = open_source(config, student).batch(3, 0, backend.select("cpu"))
    ours = Ours(student, config)
    step = ours.subject()
    first, second = (step([batch], number) for number in range(2))
    assert first.grad_norm > 0 and torch.equal(first.sums["loss"], second.sums["loss"])
    ranks = {name: linear.lora_rank for name, linear in quant_linears(student.model).items()}
    assert all(rank == (4 if ".mlp." in name else 0) for name, rank in ranks.items())
    assert all("lora" in name for name in ours.optimizer.parameters)
