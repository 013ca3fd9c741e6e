"""`qat bench targets`: compiles every kernel for GPUs that are not here."""

import logging
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from qat.backend.device import on, select
from qat.errors import BenchError, ConfigError
from qat.extensions.bench.measure import Row
from qat.extensions.bench.results import environment
from qat.extensions.lab.config import TargetsConfig
from qat.extensions.lab.kernels.described import (
    GPUS,
    KIB,
    STAND_IN,
    Gpu,
    NotCompiledError,
    standing_in,
)
from qat.extensions.lab.kernels.gates import InputMaker
from qat.extensions.lab.kernels.launches import all_calls
from qat.extensions.lab.kernels.resources import Compiled, most, name_of
from qat.extensions.lab.kernels.run import interprets, record_figures
from qat.files import write_atomically
from qat.kernels.dispatch import HAS_TRITON, triton

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[3]
FALLBACKS = dict.fromkeys(
    ("kernels.attention._forward_kernel", "kernels.attention._backward_kernel",
     "kernels.joined_attention._turn_kernel", "kernels.joined_attention._turn_back_kernel",
     "kernels.block_attention._forward_kernel", "kernels.block_attention._backward_kernel",
     "kernels.block_attention._delta_kernel"),
    "PyTorch's attention",
) | dict.fromkeys(
    (f"nsa.kernels.gather.{name}_kernel" for name in
     ("_score", "_select", "_list", "_forward", "_backward", "_add_up", "_add_blocks")),
    "FlexAttention",
) | {
    "decode.kernels.lut_gemm._gemm_kernel": "the weight is formed, PyTorch multiplies",
    "decode.kernels.lut_gemm._add_kernel": "`_gemm_kernel` without `wgmma`",
    "decode.kernels.lut_wgmma.lay_kernel": "`_gemm_kernel` without `wgmma`",
    "decode.kernels.lut_sums.sums_kernel": "`_matvec_kernel`, `_gemm_kernel`",
    "decode.kernels.packed_attention._packed_kernel": "`slot_attention._attend_kernel`",
}  # fmt: skip
"""The computation that takes the place of a kernel where the package does not choose it."""


@dataclass(frozen=True)
class TargetsReport:
    """The resources that every kernel needs on each GPU, and the launches that fail."""

    gpus: tuple[Gpu, ...]
    kernels: tuple[str, ...]
    """All kernels that the package launches."""
    compiled: dict[Gpu, list[Compiled]]
    failures: dict[Gpu, list[str]]
    """Launches that the package makes on a GPU that cannot make them."""

    def figures(self) -> list[Row]:
        """Return the number of GPUs for which every kernel compiles or has a fallback."""
        count = sum(not self.problems(gpu) for gpu in self.gpus)
        unit = "architectures, all kernels or a named fallback"
        goal = f">= {len(GPUS)}"
        return [{"figure": "kernels_compiled_targets", "value": count, "unit": unit, "goal": goal}]

    def problems(self, gpu: Gpu) -> list[str]:
        """Return the failures on a GPU, kernels that spill more than they may, and those that no
        call reached although nothing computes in their place."""
        reached = {each.kernel for each in self.compiled[gpu]}
        missed = [name for name in self.kernels if name not in reached | FALLBACKS.keys()]
        unreached = [f"{name} is launched by no call of launches.py" for name in missed]
        spilled = [each.excess for each in self.compiled[gpu] if each.excess]
        return self.failures[gpu] + spilled + unreached

    def check(self) -> None:
        """Raise BenchError if a kernel cannot run where the package chooses it.

        Raises:
            BenchError: naming the first one.
        """
        found = [(gpu, problem) for gpu in self.gpus for problem in self.problems(gpu)]
        if found:
            gpu, problem = found[0]
            raise BenchError(
                f"{len(found)} problems, expected none; the first, on {gpu.architecture} "
                f"({gpu.name}): {problem}; let its wrapper choose something else there"
            )

    def rows(self) -> list[Row]:
        """Return a row for each kernel: on each GPU the most registers, spilled bytes and KiB."""
        rows = []
        for name in self.kernels:
            row: Row = {"case": name}
            for gpu in self.gpus:
                launches = [each for each in self.compiled[gpu] if each.kernel == name]
                if launches:
                    row[gpu.architecture] = _cell(launches)
            if len(row) <= len(self.gpus):
                row["fallback"] = FALLBACKS.get(name, "")
            rows.append(row)
        return rows

    def page(self) -> str:
        """Return the rows as a table in Markdown."""
        headings = ["kernel", *(gpu.architecture for gpu in self.gpus), "elsewhere"]
        lines = [headings, ["---", *["---:"] * len(self.gpus), "---"]]
        for row in self.rows():
            cells = [row.get(gpu.architecture, "-") for gpu in self.gpus]
            lines.append([f"`{row['case']}`", *cells, row.get("fallback", "")])
        return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cell(launches: Sequence[Compiled]) -> str:
    """Return the most that launches of a kernel take: registers / spilled bytes / shared KiB."""
    registers, spilled, shared = most(launches).values()
    return f"{registers} / {spilled} / {shared / KIB:.0f}"


def run_targets(config: TargetsConfig) -> TargetsReport:
    """Compile all kernels for the GPUs that `config` names, in several processes.

    Raises:
        ConfigError: Triton is missing or interprets kernels.
    """
    if not HAS_TRITON or interprets():
        raise ConfigError(
            "kernels cannot be compiled here, expected triton without TRITON_INTERPRET=1; install "
            "it, or unset that variable"
        )
    gpus = tuple(gpu for gpu in GPUS if gpu.architecture in config.architectures)
    # spawned: Triton keeps what it compiled in the process
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(config.processes, context, max_tasks_per_child=1) as pool:
        found, failures = (
            dict(zip(gpus, each, strict=True))
            for each in zip(*pool.map(compile_for, gpus), strict=True)
        )
    report = TargetsReport(gpus, tuple(sorted(launched_kernels())), found, failures)
    if config.page is not None:
        write_atomically(config.page, report.page())
    if config.figures is not None:
        record_figures(config.figures, report.figures(), environment(select("cpu"), config))
    return report


def compile_for(gpu: Gpu) -> tuple[list[Compiled], list[str]]:
    """Compile what all calls launch on a GPU, in the dtype that the package chooses there.

    The second result are the calls that failed, and why.
    """
    found: list[Compiled] = []
    failures = []
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        with standing_in(gpu, found.append):
            dtype = on(STAND_IN).dtype("auto")
            for name, call in all_calls(InputMaker(STAND_IN, dtype, dtype, None)):
                try:
                    call()
                except ConfigError as refused:  # a line for the user
                    logger.info("%s, %s: %s", gpu.architecture, name, refused)
                except (NotCompiledError, triton.OutOfResources) as error:
                    failures.append(f"{name}: {error}")
    return found, failures


def launched_kernels() -> set[str]:
    """Return the names of the package's kernels, without the functions that kernels call."""
    functions: list[Any] = []
    for path in sorted(ROOT.rglob("kernels/*.py")):
        if "@triton.jit" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            members = vars(import_module(".".join(parts))).values()
            functions += [each for each in members if isinstance(each, triton.runtime.JITFunction)]
    called = {
        id(function.fn.__globals__.get(name))
        for function in functions
        for name in function.fn.__code__.co_names
    }
    return {name_of(function) for function in functions if id(function) not in called}
