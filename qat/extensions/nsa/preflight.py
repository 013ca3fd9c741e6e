"""Preflight findings about a run of a student with sparse attention."""

from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig

from qat.backend.base import Backend
from qat.extensions.nsa.kernels.router import UNMEASURED, Route, choose, measured, threshold_key
from qat.extensions.nsa.swap import nsa_config
from qat.nn.swap import head_dim
from qat.train.preflight import RunFinding


class SparsePlan(NamedTuple):
    """The sparse attention of a run, before it starts."""

    sequence_length: int
    reach: int
    """The longest sequence over which it is still dense."""
    has_gates: bool
    route: Route
    device: str
    """The device's name; `cpu` for any CPU."""
    dense_until: int = 0
    """The longest sequence that dense attention was measured to train as fast; 0: unmeasured."""


def plan_of(student: PreTrainedConfig, length: int, backend: Backend) -> SparsePlan:
    """Return the facts about a student's attention on sequences of `length`.

    Raises:
        ConfigError: the backend that it names cannot compute it.
    """
    config = nsa_config(student)
    settings = student.get_text_config()
    group, width = settings.num_attention_heads // settings.num_key_value_heads, head_dim(settings)
    device = backend.device
    route = choose(config, length=length, group=group, head_dim=width, device=device)
    limits = measured(threshold_key(config, group, width), device)
    until = 0 if limits == UNMEASURED else limits.dense
    return SparsePlan(length, config.reach, config.mode != "merged", route, backend.name(), until)


def findings(learn: str, plan: SparsePlan) -> Iterator[RunFinding]:
    """Yield the findings about a run in which the kinds named in `learn` learn."""
    if plan.sequence_length <= plan.reach:
        yield RunFinding(
            "nsa_dense",
            "warning",
            f"sequences of {plan.sequence_length} tokens, of which sparse attention reads up to "
            f"{plan.reach} whole",
            "its choice of blocks never acts and the student does not learn to live with it",
            "build a cache of longer sequences, or convert to fewer or smaller blocks",
        )
    elif plan.sequence_length <= plan.dense_until:
        yield RunFinding(
            "nsa_slow",
            "note",
            f"sequences of {plan.sequence_length} tokens, up to {plan.dense_until} of which dense "
            f"attention was measured to be as fast on {plan.device}",
            "sparse attention saves no time in this training",
            "train on longer sequences, or with dense attention and swap later",
        )
    if plan.has_gates and "gates" not in learn.split(","):
        found = f"learn={learn} leaves the gates of sparse attention as they are"
        reason = "where they begin, selection alone counts"
        yield RunFinding("nsa_gates", "note", found, reason, "add gates to --learn")
    is_slow = plan.route.backend == "reference" and plan.device != "cpu"
    yield RunFinding(
        "nsa_backend",
        "warning" if is_slow else "note",
        f"sparse attention runs as {plan.route.backend}",
        plan.route.reason,
        "choose sizes that a kernel takes" if is_slow else "nothing",
    )
