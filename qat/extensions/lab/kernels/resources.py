"""Registers, spilled bytes and shared memory of compiled kernels, and what they may spill."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from qat.kernels.dispatch import HAS_TRITON, triton

OURS = "qat"
"""The namespace of the package's custom operators, and its name."""
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
"""A thread's registers and bytes of local memory in the output of `cuobjdump
--dump-resource-usage`."""
SPILLS = {
    "decode.kernels.decode_attention._split_kernel": {75: 8712},
    "decode.kernels.slot_attention._attend_kernel": {75: 240, 100: 5864},
    "kernels.attention._backward_kernel": {80: 16, 86: 56, 89: 56, 90: 616, 120: 144},
    "kernels.block_attention._backward_kernel": {
        80: 352,
        86: 368,
        89: 368,
        90: 64,
        100: 576,
        120: 464,
    },
    "kernels.block_attention._forward_kernel": {120: 24},
    "kernels.head._gather_dot_kernel": {120: 8},
    "kernels.lut_vectors._choose_kernel": {75: 3344, 80: 8},
    "kernels.lut_vectors._reduce_kernel": {75: 2616},
    "kernels.lut_weight._reduce_kernel": {80: 8, 86: 8, 89: 8},
    "nsa.kernels.decode._split_kernel": {75: 4304},
    "nsa.kernels.gather._backward_kernel": {80: 12824, 90: 656, 100: 104},
}
"""Bytes that a thread of a kernel may spill, by the number of the instruction set: what it spilled
in the configuration that was fastest or the only one to fit. All other kernels spill nothing."""


class Compiled(NamedTuple):
    """The registers and the memory that a compiled kernel needs on a GPU."""

    kernel: str
    """Module and function, as in `kernels.head._merge_kernel`."""
    warps: int
    registers: int
    spilled: int
    """Bytes of a thread's values in memory, because registers do not suffice."""
    shared: int
    """Shared memory of a program."""
    target: int
    """The instruction set as a number, such as 90."""

    @property
    def excess(self) -> str:
        """The complaint about the spilled bytes; "" if the kernel may spill as many."""
        allowed = SPILLS.get(self.kernel, {}).get(self.target, 0)
        if self.spilled <= allowed:
            return ""
        return (
            f"{self.kernel} spills {self.spilled} bytes a thread on sm_{self.target}, not {allowed}"
        )


@contextmanager
def taking(take: Callable[[Compiled], object]) -> Iterator[None]:
    """Hand `take` what each kernel that is launched in the block needs, each variant once."""
    if not HAS_TRITON:
        yield
        return
    run, seen = triton.runtime.jit.JITFunction.run, set()

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        found = run(kernel, *args, **kwargs)
        if id(found) not in seen:
            seen.add(id(found))
            facts = found.metadata
            needs = _resources(found.asm["cubin"])
            arch = facts.target.arch
            take(Compiled(name_of(kernel), facts.num_warps, *needs, facts.shared, arch))
        return found

    with patch.object(triton.runtime.jit.JITFunction, "run", launched):
        yield


def most(compiled: Sequence[Compiled]) -> dict[str, int]:
    """Return the most registers, spilled bytes and shared bytes of kernels, for a row."""
    return {
        name: max(getattr(each, name.removesuffix("_bytes")) for each in compiled)
        for name in ("registers", "spilled_bytes", "shared_bytes")
        if compiled
    }


def name_of(kernel: Any) -> str:
    """Return a kernel's module below `qat` and its function's name."""
    module = kernel.fn.__module__.removeprefix(f"{OURS}.").removeprefix("extensions.")
    return f"{module}.{kernel.fn.__name__}"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = zip(*RESOURCES.findall(text), strict=True)  # of each function
    return max(map(int, registers)), max(map(int, stack))
