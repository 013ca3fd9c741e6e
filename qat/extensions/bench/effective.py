"""Facts about what really ran, for comparison with what was requested.

One step is profiled before the clock starts: the operators that it called show the dtype of matmuls
and the kind of attention, inside compiled graphs as well. Counters of the kernels, the compiler and
the recomputed layers give the rest.
"""

from collections import Counter
from collections.abc import Sequence
from math import prod

from qat.backend.base import Backend
from qat.backend.device import profile_operators
from qat.data.packing import Batch
from qat.errors import TrainingError
from qat.extensions.bench.student import Subject
from qat.kernels.dispatch import ways_taken
from qat.models.attention import SPARSE, sparse_attention
from qat.models.language_model import LanguageModel
from qat.models.regions import compile_facts, recomputed_layers
from qat.train.step import StepResult
from qat.train.step_config import StepConfig

DTYPES = {"float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
SHOWN_AS = {"tf32": "fp32"}
"""The operand dtype that a profiler shows: TF32 rounds fp32 operands inside the product."""
MATMULS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "mkldnn::_linear_pointwise": (0, 1),
}
"""Positions of the two factors among an operator's arguments."""
ATTENTION = ("aten::_scaled_dot_product_", "qat::tile_attention", "qat::joined_tile_attention")
MATH = "aten::_scaled_dot_product_attention_math"
LEAST_SHARE = 0.5  # least fraction of a step's matmul FLOPs that must be in the requested dtype

Facts = dict[str, object]


class StepProfiler:
    """A subject whose second step (or the only one before the clock) is profiled.

    With `looks` false nothing is profiled. This is for backends that only record operators: each
    tensor that the profiler holds would become an output and change the graph.
    """

    def __init__(self, subject: Subject, warmup: int, *, looks: bool = True) -> None:
        self._subject = subject
        self._looks_at = min(1, warmup - 1) if looks else None
        self._calls = 0
        self._seen: Facts = {}
        self._taken, self._compiled, self._recomputed = _counters()

    def __call__(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Take the step, profiled if it is its turn."""
        self._calls += 1
        if self._calls - 1 != self._looks_at:
            return self._subject(batches, step)
        with profile_operators() as profile:
            result = self._subject(batches, step)
        self._seen = operator_facts(profile.profiler.kineto_results.events())
        return result

    def compile_facts(self) -> Facts:
        """Return the subject's facts, and under `effective` all that is known about what ran."""
        now, compiled, recomputed = _counters()
        facts = self._subject.compile_facts()
        effective = {
            **self._seen,
            "kernels": {"/".join(way): n for way, n in sorted((now - self._taken).items())},
            "graph_breaks": compiled.breaks - self._compiled.breaks,
            "recomputed_layers": recomputed - self._recomputed,
            **facts,
        }
        return {**facts, "effective": effective}

    def close(self) -> None:
        """Close the subject."""
        self._subject.close()


def operator_facts(events: Sequence) -> Facts:
    """Return matmul FLOPs by dtype as fractions, attention operators, and calls of our operators.

    A product of unknown sizes is not counted: it comes from the compiler's tracing, not from a
    matmul.
    """
    flops, attention, own = Counter(), set(), Counter()
    for event in events:
        name = event.name()
        if name in MATMULS:
            flops.update(_matmul(event, *MATMULS[name]))
        elif name.startswith(ATTENTION) and not name.endswith("backward"):
            attention.add(name)
        if name.startswith("qat::"):
            own[name] += 1
    total = flops.total()
    return {
        "matmul_dtypes": {dtype: count / total for dtype, count in flops.most_common() if total},
        "attention": sorted(attention),
        "operators": dict(sorted(own.items())),
    }


def what_ran(
    config: StepConfig, student: LanguageModel, effective: Facts, backend: Backend, *, length: int
) -> Facts:
    """Return the columns of a row that state what was requested and what ran instead.

    `effective` gets the route of sparse attention in rows of `length`.
    """
    requested = requested_settings(config, student.config._attn_implementation)
    sparse = sparse_attention(student.model)
    if sparse is not None:
        requested["attention"] = SPARSE
        effective["route"] = sparse.choose_backend(student.model, length, backend.device)
    return {"requested": requested, "fallbacks": fallbacks(requested, effective, backend)}


def requested_settings(config: StepConfig, attention: str) -> Facts:
    """Return the settings that may be silently replaced by something else."""
    names = ("dtype", "compile", "gradient_checkpointing", "checkpoint_every")
    return {**{name: getattr(config, name) for name in names}, "attention": attention}


def fallbacks(requested: Facts, effective: Facts, backend: Backend) -> list[str]:
    """Return a sentence for each request that was not met."""
    found = []
    compiles = requested["compile"] == "on" or (requested["compile"] == "auto" and backend.compiles)
    if compiles and not (effective["compiled"] and effective["graphs"]):
        reason = effective["fallback"] or "no graph"
        found.append(f"compile={requested['compile']} ran uncompiled ({reason})")
    shares = effective.get("matmul_dtypes")
    multiplied = SHOWN_AS.get(requested["dtype"], requested["dtype"])
    if shares and shares.get(multiplied, 0.0) < LEAST_SHARE:
        words = ", ".join(f"{dtype} {share:.0%}" for dtype, share in shares.items())
        found.append(f"dtype={requested['dtype']} multiplied in {words}")
    if requested["gradient_checkpointing"] and not effective["recomputed_layers"]:
        found.append("gradient_checkpointing recomputed no layer")
    for name, count in effective.get("host_fallbacks", {}).items():
        found.append(f"operator {name} ran on the host, {count} times")
    if effective["graph_breaks"]:
        found.append(f"the compiler gave up at {effective['graph_breaks']} places")
    if backend.device.type == "cuda" and MATH in effective.get("attention", ()):
        found.append("attention ran as separate products, no fused kernel took it")
    if backend.device.type == "cuda" and effective.get("route") == "reference":
        found.append("sparse attention ran as its reference on the GPU")
    for way, count in effective["kernels"].items():
        if way.endswith("/pytorch/cuda"):
            kernel = way.partition("/")[0]
            found.append(f"kernel {kernel} ran as plain PyTorch on the GPU, {count} times")
    return found


def check_strictly(found: Sequence[str]) -> None:
    """Raise TrainingError if anything ran differently than requested."""
    if found:
        raise TrainingError(
            f"{'; '.join(found)}; expected what was asked for (strict); mend the cause, ask for "
            "what can run, or leave out --strict"
        )


def _matmul(event, first: int, second: int) -> dict[str, int]:  # noqa: ANN001 - a kineto event
    """Return an operator's FLOPs by the dtype of its factors: 2 x rows x inner x columns."""
    shapes, dtypes = event.shapes(), event.dtypes()
    left, right = shapes[first], shapes[second]
    if not (left and right):  # symbolic sizes, while a step of another shape is compiled
        return {}
    columns = prod(right) // max(prod(right[:-2]) * left[-1], 1)
    return {DTYPES.get(dtypes[first], dtypes[first]): 2 * prod(left) * columns}


def _counters() -> tuple:
    return ways_taken(), compile_facts(), recomputed_layers()
