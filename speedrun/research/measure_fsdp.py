"""Latent weights divided by PyTorch's `fully_shard`: speed and memory of a step beside ours.

Both train the same student by the same step, formed by layer. `fully_shard` gathers the latent
weights of a layer, and every rank then forms all of it; ours gathers what each rank formed of its
rows. In both gradients are summed in float32, weights and moments are bfloat16 and lie in rows, the
same code moves them, and scales and codebooks are whole on every rank. Weights are random and
learning rates zero: losses and norms of gradients are to be alike.

torchrun --standalone --nproc-per-node 2 speedrun/research/measure_fsdp.py
"""

from functools import partial

import research_records
import torch
from cyclopts import App
from measure_ranks import say, timed
from speed_case import EXACT, LATENT, settled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from qat.bench.config import MeasureConfig
from qat.bench.student import Ours
from qat.logs import configure
from qat.models.language_model import LanguageModel, body_of
from qat.nn.step import quant_linears
from qat.nn.swap import decoder_layers
from qat.ranks import Ranks, joined
from qat.train.optim import learnable, linears_in_scope

app = App(help=__doc__)


class Theirs(Ours):
    """A student whose latent weights `fully_shard` divides, a layer in one exchange."""

    def __init__(self, student: LanguageModel, config: MeasureConfig, *, ranks: Ranks) -> None:
        super().__init__(student, config, ranks=ranks)
        model, optimizer = student.model, self.optimizer
        optimizer.forget_gradients()
        owners = {f"{name}.weight": each for name, each in quant_linears(model).items()}
        others = {p for name, p in model.named_parameters() if name not in owners}
        mesh = init_device_mesh(student.device.type, (ranks.size,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*decoder_layers(model), body_of(model)):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=others)
            module.set_gradient_divide_factor(1.0)  # a sum
            module.set_force_sum_reduction_for_comms(True)
        # the optimizer sees this rank's rows, as of a `ShardedLutLinear`
        optimizer.sharded = owners
        divided = {name: model.get_parameter(name) for name in owners}
        rows = {name: nn.Parameter(p.to_local().detach()) for name, p in divided.items()}
        optimizer.parameters |= rows
        names = linears_in_scope(model, config.scope, config.kinds)
        optimizer._movers = optimizer._choose_movers(learnable(model, names, config.kinds))
        move = optimizer.step

        def step(number: int) -> Tensor:
            for name, parameter in divided.items():
                rows[name].grad, parameter.grad = parameter.grad.to_local(), None
            return move(number)

        optimizer.step = step


@app.default
def measure(
    *,
    shape: str = "qwen3-4b",
    to: str = "q2a4",
    device: str = "auto",
    batch_size: int = 16,
    seq_len: int = 512,
    layers: int | None = None,
    steps: int = 5,
    rounds: int = 1,
) -> None:
    """Print tokens/s and memory of each rank, in turns.

    Parameters
    ----------
    to
        Preset of the student's formats; codewords (v2a2) take long to find.
    batch_size
        Of each rank.
    layers
        Of the shape; all if not given.
    """
    configure()
    with joined(device) as ranks:
        values = LATENT | EXACT | {"batch_size": batch_size, "seq_len": seq_len, "steps": steps}
        values |= {"latent_dtype": "bf16", "form": "layer", "gradient_checkpointing": True}
        values |= {"to": to, "layers": layers}
        config = settled(device=device, **values)
        if ranks.is_first:
            print(f"{shape}, {to}, on {ranks.size} x {research_records.device()}", flush=True)
        for _ in range(rounds):
            for name in ("ours", "fully_shard"):
                norms: list[Tensor] = []
                make = partial(subject, name=name, norms=norms, ranks=ranks)
                timing = timed(shape, config, ranks, make)
                found = f"loss {timing.loss_nats:.7f}, gradients' norm {norms[-1].item():.7g}"
                say(f"{name}, {found}", timing, ranks)


def subject(
    student: LanguageModel, config: MeasureConfig, *, name: str, norms: list[Tensor], ranks: Ranks
) -> Ours:
    """One of both ways; the norm of each step's gradients goes to `norms`."""
    if name == "ours":
        made = Ours(student, config, ranks=ranks, is_sharded=True)
    else:
        made = Theirs(student, config, ranks=ranks)
    move = made.optimizer.step

    def step(number: int) -> Tensor:
        norms.append(move(number))
        return norms[-1]

    made.optimizer.step = step
    return made


if __name__ == "__main__":
    app()
