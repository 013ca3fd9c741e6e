"""The step that is compiled for a TPU is our training step: the same numbers, on jax's CPU."""

import pytest

pytest.importorskip("torchax", exc_type=ImportError)

import torch

from qat.backend.device import select
from qat.extensions.bench.batches import BatchSource
from qat.extensions.bench.config import BenchConfig
from qat.extensions.bench.student import Ours, open_student
from qat.extensions.lab.tpu_plan.pieces import Traceable
from qat.extensions.lab.tpu_plan.run import Planner
from qat.extensions.lab.tpu_plan.topologies import TOPOLOGIES
from qat.extensions.lab.tpu_plan.xla import DTYPES, build, jax
from qat.nn.swap import decoder_layers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # jax's and torchax's own
B, S = 4, 16


def setting(**values: object) -> BenchConfig:
    return BenchConfig(device="cpu", dtype="fp32", compile="off", seq_len=S, top_k=8, **values)


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("learn", ["weights,scales,codebook", "scales,codebook"])
def test_the_step_in_jax_is_the_step_in_torch(learn: str, recomputes: bool) -> None:
    config = setting(learn=learn, gradient_checkpointing=recomputes)
    traceable = Traceable(config, "tiny")
    ours = Ours(open_student("tiny", config), config)
    step = ours.subject()
    model = ours.student.model
    layers = [list(tensors(layer).values()) for layer in decoder_layers(model)]
    inside = {id(tensor) for layer in layers for tensor in layer}
    outside = [t for t in tensors(model).values() if id(t) not in inside]
    source = BatchSource(None, S, 8, 0, ours.student.config.vocab_size, 0)
    batch = source.batch(B, 0, select("cpu"))

    def array(tensor: torch.Tensor) -> object:
        return jax.numpy.asarray(tensor.detach().numpy(), dtype=DTYPES[tensor.dtype])

    stacks = [array(torch.stack([t.detach() for t in same])) for same in zip(*layers, strict=True)]
    learned = traceable.learned_places
    moments = [jax.numpy.zeros_like(stacks[number]) for number in learned for _ in range(2)]
    given = stacks, moments, [array(t) for t in outside], [array(t) for t in batch]
    losses, norm, _, moved = jax.jit(build(traceable, B))(*given)
    expected = step([batch], 1)
    assert float(losses[-1]) == pytest.approx(float(expected.sums["loss"]), rel=1e-4)
    assert float(norm) == pytest.approx(float(expected.grad_norm), rel=1e-3)
    state = {k: t for mover in ours.optimizer._movers for k, t in mover.state().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for place, number in enumerate(learned):
        both = [state[f"exp_avg.{names[id(layer[number])]}"] for layer in layers]
        found = torch.tensor(jax.device_get(moved[2 * place]).tolist())
        expected_moment = torch.stack(both)
        assert (found - expected_moment).norm() <= 1e-2 * expected_moment.norm() + 1e-9


def test_a_tiny_step_compiles_for_a_v6e_and_checkpointing_saves() -> None:
    peaks = {}
    for recomputes in (False, True):
        config = BenchConfig(seq_len=64, gradient_checkpointing=recomputes)
        planner = Planner(config, "tiny", TOPOLOGIES["v6e"], memory_gib=1)
        peaks[recomputes] = planner.compile(256).peak_gib
    assert peaks[True] < peaks[False]
    planner._memory_gib = peaks[True] / 2
    refused = planner.compile(256)
    assert refused.peak_gib is None and refused.needed_gib > planner._memory_gib
